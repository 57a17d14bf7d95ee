"""Benchmarks: `kvikk bench latency | throughput | serve`, under vLLM's names for flags and figures.

- `serve`: drives any OpenAI server; read this first.
- `datasets`, `prompts`, `sharegpt`: which prompts are asked.
- `target`, `client`, `answer`, `events`: one request over HTTP, and the stream that answers it.
- `traffic`, `monitor`: when requests are sent, and whether this client was too slow to measure.
- `metrics`: figures from recorded times, a pure function; `report`, `results`, `match` show, keep and compare them.
- `latency`, `throughput`: `kvikk.LLM` in this process.

Invariants: a seed makes the same prompts, character by character; a warm-up leaves no measured prompt in a server's
cache; a stream that broke off is a failed request, never a fast one; speed is shown beside the match of the texts
wherever there is something to compare with.
"""

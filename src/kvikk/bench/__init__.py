"""Benchmarks: `kvikk bench latency | throughput | serve`, under vLLM's names for flags and figures; the GPU in parts.

- `serve`: drives any OpenAI server; read this first.
- `datasets`, `prompts`, `sharegpt`: which prompts are asked.
- `target`, `client`, `answer`, `events`: one request over HTTP, and the stream that answers it.
- `traffic`, `monitor`: when requests are sent, and whether this client was too slow to measure.
- `metrics`: figures from recorded times, a pure function; `report`, `results`, `match` show, keep and compare them.
- `latency`, `throughput`: `kvikk.LLM` in this process; `step`, `churn`: the engine on random weights (`random_engine`).
- `lossless`: the whole cache beside drafts, in `lossless_run`s, told by `lossless_result` with what `lossless_model`
  promises; `replay` draws what is accepted.
- `reclaim`: mixes of requests in little KV memory, with and without policies, made by `reclaim_mix`, served by
  `reclaim_serving`; `texts`: real text without network.
- `attention`: decode attention alone, over `traces` laid out by `decode_cases`, by the routes of `contenders`, timed by
  `decode_timing` and `serving_steps`; `calibrate`, `explain`: the cost model's constants, and what it makes of them.
- `device`: the GPU as a measuring instrument, and the header of a result.

Invariants: a seed makes the same prompts, character by character; a warm-up leaves no measured prompt in a server's
cache; a stream that broke off, or a kernel whose output is wrong, has failed and was never fast; speed is shown beside
the match of the texts wherever there is something to compare with.
"""

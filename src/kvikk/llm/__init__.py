"""The offline front: `LLM` takes text and gives text, over an engine in the same process.

- `llm.LLM`: prompts, chat, streaming; read this first.
- `writer`: from the engine's tokens to a request's texts and results.
- `text`: detokenising and stop strings, one token at a time.
- `outputs`: the results, shaped as vLLM's.

Invariant: the deltas of a text joined are its text; a stop string never shows in part.
"""

from kvikk.llm.llm import LLM
from kvikk.llm.outputs import CompletionOutput, KVUsage, Logprob, RequestOutput, StreamDelta

__all__ = ["LLM", "CompletionOutput", "KVUsage", "Logprob", "RequestOutput", "StreamDelta"]

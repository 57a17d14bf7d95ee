"""kvikk: an LLM inference engine whose subject is its KV cache.

    from kvikk import LLM, SamplingParams

    llm = LLM()
    print(llm.generate("The capital of Norway is", SamplingParams(temperature=0))[0].outputs[0].text)

The package is in layers, and imports point down only: `cli`, `server` and `bench`, `llm`, `chat`, `engine`, `prefix`
and `compress`, `attention`, `memory`, `models`, `grammar`, then `geometry`, `configuration`, `quantities`, `types`,
`errors`. `docs/design/` mirrors it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvikk.version import __version__

if TYPE_CHECKING:
    from kvikk.engine import SamplingParams
    from kvikk.grammar import StructuredOutputsParams
    from kvikk.llm import LLM, CompletionOutput, RequestOutput

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]

_HOMES = {
    "LLM": "kvikk.llm",
    "CompletionOutput": "kvikk.llm",
    "RequestOutput": "kvikk.llm",
    "SamplingParams": "kvikk.engine",
    "StructuredOutputsParams": "kvikk.grammar",
}


def __getattr__(name: str) -> Any:
    """Import the public names when first used: `import kvikk` loads neither torch nor transformers."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvikk' has no attribute {name!r}")

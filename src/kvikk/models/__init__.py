"""Models: from a name to a forward over flattened tokens that hands its attention to a step.

Invariants: a model holds no state of any sequence; attention is an argument (`AttentionStep`), never a global; the
numbers of a token depend on its own row only; a model that is not known to be computed exactly is refused by name.

Read `protocol` first, then `llama` (the own module of the Llama family), `load` (the order of things), and
`transformers_model` with `probe` (every other architecture).
"""

from kvikk.models.llama import LlamaModel
from kvikk.models.load import LoadedModel, TextSide, load_model, load_text_side
from kvikk.models.protocol import AttentionStep, CausalLM
from kvikk.models.spec import ModelSpec
from kvikk.models.toy import toy_model

__all__ = [
    "AttentionStep",
    "CausalLM",
    "LlamaModel",
    "LoadedModel",
    "ModelSpec",
    "TextSide",
    "load_model",
    "load_text_side",
    "toy_model",
]

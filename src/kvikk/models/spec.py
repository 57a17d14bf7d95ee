"""What the engine needs to know of a model besides how to run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvikk.geometry import KVGeometry
from kvikk.types import Numerics


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model's facts, read once at load.

    Args:
        name: as the user gave it.
        architecture: Hugging Face's class name, such as `LlamaForCausalLM`.
        q_heads: query heads (of every layer).
        kv_heads: KV heads of each layer.
        head_dim: width of one head.
        vocabulary: rows of the output head; token ids are below it.
        max_positions: the longest sequence the model (or its sliding window) allows.
        dtype: of weights and of KV as it is computed.
        fingerprint: names weights and config; equal only for equal models.
        rope: canonical text of the rotary config, as it enters prefix keys.
        eos_token_ids: the tokens that end a text.
        numerics: what the model was made for; one for `exact` serves an engine of either.
    """

    name: str
    architecture: str
    q_heads: int
    kv_heads: tuple[int, ...]
    head_dim: int
    vocabulary: int
    max_positions: int
    dtype: torch.dtype
    fingerprint: str
    rope: str
    eos_token_ids: frozenset[int]
    numerics: Numerics = "fast"

    @property
    def layers(self) -> int:
        """Attention layers."""
        return len(self.kv_heads)

    def geometry(self, page_size: int, quantised: torch.dtype | None = None) -> KVGeometry:
        """The KV geometry at a page size, of KV as the model computes it or quantised."""
        return KVGeometry(
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=self.dtype,
            quantised=quantised,
        )

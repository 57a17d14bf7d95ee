"""The sizes of a layer's attention, as benchmarks lay out its KV."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvikk.attention.gpu.cost import DecodeShape
from kvikk.geometry import KVGeometry
from kvikk.models.family import FamilyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One layer's attention, and how its KV is stored.

    Args:
        q_heads, kv_heads, head_dim: of the layer.
        page_size: slots of a frame.
        dtype: of queries and KV.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def lane_bytes(self) -> int:
        """Bytes of K and V of one token in one lane."""
        return 2 * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """The same in all lanes of a layer."""
        return self.kv_heads * self.lane_bytes

    @staticmethod
    def of_model(config: FamilyConfig, page_size: int, dtype: torch.dtype = torch.bfloat16) -> AttentionShape:
        """The attention of a model's layers."""
        return AttentionShape(
            q_heads=config.q_heads, kv_heads=config.kv_heads, head_dim=config.head_dim, page_size=page_size,
            dtype=dtype,
        )  # fmt: skip

    @property
    def decode(self) -> DecodeShape:
        """The same as the cost model names it."""
        return DecodeShape(
            kv_heads=self.kv_heads, group=self.q_heads // self.kv_heads, head_dim=self.head_dim,
            dtype=str(self.dtype).removeprefix("torch."), page_size=self.page_size,
        )  # fmt: skip

    def geometry(self, layers: int) -> KVGeometry:
        """Of a pool of so many layers."""
        return KVGeometry(
            kv_heads=(self.kv_heads,) * layers, head_dim=self.head_dim, page_size=self.page_size, dtype=self.dtype
        )

"""The flat pool: one tensor that holds every frame of every layer and head."""

from __future__ import annotations

import torch
from torch import Tensor

from kvikk.geometry import KVGeometry
from kvikk.types import NULL_BLOCK, BlockId


class KVStore:
    """K and V of all layers, heads and blocks in one allocation, `[frames, 2, page_size, head_dim]`.

    Recycled slots hold whatever was there before, NaN included: readers mask what lies beyond a row's length,
    they never multiply it by zero. The null block is zero and is never written.

    Args:
        geometry: how one block is laid out.
        blocks: blocks in the pool, the null block included.
        device: where it lives.
        memory: the allocation to lie in, flat, of the geometry's dtype and at least of the pool's size; None makes one.
    """

    def __init__(
        self, geometry: KVGeometry, blocks: int, device: torch.device, *, memory: Tensor | None = None
    ) -> None:
        self.geometry = geometry
        self.blocks = blocks
        self.device = device
        g = geometry
        frames = blocks * g.frames_per_block
        if memory is None:
            memory = torch.empty(frames * g.frame_elements, dtype=g.dtype, device=device)
        self.frames: Tensor = memory[: frames * g.frame_elements].view(frames, 2, g.page_size, g.head_dim)
        self._by_block = self.frames.view(blocks, g.frames_per_block, 2, g.page_size, g.head_dim)
        self._by_block[NULL_BLOCK].zero_()

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool."""
        return self.blocks * self.geometry.block_bytes

    def layer(self, layer: int) -> Tensor:
        """A view of one layer: `[blocks, kv_heads, 2, page_size, head_dim]`, strided by whole blocks."""
        first = self.geometry.first_frame[layer]
        return self._by_block[:, first : first + self.geometry.kv_heads[layer]]

    def copy_blocks(self, copies: list[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks, `(source, target)`, in the order given."""
        for source, target in copies:
            self._by_block[target].copy_(self._by_block[source])

    def poison(self) -> None:
        """Fill all but the null block with NaN: tests run on a poisoned pool."""
        self._by_block[1:].fill_(float("nan"))

"""The flat pool: one tensor that holds every frame of every layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from kvikk.geometry import KVGeometry
from kvikk.memory.body import IntArray
from kvikk.memory.compaction import Moves
from kvikk.types import NULL_BLOCK, BlockId

BYTES_IN_THE_AIR: Final = 64 * 2**20
"""About as many are copied at once between frames: the copy lies in memory of its own for a moment."""


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

    @property
    def lanes(self) -> int:
        """Frames of a block."""
        return self.geometry.frames_per_block

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that one token takes over all lanes."""
        return self.geometry.token_bytes

    def layer(self, layer: int) -> Tensor:
        """A view of one layer: `[blocks, kv_heads, 2, page_size, head_dim]`, strided by whole blocks."""
        first = self.geometry.first_frame[layer]
        return self._by_block[:, first : first + self.geometry.kv_heads[layer]]

    def copy_blocks(self, copies: list[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks, `(source, target)`, in the order given."""
        for source, target in copies:
            self._by_block[target].copy_(self._by_block[source])

    def copy_frames(self, sources: IntArray, targets: IntArray) -> None:
        """Copy whole frames, `[frames]` each. No target is a source."""
        if len(sources):
            self.frames[torch.from_numpy(targets).to(self.device)] = self.frames[
                torch.from_numpy(sources).to(self.device)
            ]

    def move(self, moves: Moves) -> None:
        """Copy tokens between frames; see `Moves`."""
        page = self.geometry.page_size
        for span in self._spans(moves.lanes):
            sources, targets = moves.sources[span], moves.targets[span]
            tokens = self.frames[sources // page, :, sources % page]
            self.frames[targets // page, :, targets % page] = tokens

    def _spans(self, lanes: Tensor) -> list[slice]:
        """Cut moves between lanes, so that what is in the air stays small. `lanes`: `[moves]`, ascending."""
        g = self.geometry
        pieces = -(-len(lanes) * (g.frame_bytes // g.page_size) // BYTES_IN_THE_AIR)
        if pieces <= 1:
            return [slice(0, len(lanes))] if len(lanes) else []
        borders = torch.arange(1, pieces, device=lanes.device) * g.frames_per_block // pieces
        cuts = [0, *torch.searchsorted(lanes, borders.to(lanes.dtype)).tolist(), len(lanes)]
        return [slice(start, stop) for start, stop in pairwise(cuts) if start < stop]

    def save(self, frames: IntArray, blocks: Sequence[BlockId]) -> tuple[Tensor, Tensor]:
        """What frames and whole blocks hold, in the host's memory."""
        by_frame = self.frames[torch.from_numpy(frames).to(self.device)]
        by_block = self._by_block[torch.tensor(blocks, dtype=torch.int64, device=self.device)]
        return by_frame.cpu(), by_block.cpu()

    def restore(self, saved: tuple[Tensor, Tensor], frames: IntArray, blocks: Sequence[BlockId]) -> None:
        """Bring back what `save` gave, to as many frames and blocks."""
        by_frame, by_block = saved
        self.frames[torch.from_numpy(frames).to(self.device)] = by_frame.to(self.device)
        self._by_block[torch.tensor(blocks, dtype=torch.int64, device=self.device)] = by_block.to(self.device)

    def poison(self) -> None:
        """Fill all but the null block with NaN: tests run on a poisoned pool."""
        self._by_block[1:].fill_(float("nan"))

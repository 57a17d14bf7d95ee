"""The flat pool: one tensor that holds every frame of every layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from kvikk.geometry import SCALE_BYTES, KVGeometry
from kvikk.memory.body import IntArray
from kvikk.memory.compaction import Moves
from kvikk.memory.quantise import dequantise, quantise
from kvikk.types import NULL_BLOCK, BlockId

BYTES_IN_THE_AIR: Final = 64 * 2**20
"""About as many are copied at once between frames: the copy lies in memory of its own for a moment."""


class KVStore:
    """K and V of all layers, heads and blocks in one allocation, a frame after the other.

    A frame is `page_size` rows of K, then of V, as `[2, page_size, head_dim]`. Where they are quantised, their scales
    lie behind them as `[2, page_size]` fp32, so that a frame, and a block, is still one run of bytes.

    Recycled slots hold whatever was there before, NaN included: readers mask what lies beyond a row's length,
    they never multiply it by zero. The null block is zero and is never written.

    Args:
        geometry: how one block is laid out.
        blocks: blocks in the pool, the null block included.
        device: where it lives.
        memory: the allocation to lie in, flat, of the geometry's stored dtype and at least of the pool's size; None
            makes one.
    """

    def __init__(
        self, geometry: KVGeometry, blocks: int, device: torch.device, *, memory: Tensor | None = None
    ) -> None:
        self.geometry = geometry
        self.blocks = blocks
        self.device = device
        g = geometry
        frames, numbers = blocks * g.frames_per_block, g.frame_bytes // g.stored.itemsize
        if memory is None:
            memory = torch.empty(frames * numbers, dtype=g.stored, device=device)
        rows = memory[: frames * numbers].view(frames, numbers)
        self.words: Tensor = rows.view(torch.int32)
        """All bytes, `[frames, frame_bytes / 4]` int32: for copies, which need not know the format."""
        self.frames: Tensor = rows[:, : g.frame_elements].view(frames, 2, g.page_size, g.head_dim)
        """The numbers as they are stored, `[frames, 2, page_size, head_dim]`, without the scales."""
        self.scales: Tensor | None = None
        """`[frames, 2, page_size]` fp32; None: the numbers are K and V themselves."""
        if g.quantised is not None:
            scales = self.words.view(torch.float32)[:, g.number_bytes // SCALE_BYTES :]
            self.scales = scales.view(frames, 2, g.page_size)
        self._blocks_of_words = self.words.view(blocks, -1)
        self._blocks_of_words[NULL_BLOCK].zero_()

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
        """The stored numbers of one layer: a view `[blocks, kv_heads, 2, page_size, head_dim]`."""
        return self._of_layer(self.frames, layer)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store K and V, `[tokens, kv_heads, head_dim]` each, at `slots` `[tokens]` int64 of one layer."""
        page = self.geometry.page_size
        block, offset = slots // page, slots % page
        target = self.layer(layer)
        for part, x in enumerate((k, v)):
            if self.scales is None:
                target[block, :, part, offset] = x.to(target.dtype)
            else:
                numbers, scales = quantise(x, target.dtype)
                target[block, :, part, offset] = numbers
                self._of_layer(self.scales, layer)[block, :, part, offset] = scales

    def read(self, frames: Tensor) -> Tensor:
        """K and V of whole frames, `[..., 2, page_size, head_dim]`, in fp32 where they are quantised.

        Args:
            frames: `[...]` int64, on the pool's device.
        """
        numbers = self.frames[frames]
        return numbers if self.scales is None else dequantise(numbers, self.scales[frames])

    def keys(self, frames: Tensor) -> Tensor:
        """K of whole frames, `[..., page_size, head_dim]`: half of what `read` gives."""
        return self._part(frames, 0)

    def values(self, frames: Tensor) -> Tensor:
        """V of whole frames, `[..., page_size, head_dim]`: the other half."""
        return self._part(frames, 1)

    def copy_blocks(self, copies: list[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks, `(source, target)`, in the order given."""
        for source, target in copies:
            self._blocks_of_words[target].copy_(self._blocks_of_words[source])

    def copy_frames(self, sources: IntArray, targets: IntArray) -> None:
        """Copy whole frames, `[frames]` each. No target is a source."""
        if len(sources):
            self.words[self._ids(targets)] = self.words[self._ids(sources)]

    def move(self, moves: Moves) -> None:
        """Copy tokens between frames; see `Moves`."""
        page = self.geometry.page_size
        for span in self._spans(moves.lanes):
            sources, targets = moves.sources[span], moves.targets[span]
            for part in (self.frames, self.scales):
                if part is not None:
                    part[targets // page, :, targets % page] = part[sources // page, :, sources % page]

    def save(self, frames: IntArray, blocks: Sequence[BlockId]) -> tuple[Tensor, Tensor]:
        """What frames and whole blocks hold, in the host's memory."""
        return self.words[self._ids(frames)].cpu(), self._blocks_of_words[self._ids(blocks)].cpu()

    def restore(self, saved: tuple[Tensor, Tensor], frames: IntArray, blocks: Sequence[BlockId]) -> None:
        """Bring back what `save` gave, to as many frames and blocks."""
        by_frame, by_block = saved
        self.words[self._ids(frames)] = by_frame.to(self.device)
        self._blocks_of_words[self._ids(blocks)] = by_block.to(self.device)

    def poison(self) -> None:
        """Fill all but the null block with NaN, in scales too: tests run on a poisoned pool."""
        first = self.lanes
        self.frames[first:].fill_(float("nan") if self.geometry.stored.is_floating_point else -128)
        if self.scales is not None:
            self.scales[first:].fill_(float("nan"))

    def _of_layer(self, of_frames: Tensor, layer: int) -> Tensor:
        first = self.geometry.first_frame[layer]
        by_block = of_frames.view(self.blocks, self.lanes, *of_frames.shape[1:])
        return by_block[:, first : first + self.geometry.kv_heads[layer]]

    def _part(self, frames: Tensor, part: int) -> Tensor:
        numbers = self.frames[frames, part]
        return numbers if self.scales is None else dequantise(numbers, self.scales[frames, part])

    def _ids(self, numbers: IntArray | Sequence[int]) -> Tensor:
        return torch.as_tensor(numbers, dtype=torch.int64, device=self.device)

    def _spans(self, lanes: Tensor) -> list[slice]:
        """Cut moves between lanes, so that what is in the air stays small. `lanes`: `[moves]`, ascending."""
        g = self.geometry
        pieces = -(-len(lanes) * (g.frame_bytes // g.page_size) // BYTES_IN_THE_AIR)
        if pieces <= 1:
            return [slice(0, len(lanes))] if len(lanes) else []
        borders = torch.arange(1, pieces, device=lanes.device) * g.frames_per_block // pieces
        cuts = [0, *torch.searchsorted(lanes, borders.to(lanes.dtype)).tolist(), len(lanes)]
        return [slice(start, stop) for start, stop in pairwise(cuts) if start < stop]

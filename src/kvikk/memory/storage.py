"""The flat pool: one tensor that holds every frame of every layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvikk.geometry import INT4, SCALE_BYTES, KVGeometry
from kvikk.memory.body import IntArray
from kvikk.memory.compaction import Compaction, Held, Keep, Packed, moves
from kvikk.memory.quantise import pack, unpack
from kvikk.memory.upload import Staging
from kvikk.types import NULL_BLOCK, BlockId

BYTES_IN_THE_AIR: Final = 64 * 2**20
"""About as many are copied at once between frames: the copy lies in memory of its own for a moment."""


class KVStore:
    """K and V of all layers, heads and blocks in one allocation, a frame after the other.

    A frame is `page_size` rows of K, then of V, as `[2, page_size, head_dim]`. Where they are quantised, their scales
    lie behind them as `[2, page_size]` fp32, so that a frame, and a block, is still one run of bytes. In int4 a row is
    `head_dim / 2` bytes, and its scales are two: `[2, page_size, 2]`.

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
        self.frames: Tensor = rows[:, : g.frame_elements].view(frames, 2, g.page_size, g.row_elements)
        """What is stored without the scales, `[frames, 2, page_size, row_elements]`."""
        self.scales: Tensor | None = None
        """`[frames, 2, page_size]` fp32, `[frames, 2, page_size, 2]` in int4; None: K and V themselves are stored."""
        if g.quantised is not None:
            scales = self.words.view(torch.float32)[:, g.number_bytes // SCALE_BYTES :]
            self.scales = scales.view(frames, 2, g.page_size, *([g.row_scales] if g.quantised is INT4 else []))
        self._token_rows = self._rows_of(self.words)
        self._staging = Staging(device)
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
        """What is stored of one layer, without scales: a view `[blocks, kv_heads, 2, page_size, row_elements]`."""
        return self._of_layer(self.frames, layer)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store K and V, `[tokens, kv_heads, head_dim]` each, at `slots` `[tokens]` int64 of one layer."""
        page = self.geometry.page_size
        block, offset = slots // page, slots % page
        target = self.layer(layer)
        for part, x in enumerate((k, v)):
            if self.scales is None or self.geometry.quantised is None:
                target[block, :, part, offset] = x.to(target.dtype)
            else:
                numbers, scales = pack(x, part, self.geometry.quantised)
                target[block, :, part, offset] = numbers
                self._of_layer(self.scales, layer)[block, :, part, offset] = scales

    def read(self, frames: Tensor) -> Tensor:
        """K and V of whole frames, `[..., 2, page_size, head_dim]`, in fp32 where they are quantised.

        Args:
            frames: `[...]` int64, on the pool's device.
        """
        if self.scales is None:
            return self.frames[frames]
        return torch.stack((self.keys(frames), self.values(frames)), dim=-3)

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

    @torch.inference_mode()
    def pack(self, held: Held, keep: Keep, plan: Compaction, *, wants_order: bool = False) -> Packed:
        """Copy what is kept to where it was planned to lie, in its order. Does not wait for the device.

        Args:
            held: the row's slots.
            keep: which of them stay: in each lane as many as the plan says.
            plan: the frames that they go to.
            wants_order: also say which slots these were.
        """
        if self.words.is_cuda:
            return self._pack_by_kernel(held, keep, plan, wants_order=wants_order)
        packed, places = moves(held, keep, plan)
        for lanes in self._spans(plan.counts):
            span = slice(int(plan.counts[: lanes.start].sum()), int(plan.counts[: lanes.stop].sum()))
            frame, offset, to_frame, to_offset = places[:, span].unbind()
            for rows in self._token_rows:
                rows[to_frame, :, to_offset] = rows[frame, :, offset]
        return packed

    def _pack_by_kernel(self, held: Held, keep: Keep, plan: Compaction, *, wants_order: bool) -> Packed:
        """One upload and one kernel, where lanes can be packed from their fronts to their ends. Else what is kept is
        copied to other memory first, some lanes at a time, and from there to its frames.
        """
        from kvikk.memory.gpu.pack import Packing  # imports triton
        from kvikk.memory.gpu.pack import pack as pack_on_gpu

        packing = Packing(held, keep, self.geometry.page_size, *self._told(held, keep, plan))
        packed = packing.outputs(plan.frames.shape[1], wants_order=wants_order)
        if plan.is_in_order:
            pack_on_gpu(packing, packed, self._token_rows, self._token_rows)
            return packed
        for lanes in self._spans(plan.counts):
            some = plan.frames[lanes]
            aside = self.words.new_empty((some.size, self.words.shape[1]))
            pack_on_gpu(packing, packed, self._token_rows, self._rows_of(aside), lanes)
            is_filled = np.arange(some.shape[1]) < -(-plan.counts[lanes, None] // self.geometry.page_size)
            self.words[self._ids(some[is_filled])] = aside[self._ids(np.flatnonzero(is_filled))]
        return packed

    def _told(self, held: Held, keep: Keep, plan: Compaction) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a kernel is told of a row: frames before and after, and how many each lane keeps, and has in its body.

        By one upload; by none where the device knows the frames, and no others come after.
        """
        if held.is_told and plan.is_cut and isinstance(keep, Tensor):  # counts are in `keep`, lengths in positions
            return held.table, held.table, held.table[:, 0], held.table[:, 0]
        numbers = [plan.counts[:, None], held.lengths[:, None]]
        if not held.is_told:
            numbers.append(held.frames)
        if not plan.is_cut:
            numbers.append(plan.frames)
        told = self._staging.upload(np.concatenate(numbers, axis=1))
        before = held.table if held.is_told else told[:, 2:]
        return before, before if plan.is_cut else told[:, -plan.frames.shape[1] :], told[:, 0], told[:, 1]

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
        stored = self.geometry.stored
        self.frames[first:].fill_(float("nan") if stored.is_floating_point else torch.iinfo(stored).min)
        if self.scales is not None:
            self.scales[first:].fill_(float("nan"))

    def _rows_of(self, words: Tensor) -> list[Tensor]:
        """What tokens have in frames: numbers and scales, `[frames, 2, page_size, ...]`, in words of any type.

        Args:
            words: `[frames, frame_bytes / 4]` int32.
        """
        g = self.geometry
        numbers = words.view(g.stored)[:, : g.frame_elements].view(len(words), 2, g.page_size, g.row_elements)
        rows = [numbers.view(_widest(g.row_elements * g.stored.itemsize, g.frame_bytes))]
        if g.quantised is not None:
            rows.append(words[:, g.number_bytes // SCALE_BYTES :].view(len(words), 2, g.page_size, -1))
        return rows

    def _of_layer(self, of_frames: Tensor, layer: int) -> Tensor:
        first = self.geometry.first_frame[layer]
        by_block = of_frames.view(self.blocks, self.lanes, *of_frames.shape[1:])
        return by_block[:, first : first + self.geometry.kv_heads[layer]]

    def _part(self, frames: Tensor, part: int) -> Tensor:
        if self.scales is None or self.geometry.quantised is None:
            return self._token_rows[0][frames, part].view(self.frames.dtype)
        numbers = self.frames[frames, part]
        return unpack(numbers, self.scales[frames, part], part, self.geometry.quantised)

    def _ids(self, numbers: IntArray | Sequence[int]) -> Tensor:
        return self._staging.upload(np.asarray(numbers, dtype=np.int64))

    def _spans(self, counts: IntArray) -> list[slice]:
        """Cut the lanes so that what is in the air of tokens that move stays small. `counts`: `[lanes]`."""
        g = self.geometry
        pieces = max(1, -(-int(counts.sum()) * (g.frame_bytes // g.page_size) // BYTES_IN_THE_AIR))
        cuts = (np.arange(pieces + 1) * len(counts) // pieces).tolist()
        return [slice(start, stop) for start, stop in pairwise(cuts) if start < stop]


def _widest(*sizes: int) -> torch.dtype:
    """The widest integer that fills all these bytes: the fewer words, the less it takes to copy them."""
    words = (torch.int64, torch.int32, torch.int16)
    return next((word for word in words if not any(size % word.itemsize for size in sizes)), torch.int8)

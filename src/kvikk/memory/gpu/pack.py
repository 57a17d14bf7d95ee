"""Says where kept slots go when a row is compacted: see `memory.compaction.pack`, its twin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.memory.compaction import NO_POSITION

SLOTS_AT_ONCE = 2048


def pack(
    keep: Tensor, positions: Tensor, before: Tensor, after: Tensor, first: Tensor, *, kept: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each kept slot goes, when those of a lane are packed in their order; see `memory.compaction.pack`.

    Args:
        keep: `[lanes, slots]` bool, the slots of a lane next to one another, as all tables have their columns.
        positions: `[lanes, slots]` int64.
        before, after: `[lanes, columns]` int64.
        first: `[lanes]` int64.
        kept: how many all lanes keep.
        page_size: slots of a frame.
    """
    (lanes, slots), width = keep.shape, after.shape[1] * page_size
    tables = (keep, positions, before, after)
    if before.shape[1] * page_size < slots or any(table.stride(1) != 1 for table in tables):
        raise ValueError(f"{slots} slots do not lie in {before.shape[1]} frames of {page_size}, or columns lie apart")
    order = torch.empty((lanes, width), dtype=torch.int64, device=keep.device)
    packed = torch.empty((lanes, width), dtype=torch.int32, device=keep.device)
    places = torch.empty((4, kept), dtype=torch.int64, device=keep.device)
    _pack[(lanes,)](
        keep, keep.stride(0), positions, positions.stride(0), before, before.stride(0), after, after.stride(0),
        first, first.stride(0), order, packed, places, slots, width, kept,
        PAGE=page_size, SLOTS=SLOTS_AT_ONCE, NO_POSITION=NO_POSITION, num_warps=8,
    )  # fmt: skip
    return order, packed, places


@triton.jit(
    do_not_specialize=["slots", "width", "kept", "keep_stride", "position_stride", "before_stride", "after_stride"]
)
def _pack(
    keep, keep_stride, positions, position_stride, before, before_stride, after, after_stride, first, first_stride,
    order, packed, places, slots, width, kept, PAGE: tl.constexpr, SLOTS: tl.constexpr, NO_POSITION: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    begin = tl.load(first + lane * first_stride)
    order += lane * width
    packed += lane * width
    done = tl.zeros((), dtype=tl.int32)
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        is_kept = tl.load(keep + lane * keep_stride + slot, mask=slot < slots, other=0) != 0
        one = is_kept.to(tl.int32)
        place = done + tl.cumsum(one, axis=0) - one
        position = tl.load(positions + lane * position_stride + slot, mask=is_kept, other=0)
        source = tl.load(before + lane * before_stride + slot // PAGE, mask=is_kept, other=0)
        target = tl.load(after + lane * after_stride + place // PAGE, mask=is_kept, other=0)
        tl.store(order + place, slot.to(tl.int64), mask=is_kept)
        tl.store(packed + place, position.to(tl.int32), mask=is_kept)
        move = places + begin + place
        tl.store(move, source, mask=is_kept)
        tl.store(move + kept, (slot % PAGE).to(tl.int64), mask=is_kept)
        tl.store(move + 2 * kept, target, mask=is_kept)
        tl.store(move + 3 * kept, (place % PAGE).to(tl.int64), mask=is_kept)
        done += tl.sum(one, axis=0)
    for start in range(done, width, SLOTS):
        place = start + tl.arange(0, SLOTS)
        tl.store(order + place, tl.zeros((SLOTS,), dtype=tl.int64), mask=place < width)
        tl.store(packed + place, tl.full((SLOTS,), NO_POSITION, dtype=tl.int32), mask=place < width)

"""Says where kept slots go when a row is compacted: see `memory.compaction.pack`, its twin."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SLOTS_AT_ONCE = 2048


def pack(
    keep: Tensor, before: Tensor, after: Tensor, first: Tensor, *, kept: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each kept slot goes, when those of a lane are packed in their order; see `memory.compaction.pack`.

    Args:
        keep: `[lanes, slots]` bool, the slots of a lane next to one another, as all tables have their columns.
        before, after: `[lanes, columns]` int64.
        first: `[lanes]` int64.
        kept: how many all lanes keep.
        page_size: slots of a frame.
    """
    (lanes, slots), width = keep.shape, after.shape[1] * page_size
    if before.shape[1] * page_size < slots or not keep.stride(1) == before.stride(1) == after.stride(1) == 1:
        raise ValueError(f"{slots} slots do not lie in {before.shape[1]} frames of {page_size}, or columns lie apart")
    order = torch.zeros((lanes, width), dtype=torch.int64, device=keep.device)
    sources, targets = torch.empty((2, kept), dtype=torch.int64, device=keep.device)
    _pack[(lanes,)](
        keep, keep.stride(0), before, before.stride(0), after, after.stride(0), first, first.stride(0),
        order, sources, targets, slots, width, PAGE=page_size, SLOTS=SLOTS_AT_ONCE, num_warps=8,
    )  # fmt: skip
    return order, sources, targets


@triton.jit(do_not_specialize=["slots", "width", "keep_stride", "before_stride", "after_stride"])
def _pack(
    keep, keep_stride, before, before_stride, after, after_stride, first, first_stride, order, sources, targets,
    slots, width, PAGE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0).to(tl.int64)
    begin = tl.load(first + lane * first_stride)
    packed = tl.zeros((), dtype=tl.int32)
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        is_kept = tl.load(keep + lane * keep_stride + slot, mask=slot < slots, other=0) != 0
        one = is_kept.to(tl.int32)
        place = packed + tl.cumsum(one, axis=0) - one
        source = tl.load(before + lane * before_stride + slot // PAGE, mask=is_kept, other=0)
        target = tl.load(after + lane * after_stride + place // PAGE, mask=is_kept, other=0)
        tl.store(order + lane * width + place, slot.to(tl.int64), mask=is_kept)
        tl.store(sources + begin + place, source * PAGE + slot % PAGE, mask=is_kept)
        tl.store(targets + begin + place, target * PAGE + place % PAGE, mask=is_kept)
        packed += tl.sum(one, axis=0)

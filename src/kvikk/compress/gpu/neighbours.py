"""Pools over live neighbours where dead slots lie between them: see `LayerSlots.pool`, whose twin it is."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SLOTS_AT_ONCE = 2048


def pool(values: Tensor, live: Tensor, width: int, *, is_mean: bool) -> Tensor:
    """Mean or maximum over `width` live neighbours, for slots in the order of the text; see `LayerSlots.pool`.

    Args:
        values: `[lanes, slots]` fp32.
        live: the same shape, bool.
        width: slots in a window, its centre included; odd.
        is_mean: zeros count beyond a lane's ends; else it is the maximum.
    """
    lanes, slots = values.shape
    packed, pooled = (torch.empty((lanes, slots), dtype=torch.float32, device=values.device) for _ in range(2))
    _pool[(lanes,)](
        values.contiguous(), live.contiguous(), packed, pooled, slots, width,
        IS_MEAN=is_mean, SLOTS=SLOTS_AT_ONCE, num_warps=8,
    )  # fmt: skip
    return pooled


@triton.jit
def _places(live, start, slots, done, SLOTS: tl.constexpr):
    """Of some slots: which they are, which live, and the place of each of these among all that do."""
    slot = start + tl.arange(0, SLOTS)
    is_live = tl.load(live + slot, mask=slot < slots, other=0) != 0
    one = is_live.to(tl.int32)
    return slot, is_live, done + tl.cumsum(one, axis=0) - one, done + tl.sum(one, axis=0)


@triton.jit(do_not_specialize=["slots", "width"])
def _pool(values, live, packed, pooled, slots, width, IS_MEAN: tl.constexpr, SLOTS: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64)
    values += lane * slots
    live += lane * slots
    packed += lane * slots
    pooled += lane * slots
    living = tl.zeros((), dtype=tl.int32)
    for start in range(0, slots, SLOTS):
        slot, is_live, place, living = _places(live, start, slots, living, SLOTS)
        tl.store(packed + place, tl.load(values + slot, mask=is_live, other=0.0), mask=is_live)
    tl.debug_barrier()  # what one thread has packed others read
    done = tl.zeros((), dtype=tl.int32)
    for start in range(0, slots, SLOTS):
        slot, is_live, place, done = _places(live, start, slots, done, SLOTS)
        found = tl.full((SLOTS,), 0.0 if IS_MEAN else float("-inf"), dtype=tl.float32)
        for shift in range(width):
            at = place + shift - width // 2
            inside = is_live & (at >= 0) & (at < living)
            if IS_MEAN:
                found += tl.load(packed + at, mask=inside, other=0.0)
            else:
                value = tl.load(packed + at, mask=inside, other=float("-inf"))
                found = tl.maximum(found, value, propagate_nan=tl.PropagateNan.ALL)
        tl.store(pooled + slot, found / width if IS_MEAN else found, mask=is_live)

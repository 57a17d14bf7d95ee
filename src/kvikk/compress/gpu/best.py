"""Finds what stays of each lane without sorting it: see `compress.select.keep_mask`, its twin.

Score and position make one number of 63 bits for each slot, the best first, no two of a lane the same. The border below
which as many lie as are to stay is found bit by bit, by counting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.compress.slots import LayerSlots

SLOTS_AT_ONCE = 8192


def keep_mask(scores: Tensor, slots: LayerSlots, counts: Tensor | int, protected: Tensor) -> Tensor:
    """Which slots stay: those that are protected, and the best of the others; see `select.keep_mask`.

    Args:
        scores: `[kv_heads, slots]` fp32.
        slots: which token each slot holds.
        counts: slots that each KV head keeps: `[kv_heads]` int64, or one number for all.
        protected: `[kv_heads, slots]` bool, live slots only.
    """
    lanes, columns = scores.shape
    if isinstance(counts, int):
        counts = torch.full((lanes,), counts, device=scores.device)
    kept = torch.empty((lanes, columns), dtype=torch.bool, device=scores.device)
    inputs = [each.contiguous() for each in (scores, slots.positions, slots.live, protected, counts)]
    _keep[(lanes,)](*inputs, kept, columns, SLOTS=SLOTS_AT_ONCE, num_warps=16)
    return kept


@triton.jit
def _load(scores, positions, live, protected, start, slots, SLOTS: tl.constexpr):
    """The numbers of some slots, which of these may stay, and which do so in any case."""
    slot = start + tl.arange(0, SLOTS)
    inside = slot < slots
    bits = tl.load(scores + slot, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    bits = tl.where((bits << 1) == 0, 0, bits)  # -0.0 becomes 0.0: they are equal
    ascending = bits ^ (bits >> 31 & 0x7FFFFFFF)
    position = tl.load(positions + slot, mask=inside, other=0)
    is_protected = tl.load(protected + slot, mask=inside, other=0) != 0
    is_free = (tl.load(live + slot, mask=inside, other=0) != 0) & ~is_protected
    return (0x7FFFFFFF - ascending.to(tl.int64)) << 31 | position, is_free, is_protected


@triton.jit(do_not_specialize=["slots"])
def _keep(scores, positions, live, protected, counts, kept, slots, SLOTS: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64)
    scores += lane * slots
    positions += lane * slots
    live += lane * slots
    protected += lane * slots
    own = tl.zeros((), dtype=tl.int32)
    free = tl.zeros((), dtype=tl.int32)
    for start in range(0, slots, SLOTS):
        _, is_free, is_protected = _load(scores, positions, live, protected, start, slots, SLOTS)
        own += tl.sum(is_protected.to(tl.int32), axis=0)
        free += tl.sum(is_free.to(tl.int32), axis=0)
    wanted = tl.minimum(tl.maximum(tl.load(counts + lane).to(tl.int32) - own, 0), free)
    border = tl.zeros((), dtype=tl.int64)
    below = tl.zeros((), dtype=tl.int32)
    step = tl.full((), 1 << 62, dtype=tl.int64)
    while (below != wanted) & (step != 0):
        count = tl.zeros((), dtype=tl.int32)
        for start in range(0, slots, SLOTS):
            number, is_free, _ = _load(scores, positions, live, protected, start, slots, SLOTS)
            count += tl.sum((is_free & (number < border + step)).to(tl.int32), axis=0)
        border = tl.where(count <= wanted, border + step, border)
        below = tl.where(count <= wanted, count, below)
        step = step >> 1
    for start in range(0, slots, SLOTS):
        number, is_free, is_protected = _load(scores, positions, live, protected, start, slots, SLOTS)
        slot = start + tl.arange(0, SLOTS)
        tl.store(kept + lane * slots + slot, is_protected | (is_free & (number < border)), mask=slot < slots)

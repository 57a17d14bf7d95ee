"""Finds what stays of each lane without sorting it: see `keep_mask` and `keep_best` of `compress.select`, its twins.

Score and position make one number of 63 bits for each slot, the best first, no two of a lane the same. The border below
which as many lie as are to stay is found bit by bit, by counting.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.compress.slots import LayerSlots

SLOTS_AT_ONCE = (4096, 8192)
"""Of a lane: the first that is enough, so that it is read once; where it has more it is read again for every bit."""


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
    _keep[(lanes,)](*inputs, 0, 0, kept, kept, columns, GIVEN=True, **_sizes(columns))
    return kept


def keep_best(scores: Tensor, slots: LayerSlots, count: int, *, sinks: int, window: int) -> tuple[Tensor, Tensor]:
    """The same for sinks and a window, with the number of slots that were not scored.

    Takes and gives what `select.keep_best` does.
    """
    lanes, columns = scores.shape
    kept = torch.empty((lanes, columns), dtype=torch.bool, device=scores.device)
    unscored = torch.empty(lanes, dtype=torch.int64, device=scores.device)
    given, positions, live = (each.contiguous() for each in (scores, slots.positions, slots.live))
    _keep[(lanes,)](
        given, positions, live, live, count, sinks, slots.length - window, kept, unscored, columns,
        GIVEN=False, **_sizes(columns),
    )  # fmt: skip
    return kept, unscored


def _sizes(columns: int) -> dict[str, Any]:
    at_once = next((size for size in SLOTS_AT_ONCE if size >= columns), SLOTS_AT_ONCE[-1])
    return {"SLOTS": at_once, "ONCE": columns <= at_once, "num_warps": max(1, at_once // 512)}


@triton.jit
def _load(
    scores, positions, live, protected, sinks, recent, start, slots, GIVEN: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """The numbers of some slots, which of these may stay, which do so in any case, and which were not scored."""
    slot = start + tl.arange(0, SLOTS)
    inside = slot < slots
    score = tl.load(scores + slot, mask=inside, other=0.0)
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where((bits << 1) == 0, 0, bits)  # -0.0 becomes 0.0: they are equal
    ascending = bits ^ (bits >> 31 & 0x7FFFFFFF)
    position = tl.load(positions + slot, mask=inside, other=0)
    is_live = tl.load(live + slot, mask=inside, other=0) != 0
    if GIVEN:
        is_protected = tl.load(protected + slot, mask=inside, other=0) != 0
    else:
        is_protected = is_live & ((position < sinks) | (position >= recent))
    number = (0x7FFFFFFF - ascending.to(tl.int64)) << 31 | position
    return number, is_live & ~is_protected, is_protected, is_live & ~(score < float("inf"))


@triton.jit
def _border(number, wanted):
    """The number below which as many of these lie as are wanted: its first bit by itself, then two at a time."""
    top = tl.full((), 1 << 62, dtype=tl.int64)
    found = tl.sum((number < top).to(tl.int32), axis=0)
    border = tl.where(found <= wanted, top, 0)
    below = tl.where(found <= wanted, found, 0)
    step = tl.full((), 1 << 60, dtype=tl.int64)
    while (below != wanted) & (step != 0):
        first = (number < border + step).to(tl.int64)
        second = (number < border + 2 * step).to(tl.int64)
        third = (number < border + 3 * step).to(tl.int64)
        counts = tl.sum(first + (second << 20) + (third << 40), axis=0)  # three of less than 2**20 in one sum
        for each in tl.static_range(3):
            count = (counts >> (20 * each) & 0xFFFFF).to(tl.int32)
            border = tl.where(count <= wanted, border + step, border)
            below = tl.where(count <= wanted, count, below)
        step = step >> 2
    return border


@triton.jit(do_not_specialize=["counts", "sinks", "recent", "slots"])
def _keep(
    scores, positions, live, protected, counts, sinks, recent, kept, unscored, slots,
    GIVEN: tl.constexpr, ONCE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Sinks and what is recent from a position on are protected, or what is `GIVEN`: then `counts` is of each lane.
    A lane that fits is read `ONCE`."""
    lane = tl.program_id(0).to(tl.int64)
    scores += lane * slots
    positions += lane * slots
    live += lane * slots
    protected += lane * slots
    kept += lane * slots
    own = tl.zeros((), dtype=tl.int32)
    free = tl.zeros((), dtype=tl.int32)
    bad = tl.zeros((), dtype=tl.int32)
    for start in range(0, slots, SLOTS):
        number, is_free, is_protected, is_bad = _load(
            scores, positions, live, protected, sinks, recent, start, slots, GIVEN, SLOTS
        )
        own += tl.sum(is_protected.to(tl.int32), axis=0)
        free += tl.sum(is_free.to(tl.int32), axis=0)
        bad += tl.sum(is_bad.to(tl.int32), axis=0)
    if GIVEN:
        count = tl.load(counts + lane).to(tl.int32)
    else:
        count = counts
        tl.store(unscored + lane, bad.to(tl.int64))
    wanted = tl.minimum(tl.maximum(count - own, 0), free)
    if ONCE:
        number, is_free, is_protected, _ = _load(
            scores, positions, live, protected, sinks, recent, 0, slots, GIVEN, SLOTS
        )
        number = tl.where(is_free, number, 0x7FFFFFFFFFFFFFFF)
        slot = tl.arange(0, SLOTS)
        tl.store(kept + slot, is_protected | (number < _border(number, wanted)), mask=slot < slots)
    else:
        border = tl.zeros((), dtype=tl.int64)
        below = tl.zeros((), dtype=tl.int32)
        step = tl.full((), 1 << 62, dtype=tl.int64)
        while (below != wanted) & (step != 0):
            found = tl.zeros((), dtype=tl.int32)
            for start in range(0, slots, SLOTS):
                number, is_free, _, _ = _load(
                    scores, positions, live, protected, sinks, recent, start, slots, GIVEN, SLOTS
                )
                found += tl.sum((is_free & (number < border + step)).to(tl.int32), axis=0)
            border = tl.where(found <= wanted, border + step, border)
            below = tl.where(found <= wanted, found, below)
            step = step >> 1
        for start in range(0, slots, SLOTS):
            number, is_free, is_protected, _ = _load(
                scores, positions, live, protected, sinks, recent, start, slots, GIVEN, SLOTS
            )
            slot = start + tl.arange(0, SLOTS)
            tl.store(kept + slot, is_protected | (is_free & (number < border)), mask=slot < slots)

"""Packs what a row keeps: says where each slot goes, and moves it. The twins are in `memory.compaction`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.memory.compaction import NO_POSITION, Ends, Held, Keep, Packed

BYTES_AT_ONCE = 2**15
"""Of K, or of V, that a program holds in registers."""
SLOTS_AT_ONCE = 2048
"""That are laid out by a program."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What a kernel must know to pack a row.

    Args:
        held: the row's slots.
        keep: which of them stay.
        page_size: slots of a frame.
        before, after: `[lanes, columns or more]` int64, frames that slots lie in, and those that they go to.
        counts: `[lanes]` int64, how many each lane keeps; anything where `keep` says it slot by slot.
        lengths: `[lanes]` int64, live slots of the body; as `counts`.
    """

    held: Held
    keep: Keep
    page_size: int
    before: Tensor
    after: Tensor
    counts: Tensor
    lengths: Tensor

    def outputs(self, columns: int, *, wants_order: bool) -> Packed:
        """To be filled, for so many columns of frames."""
        shape = len(self.after), columns * self.page_size
        positions = torch.empty(shape, dtype=torch.int32, device=self.after.device)
        return Packed(positions, torch.empty_like(positions, dtype=torch.int64) if wants_order else None)


def pack(
    packing: Packing,
    packed: Packed,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    lanes: slice | None = None,
) -> None:
    """Copy what is kept, and fill `packed`.

    Args:
        packing: what.
        packed: what is told of the slots afterwards.
        sources: `[frames, 2, page_size, words]` each, numbers, and scales where there are any.
        targets: the same tensors: then nothing must lie where it is written over before it was read. Or others, of the
            frames of these lanes, one after the other: `[lanes * columns, 2, page_size, words]`.
        lanes: that are packed; None: all.

    Raises:
        ValueError: slots beyond the frames, or columns that lie apart.
    """
    held, keep, page = packing.held, packing.keep, packing.page_size
    before, after = packing.before, packing.after
    mask = keep if isinstance(keep, Tensor) else before
    slots = held.slots if isinstance(keep, Ends) else keep.shape[1]
    body = before if held.body is None else held.body
    if held.slots < slots or any(table.stride(1) != 1 for table in (mask, before, after, body)):
        raise ValueError(f"{slots} slots do not lie in {held.frames.shape[1]} frames of {page}, or columns lie apart")
    numbers, scales = (*sources, sources[0])[:2]
    to_numbers, to_scales = (*targets, targets[0])[:2]
    row, row_of_scales = numbers.shape[3], scales.shape[3] if len(sources) > 1 else 0
    first, stop, _ = (lanes or slice(None)).indices(len(before))
    at_once = min(1024, max(16, BYTES_AT_ONCE // (row * numbers.itemsize)))
    _pack[(stop - first, 2)](
        mask, mask.stride(0), body, body.stride(0), before, before.stride(0), after, after.stride(0),
        packing.counts, packing.lengths, packing.counts.stride(0), packed.positions,
        packed.positions if packed.order is None else packed.order, packed.positions.shape[1],
        numbers, to_numbers, numbers.stride(0), to_numbers.stride(0), numbers.stride(1), row,
        scales, to_scales, scales.stride(0), to_scales.stride(0), scales.stride(1), row_of_scales,
        first, slots, 0 if held.body is None else body.shape[1], held.start, held.length,
        keep.first if isinstance(keep, Ends) else 0,
        ENDS=isinstance(keep, Ends), ASIDE=numbers is not to_numbers, ORDER=packed.order is not None, PAGE=page,
        ROW=triton.next_power_of_2(row), SCALES=triton.next_power_of_2(row_of_scales) if row_of_scales else 0,
        SLOTS=1 << (at_once.bit_length() - 1), NO_POSITION=NO_POSITION, num_warps=8, num_stages=1,
    )  # fmt: skip


def lay_out(body: Tensor | None, table: Tensor, *, start: int, length: int, page_size: int) -> tuple[Tensor, Tensor]:
    """The positions of a row's slots, and which of them live; see `memory.compaction.lay_out`."""
    lanes, slots = len(table), table.shape[1] * page_size
    positions = torch.empty((lanes, slots), dtype=torch.int64, device=table.device)
    live = torch.empty((lanes, slots), dtype=torch.bool, device=table.device)
    known = positions if body is None else body
    _lay_out[(lanes, triton.cdiv(slots, SLOTS_AT_ONCE))](
        known, known.stride(0), positions, live, slots, 0 if body is None else known.shape[1], start, length,
        SLOTS=SLOTS_AT_ONCE,
    )  # fmt: skip
    return positions, live


@triton.jit
def _position(body, slot, body_slots, start, mask):
    """Of some slots of a lane."""
    known = tl.load(body + slot, mask=mask & (slot < body_slots), other=0).to(tl.int64)
    return tl.where(slot < body_slots, known, start + slot - body_slots)


@triton.jit(do_not_specialize=["stride", "slots", "body_slots", "start", "length"])
def _lay_out(body, stride, positions, live, slots, body_slots, start, length, SLOTS: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    position = _position(body + lane * stride, slot, body_slots, start, slot < slots)
    tl.store(positions + lane * slots + slot, position, mask=slot < slots)
    tl.store(live + lane * slots + slot, position < length, mask=slot < slots)


@triton.jit(
    do_not_specialize=[
        "keep_stride", "body_stride", "before_stride", "after_stride", "of_lane_stride", "width", "first_lane",
        "slots", "body_slots", "start", "length", "first",
    ]
)  # fmt: skip
def _pack(
    keep, keep_stride, body, body_stride, before, before_stride, after, after_stride, counts, lengths, of_lane_stride,
    packed, order, width, numbers, to_numbers, number_stride, to_number_stride, number_part, row,
    scales, to_scales, scale_stride, to_scale_stride, scale_part, row_of_scales,
    first_lane, slots, body_slots, start, length, first,
    ENDS: tl.constexpr, ASIDE: tl.constexpr, ORDER: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr,
    SCALES: tl.constexpr, SLOTS: tl.constexpr, NO_POSITION: tl.constexpr,
):  # fmt: skip
    """K of a lane, or V: some slots after the other are read, all of them, before one of their targets is written."""
    of_some, part = tl.program_id(0), tl.program_id(1)
    lane = (first_lane + of_some).to(tl.int64)
    keep += lane * keep_stride
    body += lane * body_stride
    before += lane * before_stride
    after += lane * after_stride
    packed += lane * width
    order += lane * width
    numbers += part * number_part
    to_numbers += part * number_part
    scales += part * scale_part
    to_scales += part * scale_part
    columns = width // PAGE
    if ENDS:
        body_length = tl.load(lengths + lane * of_lane_stride).to(tl.int32)
        held = body_length + tl.minimum(slots - body_slots, length - start)
        dropped = held - tl.load(counts + lane * of_lane_stride).to(tl.int32)
    number, scale = tl.arange(0, ROW)[None, :], tl.arange(0, SCALES if SCALES else 1)[None, :]
    done = tl.zeros((), dtype=tl.int32)
    for begin in range(0, slots, SLOTS):
        slot = begin + tl.arange(0, SLOTS)
        if ENDS:
            in_tail = slot >= body_slots
            rank = tl.where(in_tail, slot - body_slots + body_length, slot)
            is_live = (slot < slots) & tl.where(in_tail, start + slot - body_slots < length, slot < body_length)
            is_kept = is_live & ((rank < first) | (rank >= first + dropped))
            place = tl.where(rank < first, rank, rank - dropped)
        else:
            is_kept = tl.load(keep + slot, mask=slot < slots, other=0) != 0
            place = done + tl.cumsum(is_kept.to(tl.int32), axis=0) - 1
        source = tl.load(before + slot // PAGE, mask=is_kept, other=0).to(tl.int64)
        target = tl.load(after + place // PAGE, mask=is_kept, other=0).to(tl.int64)
        if ASIDE:
            target = (of_some * columns + place // PAGE).to(tl.int64)
            moves = is_kept
        else:
            moves = is_kept & ((source != target) | (slot % PAGE != place % PAGE))
        if part == 0:
            tl.store(packed + place, _position(body, slot, body_slots, start, is_kept).to(tl.int32), mask=is_kept)
            if ORDER:
                tl.store(order + place, slot.to(tl.int64), mask=is_kept)
        at = (source * number_stride + slot % PAGE * row)[:, None] + number
        to = (target * to_number_stride + place % PAGE * row)[:, None] + number
        both = moves[:, None] & (number < row)
        found = tl.load(numbers + at, mask=both)
        if SCALES:
            scale_at = (source * scale_stride + slot % PAGE * row_of_scales)[:, None] + scale
            scale_to = (target * to_scale_stride + place % PAGE * row_of_scales)[:, None] + scale
            of_scales = moves[:, None] & (scale < row_of_scales)
            found_scales = tl.load(scales + scale_at, mask=of_scales)
            tl.debug_barrier()
            tl.store(to_scales + scale_to, found_scales, mask=of_scales)
        else:
            tl.debug_barrier()
        tl.store(to_numbers + to, found, mask=both)
        done += tl.sum(is_kept.to(tl.int32), axis=0)
    if part == 0:
        for begin in range(done, width, SLOTS):
            place = begin + tl.arange(0, SLOTS)
            tl.store(packed + place, tl.full((SLOTS,), NO_POSITION, dtype=tl.int32), mask=place < width)
            if ORDER:
                tl.store(order + place, tl.zeros((SLOTS,), dtype=tl.int64), mask=place < width)

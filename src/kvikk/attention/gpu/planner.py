"""The work list: which program of the attention kernel reads which slots for which queries, planned on the device.

Two small kernels, once a step for all layers of uniform rows (once a layer where rows have bodies of their own
lengths). The first, one program, weighs all (row, KV head) pairs and shares their slots out in chunks of equal work;
the second writes the items. Nothing is read back. `plan_twin.plan_items` is the same in plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.attention.gpu.rows import Bodies, DecodeRows, RunRows

FIELDS = 16
"""int32 numbers of an item: seat, KV head, first token, queries, first tail position, slots from, slots to, place among
the items of its queries, how many these are, row, body slots, place of its partial result; then padding to a cache
line."""
MERGE_FIELDS = 8
"""int32 numbers of a merge: first partial result, first token, KV head, queries, items; the rest is padding."""
EXPANDED_AT_ONCE = 128
TRIES_PER_WAVE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """How lanes are cut.

    Args:
        tile_queries: queries of one item.
        tile_slots: cuts fall on multiples of this.
        min_slots: no chunk is smaller.
        residents: programs that the device runs at once. A constant of the project, not of the device: where cuts fall
            shows in the last bit of a text.
        item_slots: what starting an item costs, in slots.
        waves: items are at most about so many times the residents.
        part: above 0: lanes are cut at its multiples, or not at all where the items would not fit.
    """

    tile_queries: int
    tile_slots: int
    min_slots: int = 128
    residents: int = 396
    item_slots: int = 128
    waves: int = 5
    part: int = 0

    def capacity(self, tiles: int, slots: int) -> tuple[int, int]:
        """Bounds on the items of a step, and on those of queries that are cut.

        Args:
            tiles: (row, KV head, query tile) of the step, at the most.
            slots: over all of these, at the most.
        """
        if self.part:  # what does not fit is not cut
            parts = min(slots // self.part, 4 * self.residents * self.waves)
            return tiles + parts, tiles + parts
        cuts = min(self.residents * self.waves, slots // self.min_slots)
        return tiles + cuts, 2 * cuts


@dataclass(frozen=True, slots=True)
class WorkList:
    """The buffers of a plan, for the lifetime of a graph.

    Args:
        items: `[plans, capacity, FIELDS]` int32; one plan for all layers, or one a layer.
        merges: `[plans, most, MERGE_FIELDS]` int32, one for each set of queries that was cut.
        counts: `[plans, 2]` int32: items, merges.
        pairs: `[plans, 4, pairs]` int32, scratch: first item, splits, first merge, first partial of each pair.
        cut_capacity: items of queries that are cut, at the most.
    """

    items: Tensor
    merges: Tensor
    counts: Tensor
    pairs: Tensor
    cut_capacity: int

    @property
    def capacity(self) -> int:
        """Items that fit."""
        return self.items.shape[1]

    @staticmethod
    def make(chunking: Chunking, *, plans: int, pairs: int, tiles: int, slots: int, device: torch.device) -> WorkList:
        """Buffers for rows of `pairs` (row, KV head), with `tiles` query tiles over `slots` slots in all."""
        padded = max(16, triton.next_power_of_2(pairs))
        capacity, cut_capacity = chunking.capacity(tiles, slots)

        def numbers(*shape: int) -> Tensor:
            return torch.zeros((plans, *shape), dtype=torch.int32, device=device)

        return WorkList(
            items=numbers(capacity, FIELDS),
            merges=numbers(max(1, min(tiles, cut_capacity // 2)), MERGE_FIELDS),
            counts=numbers(2),
            pairs=numbers(4, padded),
            cut_capacity=cut_capacity,
        )


def plan_items(
    work: WorkList,
    rows: DecodeRows | RunRows,
    chunking: Chunking,
    *,
    kv_heads: int,
    page_size: int,
) -> None:
    """Fill a work list from rows that lie on the device.

    Args:
        work: of which every buffer is overwritten as far as it is needed.
        rows: their number times `kv_heads` must fit the list's pairs.
        chunking: how lanes are cut.
        kv_heads: of each layer; where rows have bodies, layer l has the lanes `l * kv_heads` and on.
        page_size: slots of a frame.
    """
    plans, _, padded = work.pairs.shape
    row_count = rows.seats.shape[0]
    if row_count * kv_heads > padded:
        raise ValueError(f"{row_count} rows of {kv_heads} KV heads do not fit a work list of {padded} pairs")
    starts, offsets = (rows.starts, rows.offsets) if isinstance(rows, RunRows) else (rows.seats, rows.seats)
    body_lengths, body_stride = body_arguments(rows.bodies, rows.seats)
    shared = {
        "kv_heads": kv_heads,
        "PAGE": page_size,
        "TILE_QUERIES": chunking.tile_queries,
        "TILE_SLOTS": chunking.tile_slots,
        "PART": chunking.part,
        "SINGLE": isinstance(rows, DecodeRows),
        "RAGGED": rows.bodies is not None,
        "PADDED": padded,
    }
    _weigh[(plans,)](
        rows.seats, starts, rows.lengths, body_lengths, body_stride,
        work.pairs, work.counts, row_count,
        chunking.min_slots, chunking.residents, chunking.item_slots, work.cut_capacity,
        TRIES=chunking.waves * TRIES_PER_WAVE, PER_WAVE=TRIES_PER_WAVE, num_warps=8, **shared,
    )  # fmt: skip
    _expand[(triton.cdiv(work.capacity, EXPANDED_AT_ONCE), plans)](
        rows.seats, starts, rows.lengths, offsets, body_lengths, body_stride,
        work.pairs, work.counts, work.items, work.merges, work.capacity, work.merges.shape[1],
        LEVELS=padded.bit_length() - 1, BLOCK=EXPANDED_AT_ONCE, RECORD=FIELDS, MERGE_RECORD=MERGE_FIELDS,
        num_warps=4, **shared,
    )  # fmt: skip


def body_arguments(bodies: Bodies | None, anything: Tensor) -> tuple[Tensor, int]:
    """Lengths and row stride of bodies as kernel arguments; without bodies, a pointer that is not read."""
    return (anything, 0) if bodies is None else (bodies.lengths, bodies.lengths.stride(0))


@triton.jit
def _pair_shape(
    pair, mask, seats, starts, lengths, body_lengths, body_stride, layer, kv_heads,
    PAGE: tl.constexpr, SINGLE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Seat, tail position of the first query, queries, body slots and padded body slots of pairs."""
    row = pair // kv_heads
    seat = tl.load(seats + row, mask=mask, other=0)
    length = tl.load(lengths + row, mask=mask, other=0)
    if SINGLE:
        start = length - 1
        queries = tl.where(mask, 1, 0)
    else:
        start = tl.load(starts + row, mask=mask, other=0)
        queries = length
    body = tl.zeros_like(seat)
    if RAGGED:
        lane = layer * kv_heads + pair % kv_heads
        body = tl.load(body_lengths + seat.to(tl.int64) * body_stride + lane, mask=mask, other=0)
    padded_body = (body + PAGE - 1) // PAGE * PAGE
    return seat, start, queries, body, padded_body


@triton.jit
def _weigh(
    seats, starts, lengths, body_lengths, body_stride, pairs, counts, rows,
    min_slots, residents, item_slots, cut_capacity, kv_heads,
    PAGE: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_SLOTS: tl.constexpr, PART: tl.constexpr,
    SINGLE: tl.constexpr, RAGGED: tl.constexpr, PADDED: tl.constexpr, TRIES: tl.constexpr, PER_WAVE: tl.constexpr,
):  # fmt: skip
    plan = tl.program_id(0)
    pair = tl.arange(0, PADDED)
    mask = pair < rows * kv_heads
    _, start, queries, _, padded_body = _pair_shape(
        pair, mask, seats, starts, lengths, body_lengths, body_stride, plan, kv_heads, PAGE, SINGLE, RAGGED
    )
    slots = tl.where(queries > 0, padded_body + start + queries, 0)
    tiles = (queries + TILE_QUERIES - 1) // TILE_QUERIES
    if PART > 0:
        parts = (slots + PART - 1) // PART
        chunk = tl.where(tl.sum(tiles * parts, axis=0) <= cut_capacity, PART, 1 << 30)
    else:
        total = tl.sum(tiles.to(tl.int64) * slots, axis=0).to(tl.float32)
        chunk = min_slots
        least = float("inf")
        for attempt in range(1, TRIES + 1):  # the chunk after which the last program would be done first
            share = tl.div_rn(total * PER_WAVE, (residents * attempt).to(tl.float32)).to(tl.int32)
            size = tl.maximum((share + TILE_SLOTS) // TILE_SLOTS * TILE_SLOTS, min_slots)
            splits = (slots + size - 1) // size
            piece = tl.where(splits > 0, (slots + splits - 1) // tl.maximum(splits, 1), 0)
            longest = (tl.max(piece, axis=0) + TILE_SLOTS - 1) // TILE_SLOTS * TILE_SLOTS + item_slots
            number = tl.sum(tiles * splits, axis=0)
            in_waves = ((number + residents - 1) // residents * longest).to(tl.float32)
            as_they_end = tl.div_rn(total + number * item_slots, residents * 1.0) + longest
            cost = tl.minimum(in_waves, as_they_end)
            chunk = tl.where(cost < least, size, chunk)
            least = tl.minimum(cost, least)
    splits = tl.maximum((slots + chunk - 1) // chunk, 1)
    items = tiles * splits
    merges = tl.where(splits > 1, tiles, 0)
    out = pairs + plan * 4 * PADDED + pair
    tl.store(out, tl.cumsum(items, axis=0) - items)
    tl.store(out + PADDED, splits)
    tl.store(out + 2 * PADDED, tl.cumsum(merges, axis=0) - merges)
    cut_items = tl.where(splits > 1, items, 0)
    tl.store(out + 3 * PADDED, tl.cumsum(cut_items, axis=0) - cut_items)
    tl.store(counts + plan * 2, tl.sum(items, axis=0))
    tl.store(counts + plan * 2 + 1, tl.sum(merges, axis=0))


@triton.jit
def _expand(
    seats, starts, lengths, offsets, body_lengths, body_stride, pairs, counts, items, merges, capacity,
    merge_capacity, kv_heads,
    PAGE: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_SLOTS: tl.constexpr, PART: tl.constexpr,
    SINGLE: tl.constexpr, RAGGED: tl.constexpr, PADDED: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK: tl.constexpr, RECORD: tl.constexpr, MERGE_RECORD: tl.constexpr,
):  # fmt: skip
    plan = tl.program_id(1)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < tl.load(counts + plan * 2)
    firsts = pairs + plan * 4 * PADDED
    pair = tl.zeros((BLOCK,), dtype=tl.int32)
    for level in tl.static_range(LEVELS):  # the last pair whose first item is not after this one
        further = tl.load(firsts + pair + (PADDED >> (level + 1)), mask=mask, other=0) <= index
        pair = tl.where(further, pair + (PADDED >> (level + 1)), pair)
    seat, start, queries, body, padded_body = _pair_shape(
        pair, mask, seats, starts, lengths, body_lengths, body_stride, plan, kv_heads, PAGE, SINGLE, RAGGED
    )
    splits = tl.load(firsts + PADDED + pair, mask=mask, other=1)
    pair_first = tl.load(firsts + pair, mask=mask, other=0)
    order = (index - pair_first) // splits
    part = (index - pair_first) % splits
    tile = (queries + TILE_QUERIES - 1) // TILE_QUERIES - 1 - order  # the longest first
    tile_queries = tl.minimum(queries - tile * TILE_QUERIES, TILE_QUERIES)
    slots = padded_body + start + tile * TILE_QUERIES + tile_queries
    if PART > 0:
        piece = tl.where(splits > 1, PART, 1 << 30)
    else:
        piece = ((slots + splits - 1) // splits + TILE_SLOTS - 1) // TILE_SLOTS * TILE_SLOTS
    begin = tl.minimum(part * piece, slots)
    end = begin + tl.minimum(piece, slots - begin)
    row = pair // kv_heads
    token = row if SINGLE else tl.load(offsets + row, mask=mask, other=0) + tile * TILE_QUERIES
    first = tl.load(firsts + 3 * PADDED + pair, mask=mask, other=0) + order * splits
    is_first = (part == 0) & (splits > 1)
    merge = tl.load(firsts + 2 * PADDED + pair, mask=mask, other=0) + order
    out = merges + (plan.to(tl.int64) * merge_capacity + merge) * MERGE_RECORD
    tl.store(out, first, mask=mask & is_first)
    tl.store(out + 1, token, mask=mask & is_first)
    tl.store(out + 2, pair % kv_heads, mask=mask & is_first)
    tl.store(out + 3, tile_queries, mask=mask & is_first)
    tl.store(out + 4, splits, mask=mask & is_first)
    is_spare = (index >= tl.load(counts + plan * 2 + 1)) & (index < merge_capacity)
    tl.store(merges + (plan.to(tl.int64) * merge_capacity + index) * MERGE_RECORD + 3, 0, mask=is_spare)

    out = items + (plan.to(tl.int64) * capacity + index) * RECORD
    within = index < capacity  # items beyond the last have no queries and no slots
    tl.store(out, seat, mask=mask)
    tl.store(out + 1, pair % kv_heads, mask=mask)
    tl.store(out + 2, token, mask=mask)
    tl.store(out + 3, tl.where(mask, tile_queries, 0), mask=within)
    tl.store(out + 4, start + tile * TILE_QUERIES, mask=mask)
    tl.store(out + 5, tl.where(mask, begin, 0), mask=within)
    tl.store(out + 6, tl.where(mask, end, 0), mask=within)
    tl.store(out + 7, part, mask=mask)
    tl.store(out + 8, splits, mask=mask)
    tl.store(out + 9, row, mask=mask)
    tl.store(out + 10, body, mask=mask)
    tl.store(out + 11, first + part, mask=mask)

"""The attention kernel: works a list of items off, for single queries and for several, over pages where they lie.

One source for both, and for all formats of the pool (`forms`): the queries of an item times the query heads of its KV
head are the rows of one matrix product (16 for decoding and 64 or 128 for chunks of a prompt; 8 and 32 where the pool
is quantised). Softmax runs along the slots in fp32, with the usual rescaling.
Items that are the only ones of their queries write the output; the others leave unnormalised parts for `merge`.
`twins.attend_items` is the same in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.attention.gpu.forms import in_ones, join_parts, load_queries, no_sums, piece_of, take
from kvikk.attention.gpu.planner import FIELDS, WorkList, body_arguments
from kvikk.attention.gpu.rows import DecodeRows, RunRows
from kvikk.geometry import INT4, KVGeometry
from kvikk.memory.int4 import turn_width
from kvikk.memory.storage import KVStore
from kvikk.models.gpu.launch import overlapping, wait_for_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one item is computed.

    Args:
        rows: of the matrix products, a power of two from 16, or 8 in quantised pools: queries times query heads of a
            KV head.
        slots: KV slots taken at once, a multiple of the page size.
        warps: of a program.
        stages: tiles of KV in flight.
        part: above 0: slots are summed up in parts of so many, which are joined in order; a query's bits then do not
            depend on how its slots are cut into items (at these multiples, or not at all), nor on queries beside it.
    """

    rows: int
    slots: int
    warps: int
    stages: int
    part: int = 0

    def queries(self, group: int) -> int:
        """Queries of an item where `group` query heads share a KV head."""
        return self.rows // group


@dataclass(frozen=True, slots=True)
class Partials:
    """What items leave behind whose queries were cut.

    Args:
        sums: `[capacity, rows, head_dim]` fp32, unnormalised outputs; an item's place is a field of it.
        states: `[capacity, rows, 2]` fp32: the largest logit, in powers of two, and the sum of the weights.
    """

    sums: Tensor
    states: Tensor

    def fits(self, capacity: int, rows: int) -> bool:
        """Whether a list of so many items of so many used rows can leave its parts here."""
        return self.sums.shape[0] >= capacity and self.sums.shape[1] == rows

    @staticmethod
    def make(*, capacity: int, rows: int, head_dim: int, device: torch.device) -> Partials:
        """Buffers for `capacity` items of `rows` used rows."""
        return Partials(
            sums=torch.empty((capacity, rows, head_dim), dtype=torch.float32, device=device),
            states=torch.empty((capacity, rows, 2), dtype=torch.float32, device=device),
        )


@dataclass(frozen=True, slots=True)
class Bias:
    """Additive logits, one for each row, KV head and slot, body slots (padded to whole frames) before tail slots.

    Args:
        values: flat, fp32.
        offsets: `[rows]` int64, where a row's `[kv_heads, slots]` begins; -1: the row has none.
        strides: `[rows]` int64, from one KV head to the next.
    """

    values: Tensor
    offsets: Tensor
    strides: Tensor


LOG2E = 1.4426950408889634
FORMATS: Final = {None: "plain", torch.int8: "int8", torch.float8_e4m3fn: "fp8", INT4: "int4"}
"""What the kernel calls them, by `KVGeometry.quantised`."""


def row_width(geometry: KVGeometry) -> int:
    """Of what the kernel takes a row as: numbers, or 16-bit words where they are quantised."""
    if geometry.quantised is None:
        return geometry.row_elements
    return geometry.row_elements * geometry.stored.itemsize // 2


def attend_items(
    work: WorkList,
    partials: Partials,
    rows: DecodeRows | RunRows,
    store: KVStore,
    layer: int,
    q: Tensor,
    out: Tensor,
    *,
    tile: Tile,
    scale: float,
    lse: Tensor | None = None,
    bias: Bias | None = None,
) -> None:
    """Compute every item of a work list.

    Args:
        work: planned for these rows, with the queries of `tile` and cuts at multiples of its slots.
        partials: of the list's capacity.
        rows: as planned.
        store: the pool.
        layer: which layer.
        q: `[tokens, q_heads, head_dim]`, heads and numbers contiguous, in the geometry's dtype.
        out: `[tokens, q_heads, head_dim]`, contiguous, in q's dtype.
        tile: how.
        scale: factor on `q @ k`.
        lse: `[tokens, q_heads]` fp32, contiguous, for the natural log-sum-exp; None: not wanted.
        bias: added to the logits.
    """
    geometry = store.geometry
    kv_heads, head_dim, page = geometry.kv_heads[layer], geometry.head_dim, geometry.page_size
    group = q.shape[1] // kv_heads
    if q.shape[1:] != out.shape[1:] or q.shape[1:] != (group * kv_heads, head_dim):
        raise ValueError(f"q {tuple(q.shape)} and out {tuple(out.shape)} are not [tokens, {kv_heads} * n, {head_dim}]")
    if q.stride()[1:] != (head_dim, 1) or not out.is_contiguous() or q.dtype != geometry.dtype:
        raise ValueError("q must have contiguous heads, out be contiguous, both in the model's dtype")
    if tile.rows < group or tile.slots % page:
        raise ValueError(f"a tile of {tile.rows} x {tile.slots} serves no group of {group} with pages of {page}")
    pool, scales = store.frames, store.frames
    if store.scales is not None:
        pool, scales = store.words.view(torch.int16), store.scales
    width = row_width(geometry)
    plan = layer if work.items.shape[0] > 1 else 0
    _, body_stride = body_arguments(rows.bodies, rows.seats)
    body_frames, body_offsets = (
        (rows.seats, rows.seats) if rows.bodies is None else (rows.bodies.frames, rows.bodies.offsets)
    )
    _attend[(work.capacity,)](
        q, out, out if lse is None else lse, partials.sums, partials.states,
        pool, scales, work.items[plan], work.counts[plan],
        rows.tables, rows.tables.stride(0), body_frames, body_offsets, body_stride,
        out if bias is None else bias.values,
        rows.seats if bias is None else bias.offsets,
        rows.seats if bias is None else bias.strides,
        q.stride(0), scale * LOG2E, geometry.frames_per_block, geometry.first_frame[layer],
        Q_HEADS=q.shape[1], GROUP=group, HEAD_DIM=head_dim, WIDTH=width,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK=max(16, triton.next_power_of_2(width)),
        PAGE=page, FRAME=geometry.frame_bytes // pool.itemsize,
        FORMAT=FORMATS[geometry.quantised], SCALES=geometry.row_scales, TURN=turn_width(head_dim),
        ROWS=tile.rows, SLOTS=tile.slots, USED=partials.sums.shape[1], RECORD=FIELDS,
        PART=tile.part, ONE_LOOP=isinstance(rows, DecodeRows) or rows.bodies is not None or bias is not None,
        RAGGED=rows.bodies is not None,
        HAS_BIAS=bias is not None, HAS_LSE=lse is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", PAIRED=q.is_cuda,
        **overlapping(q.device),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def _attend(
    q, out, lse, partial_sums, partial_states, pool, scales, items, counts,
    tables, table_stride, body_frames, body_offsets, body_stride, bias, bias_offsets, bias_strides,
    q_stride, scale_log2, frames_per_block, first_frame,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, FRAME: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
    TURN: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, USED: tl.constexpr,
    RECORD: tl.constexpr, PART: tl.constexpr, ONE_LOOP: tl.constexpr, RAGGED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LSE: tl.constexpr, PRECISION: tl.constexpr, PAIRED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    index = tl.program_id(0)
    item = items + index * RECORD
    seat = tl.load(item).to(tl.int64)
    head = tl.load(item + 1)
    token = tl.load(item + 2)
    queries = tl.load(item + 3)
    position = tl.load(item + 4)
    begin = tl.load(item + 5)
    end = tl.load(item + 6)
    body = tl.load(item + 10)
    padded_body = (body + PAGE - 1) // PAGE * PAGE
    lane = first_frame + head
    body_run = body_frames
    if RAGGED:
        body_run += tl.load(body_offsets + seat * body_stride + lane)
    row_bias = bias
    bias_end = end
    if HAS_BIAS:
        bias_row = tl.load(item + 9)
        bias_offset = tl.load(bias_offsets + bias_row)
        row_bias += tl.maximum(bias_offset, 0) + head * tl.load(bias_strides + bias_row)
        bias_end = tl.where(bias_offset < 0, 0, end)

    wait_for_inputs(OVERLAP)
    if queries > 0:  # the list is shorter than the grid
        is_query = row < queries * GROUP
        at = (token + row // GROUP).to(tl.int64)
        q_head = head * GROUP + row % GROUP
        q_at = q + (at * q_stride + q_head * HEAD_DIM)
        limit = padded_body + position + row // GROUP  # the last slot that each row sees
        if SCALES > 0:
            limit = tl.minimum(limit, end - 1)
        tiles = load_queries(q_at, is_query, HEAD_DIM, BLOCK_D, WIDTH, BLOCK, TURN, SCALES, PRECISION)

        sums = no_sums(ROWS, BLOCK, SCALES)
        largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        weight_sum = tl.zeros((ROWS,), dtype=tl.float32)
        table = tables + seat * table_stride
        if PART > 0:
            for part in range(begin, end, PART):
                part_sums = no_sums(ROWS, BLOCK, SCALES)
                part_largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
                part_weight = tl.zeros((ROWS,), dtype=tl.float32)
                for base in range(part, tl.minimum(part + PART, end), SLOTS):
                    part_sums, part_largest, part_weight = take(
                        tiles, part_sums, part_largest, part_weight, base, end, limit, body,
                        padded_body, pool, scales, table, body_run, row_bias, bias_end, scale_log2, frames_per_block,
                        lane,
                        WIDTH, BLOCK, PAGE, FRAME, FORMAT, SCALES, SLOTS, True, RAGGED, HAS_BIAS, PRECISION, PAIRED,
                    )  # fmt: skip
                part_sums = in_ones(part_sums, FORMAT, SCALES, q.dtype.element_ty)
                sums, largest, weight_sum = join_parts(
                    sums, largest, weight_sum, part_sums, part_largest, part_weight, SCALES
                )
        else:
            masked_from = begin
            if not ONE_LOOP:  # whole tiles before the first query need no mask
                masked_from = tl.maximum(begin, tl.minimum(end, position + 1) // SLOTS * SLOTS)
                for base in range(begin, masked_from, SLOTS):
                    sums, largest, weight_sum = take(
                        tiles, sums, largest, weight_sum, base, end, limit, body, padded_body,
                        pool, scales, table, body_run, row_bias, bias_end, scale_log2, frames_per_block, lane,
                        WIDTH, BLOCK, PAGE, FRAME, FORMAT, SCALES, SLOTS, False, RAGGED, HAS_BIAS, PRECISION, PAIRED,
                    )  # fmt: skip
            for base in range(masked_from, end, SLOTS):
                sums, largest, weight_sum = take(
                    tiles, sums, largest, weight_sum, base, end, limit, body, padded_body,
                    pool, scales, table, body_run, row_bias, bias_end, scale_log2, frames_per_block, lane,
                    WIDTH, BLOCK, PAGE, FRAME, FORMAT, SCALES, SLOTS, True, RAGGED, HAS_BIAS, PRECISION, PAIRED,
                )  # fmt: skip
            sums = in_ones(sums, FORMAT, SCALES, q.dtype.element_ty)

        stored = is_query[:, None] & (tl.arange(0, BLOCK) < WIDTH)[None, :]
        divisor = tl.where(weight_sum == 0.0, 1.0, weight_sum)
        splits = tl.load(item + 8)
        slot_row = tl.load(item + 11).to(tl.int64) * USED + row
        for i in tl.static_range(max(1, 2 * SCALES)):
            piece, column = piece_of(sums, i, BLOCK, HEAD_DIM, SCALES)
            if splits == 1:
                target = out + ((at * Q_HEADS + q_head) * HEAD_DIM)[:, None] + column[None, :]
                tl.store(target, (piece / divisor[:, None]).to(out.dtype.element_ty), mask=stored)
            else:
                tl.store(partial_sums + slot_row[:, None] * HEAD_DIM + column[None, :], piece, mask=stored)
        if splits == 1:
            if HAS_LSE:
                total = (largest + tl.log2(divisor)) * 0.6931471805599453
                tl.store(lse + at * Q_HEADS + q_head, total, mask=is_query)
        else:
            tl.store(partial_states + slot_row * 2, largest, mask=is_query)
            tl.store(partial_states + slot_row * 2 + 1, weight_sum, mask=is_query)

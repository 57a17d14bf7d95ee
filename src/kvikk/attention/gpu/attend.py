"""The attention kernel: works a list of items off, for single queries and for several, over pages where they lie.

One source for both: the queries of an item times the query heads of its KV head are the rows of one matrix product (16
rows for decoding, 64 or 128 for chunks of a prompt). Softmax runs along the slots in fp32, with the usual rescaling.
Items that are the only ones of their queries write the output; the others leave unnormalised parts for `merge`.
`twins.attend_items` is the same in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.attention.gpu.planner import FIELDS, WorkList, body_arguments
from kvikk.attention.gpu.rows import DecodeRows, RunRows
from kvikk.memory.storage import KVStore
from kvikk.models.gpu.launch import overlapping, wait_for_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one item is computed.

    Args:
        rows: rows of the matrix products, a power of two from 16: queries times query heads of a KV head.
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
    plan = layer if work.items.shape[0] > 1 else 0
    _, body_stride = body_arguments(rows.bodies, rows.seats)
    body_frames, body_offsets = (
        (rows.seats, rows.seats) if rows.bodies is None else (rows.bodies.frames, rows.bodies.offsets)
    )
    _attend[(work.capacity,)](
        q, out, out if lse is None else lse, partials.sums, partials.states,
        store.frames, store.frames if store.scales is None else store.scales,
        work.items[plan], work.counts[plan],
        rows.tables, rows.tables.stride(0), body_frames, body_offsets, body_stride,
        out if bias is None else bias.values,
        rows.seats if bias is None else bias.offsets,
        rows.seats if bias is None else bias.strides,
        q.stride(0), scale * LOG2E, geometry.frames_per_block, geometry.first_frame[layer],
        Q_HEADS=q.shape[1], GROUP=group, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        PAGE=page, FRAME=geometry.frame_bytes // geometry.stored.itemsize, QUANTISED=store.scales is not None,
        ROWS=tile.rows, SLOTS=tile.slots, USED=partials.sums.shape[1], RECORD=FIELDS,
        PART=tile.part, ONE_LOOP=isinstance(rows, DecodeRows) or rows.bodies is not None or bias is not None,
        RAGGED=rows.bodies is not None,
        HAS_BIAS=bias is not None, HAS_LSE=lse is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
         **overlapping(q.device),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit
def join_part(sums, largest, weight_sum, part_sums, part_largest, part_weight, IS_TILE: tl.constexpr):
    """Add a part to a running softmax, in operations that no compiler contracts otherwise somewhere else."""
    new_largest = tl.maximum(largest, part_largest)
    origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    old, new = tl.exp2(largest - origin), tl.exp2(part_largest - origin)
    weight_sum = tl.fma(part_weight, new, weight_sum * old)
    if IS_TILE:
        sums = tl.fma(part_sums, tl.broadcast_to(new[:, None], part_sums.shape), sums * old[:, None])
    else:
        sums = tl.fma(part_sums, tl.full(part_sums.shape, 1.0, dtype=tl.float32) * new, sums * old)
    return sums, new_largest, weight_sum


@triton.jit
def _step(
    q, sums, largest, weight_sum, base, end, limit, body, padded_body,
    pool, scales, table, body_run, bias, bias_end, scale_log2, frames_per_block, lane,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, FRAME: tl.constexpr,
    QUANTISED: tl.constexpr, SLOTS: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one tile of slots into the running softmax.

    Quantised K and V are exact in q's dtype; their scales are taken into logits and weights.
    """
    slot = base + tl.arange(0, SLOTS)
    number = tl.arange(0, BLOCK_D)
    is_live = slot < end
    if RAGGED:
        is_body = slot < padded_body
        in_body = tl.load(body_run + slot // PAGE, mask=is_body & is_live, other=0)
        block = tl.load(table + (slot - padded_body) // PAGE, mask=is_live & (slot >= padded_body), other=0)
        frame = tl.where(is_body, in_body.to(tl.int64), block.to(tl.int64) * frames_per_block + lane)
        is_live = is_live & ((slot < body) | (slot >= padded_body))
    else:
        block = tl.load(table + slot // PAGE, mask=is_live, other=0)
        frame = block.to(tl.int64) * frames_per_block + lane
    at = frame * FRAME + slot % PAGE * HEAD_DIM
    if BLOCK_D == HEAD_DIM:
        keys = tl.load(pool + at[None, :] + number[:, None])
    else:
        keys = tl.load(pool + at[None, :] + number[:, None], mask=(number < HEAD_DIM)[:, None], other=0.0)
    if QUANTISED:
        scale_at = scales + frame * (FRAME * pool.dtype.element_ty.primitive_bitwidth // 32) + slot % PAGE
        key_scales = tl.load(scale_at) * scale_log2
        logits = tl.dot(q, keys.to(q.dtype), input_precision=PRECISION) * key_scales[None, :]
    else:
        logits = tl.dot(q, keys, input_precision=PRECISION) * scale_log2
    if HAS_BIAS:
        logits += tl.load(bias + slot, mask=slot < bias_end, other=0.0)[None, :] * 1.4426950408889634
    if MASKED:
        logits = tl.where(is_live[None, :] & (slot[None, :] <= limit[:, None]), logits, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(logits, axis=1))
    origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(logits - origin[:, None])
    shrink = tl.exp2(largest - origin)
    if BLOCK_D == HEAD_DIM:  # what is not live may be NaN
        values = tl.load(pool + PAGE * HEAD_DIM + at[:, None] + number[None, :], mask=is_live[:, None], other=0.0)
    else:
        real = is_live[:, None] & (number < HEAD_DIM)[None, :]
        values = tl.load(pool + PAGE * HEAD_DIM + at[:, None] + number[None, :], mask=real, other=0.0)
    weight_sum = weight_sum * shrink + tl.sum(weights, axis=1)
    if QUANTISED:
        weights *= tl.load(scale_at + PAGE, mask=is_live, other=0.0)[None, :]
        values = values.to(q.dtype)
    sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    return sums, new_largest, weight_sum


@triton.jit
def _attend(
    q, out, lse, partial_sums, partial_states, pool, scales, items, counts,
    tables, table_stride, body_frames, body_offsets, body_stride, bias, bias_offsets, bias_strides,
    q_stride, scale_log2, frames_per_block, first_frame,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    FRAME: tl.constexpr, QUANTISED: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, USED: tl.constexpr,
    RECORD: tl.constexpr, PART: tl.constexpr, ONE_LOOP: tl.constexpr, RAGGED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_LSE: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    number = tl.arange(0, BLOCK_D)
    index = tl.program_id(0)
    item = items + index * RECORD
    seat = tl.load(item).to(tl.int64)
    head = tl.load(item + 1)
    token = tl.load(item + 2)
    queries = tl.load(item + 3)
    position = tl.load(item + 4)
    begin = tl.load(item + 5)
    end = tl.load(item + 6)
    splits = tl.load(item + 8)
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
        real = is_query[:, None] & (number < HEAD_DIM)[None, :]
        tile = tl.load(q + (at * q_stride + q_head * HEAD_DIM)[:, None] + number[None, :], mask=real, other=0.0)
        limit = padded_body + position + row // GROUP  # the last slot that each row sees

        sums = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
        largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        weight_sum = tl.zeros((ROWS,), dtype=tl.float32)
        table = tables + seat * table_stride
        if PART > 0:
            for part in range(begin, end, PART):
                part_sums = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
                part_largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
                part_weight = tl.zeros((ROWS,), dtype=tl.float32)
                for base in range(part, tl.minimum(part + PART, end), SLOTS):
                    part_sums, part_largest, part_weight = _step(
                        tile, part_sums, part_largest, part_weight, base, end, limit, body, padded_body,
                        pool, scales, table, body_run, row_bias, bias_end, scale_log2, frames_per_block, lane,
                        HEAD_DIM, BLOCK_D, PAGE, FRAME, QUANTISED, SLOTS, True, RAGGED, HAS_BIAS, PRECISION,
                    )  # fmt: skip
                sums, largest, weight_sum = join_part(
                    sums, largest, weight_sum, part_sums, part_largest, part_weight, True
                )
        else:
            masked_from = begin
            if not ONE_LOOP:  # whole tiles before the first query need no mask
                masked_from = tl.maximum(begin, tl.minimum(end, position + 1) // SLOTS * SLOTS)
                for base in range(begin, masked_from, SLOTS):
                    sums, largest, weight_sum = _step(
                        tile, sums, largest, weight_sum, base, end, limit, body, padded_body,
                        pool, scales, table, body_run, row_bias, bias_end, scale_log2, frames_per_block, lane,
                        HEAD_DIM, BLOCK_D, PAGE, FRAME, QUANTISED, SLOTS, False, RAGGED, HAS_BIAS, PRECISION,
                    )  # fmt: skip
            for base in range(masked_from, end, SLOTS):
                sums, largest, weight_sum = _step(
                    tile, sums, largest, weight_sum, base, end, limit, body, padded_body,
                    pool, scales, table, body_run, row_bias, bias_end, scale_log2, frames_per_block, lane,
                    HEAD_DIM, BLOCK_D, PAGE, FRAME, QUANTISED, SLOTS, True, RAGGED, HAS_BIAS, PRECISION,
                )  # fmt: skip

        if splits == 1:
            divisor = tl.where(weight_sum == 0.0, 1.0, weight_sum)
            share = sums / divisor[:, None]
            target = out + ((at * Q_HEADS + q_head) * HEAD_DIM)[:, None] + number[None, :]
            tl.store(target, share.to(out.dtype.element_ty), mask=real)
            if HAS_LSE:
                total = (largest + tl.log2(divisor)) * 0.6931471805599453
                tl.store(lse + at * Q_HEADS + q_head, total, mask=is_query)
        else:
            slot_row = tl.load(item + 11).to(tl.int64) * USED + row
            tl.store(partial_sums + slot_row[:, None] * HEAD_DIM + number[None, :], sums, mask=real)
            tl.store(partial_states + slot_row * 2, largest, mask=is_query)
            tl.store(partial_states + slot_row * 2 + 1, weight_sum, mask=is_query)

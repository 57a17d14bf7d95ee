"""The running softmax of the attention kernel: one tile of slots after the other, of K and V as they are.

`words` has the same for quantised pools.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def join_part(sums, largest, weight_sum, part_sums, part_largest, part_weight, AXIS: tl.constexpr):
    """Add a part to a running softmax, in operations that no compiler contracts otherwise somewhere else.

    AXIS: 1 where each row of the sums is a query, 0 where each column is, -1 where all are one query's.
    """
    new_largest = tl.maximum(largest, part_largest)
    origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    old, new = tl.exp2(largest - origin), tl.exp2(part_largest - origin)
    weight_sum = tl.fma(part_weight, new, weight_sum * old)
    if AXIS >= 0:
        new, old = tl.expand_dims(new, AXIS), tl.expand_dims(old, AXIS)
        sums = tl.fma(part_sums, tl.broadcast_to(new, part_sums.shape), sums * old)
    else:
        sums = tl.fma(part_sums, tl.full(part_sums.shape, 1.0, dtype=tl.float32) * new, sums * old)
    return sums, new_largest, weight_sum


@triton.jit
def locate(
    base, end, body, padded_body, table, body_run, frames_per_block, lane,
    PAGE: tl.constexpr, SLOTS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Of each slot of a tile: its number, its frame, and whether it is live."""
    slot = base + tl.arange(0, SLOTS)
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
    return slot, frame, is_live


@triton.jit
def take_tile(
    q, sums, largest, weight_sum, base, end, limit, body, padded_body,
    pool, table, body_run, bias, bias_end, scale_log2, frames_per_block, lane,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, FRAME: tl.constexpr,
    SLOTS: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one tile of slots into the running softmax; queries and sums are `[ROWS, BLOCK_D]`."""
    slot, frame, is_live = locate(
        base, end, body, padded_body, table, body_run, frames_per_block, lane, PAGE, SLOTS, RAGGED
    )
    number = tl.arange(0, BLOCK_D)
    at = frame * FRAME + slot % PAGE * HEAD_DIM
    if BLOCK_D == HEAD_DIM:
        keys = tl.load(pool + at[None, :] + number[:, None])
    else:
        keys = tl.load(pool + at[None, :] + number[:, None], mask=(number < HEAD_DIM)[:, None], other=0.0)
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
    sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision=PRECISION)
    return sums, new_largest, weight_sum

"""The running softmax of the attention kernel over quantised pools: see `running`, which has K and V as they are.

A tile is taken as 16-bit words of two numbers, or four in int4, of which `unpack` makes as many operands, so each
product is several: of some of a query's numbers each, and into some of the output's. All is on its side, slots down and
queries across. What was unpacked is then the first operand of a product, which the matrix units take from registers; on
their way there words of values are turned over, as single bytes cannot be; and 8 queries are not padded to 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvikk.attention.gpu.running import locate
from kvikk.attention.gpu.unpack import operands, unit


@triton.jit
def numbers_of(word, i: tl.constexpr, HEAD_DIM: tl.constexpr, SCALES: tl.constexpr):
    """Which numbers of a head operand i has: those of scale `i % SCALES`, of which there are one or two a row."""
    return 2 * word + i // SCALES + i % SCALES * (HEAD_DIM // 2)


@triton.jit
def turned(
    q, number, is_real, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TURN: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Some numbers of `int4.turn(q)`, over TURN: times turned keys they are `k @ q`.

    q is `[BLOCK_D, ROWS]`, number `[BLOCK]`, and so `[BLOCK, ROWS]` is what comes back.
    """
    row = number[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    odd = row & column & (TURN - 1)  # bits that both have: an odd number of them is a minus
    odd = odd ^ (odd >> 8)
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1)
    is_inside = (row // TURN == column // TURN) & is_real[:, None]
    signs = tl.where(is_inside, 1 - 2 * (odd & 1), 0)
    return (tl.dot(signs.to(q.dtype), q, input_precision=PRECISION) * (1.0 / TURN)).to(q.dtype)


@triton.jit
def parts_of_queries(
    at, is_query,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TURN: tl.constexpr,
    SCALES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The queries that begin at addresses `[ROWS]`, as one `[BLOCK, ROWS]` for each operand."""
    word = tl.arange(0, BLOCK)
    if SCALES == 1:
        real = (word < WIDTH)[:, None] & is_query[None, :]
        parts = [
            tl.load(at[None, :] + numbers_of(word, i, HEAD_DIM, SCALES)[:, None], mask=real, other=0.0) for i in (0, 1)
        ]
    else:
        number = tl.arange(0, BLOCK_D)
        real = (number < HEAD_DIM)[:, None] & is_query[None, :]
        q = tl.load(at[None, :] + number[:, None], mask=real, other=0.0)
        parts = [
            turned(q, numbers_of(word, i, HEAD_DIM, SCALES), word < WIDTH, HEAD_DIM, BLOCK_D, TURN, PRECISION)
            for i in (0, 1, 2, 3)
        ]
    return parts


@triton.jit
def _scales_of(loaded, SCALES: tl.constexpr):
    """One scale or two of each slot, out of what was loaded at once."""
    if SCALES == 1:
        scales = [loaded.to(tl.float32, bitcast=True)]
    else:
        low, high = loaded.to(tl.int32), (loaded >> 32).to(tl.int32)
        scales = [low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)]
    return scales


@triton.jit
def take_words(
    q, sums, largest, weight_sum, base, end, limit, body, padded_body,
    pool, scales, table, body_run, bias, bias_end, scale_log2, frames_per_block, lane,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, FRAME: tl.constexpr, FORMAT: tl.constexpr,
    SCALES: tl.constexpr, SLOTS: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Take one tile of slots into the running softmax; of queries and sums there is a `[BLOCK, ROWS]` an operand.

    Sums are in units of `unit(FORMAT, dtype)`.
    """
    dtype: tl.constexpr = q[0].dtype
    UNIT: tl.constexpr = unit(FORMAT, dtype)
    slot, frame, is_live = locate(
        base, end, body, padded_body, table, body_run, frames_per_block, lane, PAGE, SLOTS, RAGGED
    )
    word = tl.arange(0, BLOCK)
    place = tl.arange(0, SLOTS) % PAGE  # tiles begin where pages do
    start, row = pool + frame * FRAME, place * WIDTH
    scales_type: tl.constexpr = tl.int32 if SCALES == 1 else tl.int64
    scale_at = scales.to(tl.pointer_type(scales_type)) + frame * (FRAME // (2 * SCALES)) + place
    at = start[:, None] + (row[:, None] + word[None, :])
    words = tl.load(at) if BLOCK == WIDTH else tl.load(at, mask=(word < WIDTH)[None, :], other=0)
    key_scales = _scales_of(tl.load(scale_at), SCALES)
    keys = operands(words, key_scales, 1, FORMAT, dtype, PAIRED)
    factor = scale_log2 * (1.0 / UNIT)
    logits = tl.dot(keys[0], q[0], input_precision=PRECISION)
    logits = tl.dot(keys[SCALES], q[SCALES], logits, input_precision=PRECISION) * (key_scales[0] * factor)[:, None]
    if SCALES == 2:
        high = tl.dot(keys[1], q[1], input_precision=PRECISION)
        high = tl.dot(keys[3], q[3], high, input_precision=PRECISION)
        logits += high * (key_scales[1] * factor)[:, None]
    if HAS_BIAS:
        logits += tl.load(bias + slot, mask=slot < bias_end, other=0.0)[:, None] * 1.4426950408889634
    if MASKED:
        seen = slot[:, None] <= limit[None, :]
        logits = tl.where(is_live[:, None] & seen if RAGGED else seen, logits, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(logits, axis=0))
    origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(logits - origin[None, :])
    shrink = tl.exp2(largest - origin)
    weight_sum = weight_sum * shrink + tl.sum(weights, axis=0)
    # Loaded as they are multiplied, words down: loads whose result is turned over are not made ahead of their tile.
    at = start[None, :] + (row[None, :] + word[:, None]) + PAGE * WIDTH
    words = tl.load(at) if BLOCK == WIDTH else tl.load(at, mask=(word < WIDTH)[:, None], other=0)
    value_scales = _scales_of(tl.load(scale_at + PAGE, mask=is_live, other=0), SCALES)  # of what is not live: NaN
    values = operands(words, value_scales, 0, FORMAT, dtype, PAIRED)
    scaled = [(weights * scale[:, None]).to(dtype) for scale in value_scales]
    sums = [
        tl.dot(values[i], scaled[i % SCALES], sums[i] * shrink[None, :], input_precision=PRECISION)
        for i in (0, 1, 2, 3)[: 2 * SCALES]
    ]
    return sums, new_largest, weight_sum

"""The running softmax, whatever the pool holds: K and V as they are (`running`), or words of small numbers (`words`).

Queries and sums are in pieces: one, `[ROWS, BLOCK]`, of K and V as they are; of words two for each scale of a row, one
for each operand of a word, on their side, `[BLOCK, ROWS]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvikk.attention.gpu.running import join_part, take_tile
from kvikk.attention.gpu.unpack import unit
from kvikk.attention.gpu.words import numbers_of, parts_of_queries, take_words


@triton.jit
def load_queries(
    at, is_query,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TURN: tl.constexpr,
    SCALES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The queries that begin at addresses `[ROWS]`, in their pieces."""
    if SCALES == 0:
        number = tl.arange(0, BLOCK_D)
        real = is_query[:, None] & (number < HEAD_DIM)[None, :]
        pieces = [tl.load(at[:, None] + number[None, :], mask=real, other=0.0)]
    else:
        pieces = parts_of_queries(at, is_query, HEAD_DIM, BLOCK_D, WIDTH, BLOCK, TURN, SCALES, PRECISION)
    return pieces


@triton.jit
def no_sums(ROWS: tl.constexpr, BLOCK: tl.constexpr, SCALES: tl.constexpr):
    """Sums of nothing, in their pieces."""
    if SCALES == 0:
        sums = [tl.zeros((ROWS, BLOCK), dtype=tl.float32)]
    else:
        sums = [tl.zeros((BLOCK, ROWS), dtype=tl.float32) for i in (0, 1, 2, 3)[: 2 * SCALES]]
    return sums


@triton.jit
def take(
    q, sums, largest, weight_sum, base, end, limit, body, padded_body,
    pool, scales, table, body_run, bias, bias_end, scale_log2, frames_per_block, lane,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, FRAME: tl.constexpr, FORMAT: tl.constexpr,
    SCALES: tl.constexpr, SLOTS: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr, HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Take one tile of slots into the running softmax."""
    if SCALES == 0:
        whole, largest, weight_sum = take_tile(
            q[0], sums[0], largest, weight_sum, base, end, limit, body, padded_body,
            pool, table, body_run, bias, bias_end, scale_log2, frames_per_block, lane,
            WIDTH, BLOCK, PAGE, FRAME, SLOTS, MASKED, RAGGED, HAS_BIAS, PRECISION,
        )  # fmt: skip
        sums = [whole]
    else:
        sums, largest, weight_sum = take_words(
            q, sums, largest, weight_sum, base, end, limit, body, padded_body,
            pool, scales, table, body_run, bias, bias_end, scale_log2, frames_per_block, lane,
            WIDTH, BLOCK, PAGE, FRAME, FORMAT, SCALES, SLOTS, MASKED, RAGGED, HAS_BIAS, PRECISION, PAIRED,
        )  # fmt: skip
    return sums, largest, weight_sum


@triton.jit
def in_ones(sums, FORMAT: tl.constexpr, SCALES: tl.constexpr, dtype: tl.constexpr):
    """Sums that `take` made, of words in units of `unit`, as sums of numbers: exactly, as it is a power of two."""
    if SCALES > 0:
        sums = [each * (1.0 / unit(FORMAT, dtype)) for each in sums]
    return sums


@triton.jit
def join_parts(sums, largest, weight_sum, part_sums, part_largest, part_weight, SCALES: tl.constexpr):
    """`join_part` of all pieces."""
    AXIS: tl.constexpr = 1 if SCALES == 0 else 0
    joined = [
        join_part(sums[i], largest, weight_sum, part_sums[i], part_largest, part_weight, AXIS)
        for i in (0, 1, 2, 3)[: max(1, 2 * SCALES)]
    ]
    return [each[0] for each in joined], joined[0][1], joined[0][2]


@triton.jit
def piece_of(sums, i: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, SCALES: tl.constexpr):
    """A piece of the output, `[ROWS, BLOCK]`, and which numbers of a head it has, `[BLOCK]`."""
    word = tl.arange(0, BLOCK)
    if SCALES == 0:
        piece, numbers = sums[0], word
    else:
        piece, numbers = tl.trans(sums[i]), numbers_of(word, i, HEAD_DIM, SCALES)
    return piece, numbers

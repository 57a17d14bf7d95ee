"""Where top-k, top-p and min-p draw their line through a row of logits, found without sorting it.

Floats have an order-preserving image in the integers, and what lies above a line, counted (top-k) or as mass (top-p),
only falls as the line rises. So the line is found by bisection on the image: each pass over the row tries three lines
and leaves a quarter of the range. In bf16 that takes 8 passes for top-k and about 5 for top-p, whose line is never far
below the largest logit; in fp32 16 and 13. One program has a row, and does not read it where it has neither.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

BLOCK: Final = 8192
WARPS: Final = 32
IMAGE_SHIFT: Final = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""By dtype: low bits of the image of a number, as fp32, that carry nothing."""

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
IMAGE_OF_MINUS_INFINITY: tl.constexpr = tl.constexpr(-2139095041)


@triton.jit
def find_borders(
    logits, row_stride, vocabulary, peaks, parts, seats, temperatures, top_ks, top_ps, min_ps, borders, first_tokens,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr, GREEDY_BELOW: tl.constexpr,
):  # fmt: skip
    """For each row that samples: keep logits over temperature above `borders`, and those equal from `first_tokens` on.

    Rows that are greedy or whose largest logit is not finite are left out.
    """
    row = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + row)
    temperature = tl.load(temperatures + seat)
    part = tl.arange(0, PARTS)
    peak = tl.max(tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf")), axis=0)
    if (temperature >= GREEDY_BELOW) & (tl.abs(peak) < float("inf")):
        source = logits + row * row_stride
        lowest = tl.full((), IMAGE_OF_MINUS_INFINITY >> SHIFT, tl.int64)
        highest = (_image(peak) >> SHIFT).to(tl.int64)
        log_share = tl.log(tl.load(min_ps + seat).to(tl.float64)).to(tl.float32)
        border = tl.div_rn(peak, temperature) + log_share
        first = tl.full((), 0, tl.int32)
        k = tl.load(top_ks + seat)
        p = tl.load(top_ps + seat)
        rate = LOG2_E / temperature
        if (k > 0) & (k < vocabulary):
            image = _search(source, vocabulary, lowest, highest, k.to(tl.float32), peak, rate, False, BLOCK, SHIFT)
            border = tl.maximum(border, tl.div_rn(_value(image, SHIFT), temperature))
        if p < 1.0:
            floor = _lowest_at(border, temperature, lowest, highest, SHIFT)
            total = _mass_from(source, vocabulary, _value(floor, SHIFT), peak, rate, BLOCK)
            limit = total - (1.0 - p) * total
            # All tokens that lie further below the peak hold less than 1 - p of the peak's own mass: a shorter search.
            least = peak - temperature * (tl.log(vocabulary * 1.0 / (1.0 - p)) + 1.0)
            low = tl.maximum(floor, (_image(least) >> SHIFT).to(tl.int64))
            image = _search(source, vocabulary, low, highest, limit, peak, rate, True, BLOCK, SHIFT)
            line = _value(image, SHIFT)
            border = tl.div_rn(line, temperature)
            first = _first_kept(source, vocabulary, temperature, border, limit, line, peak, rate, BLOCK)
        tl.store(borders + row, border)
        tl.store(first_tokens + row, first)


@triton.jit
def _image(value):
    """An int32 for each fp32, in the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(image, SHIFT: tl.constexpr):
    """The fp32 of a shifted image; the bits that are missing are 0 in a positive number's image, 1 in a negative's."""
    coarse = image.to(tl.int32)
    fine = (coarse << SHIFT) | ((coarse >> 31) & ((1 << SHIFT) - 1))
    return (fine ^ ((fine >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(logit, peak, rate):
    """What softmax divides by its sum: 1 for the peak."""
    return tl.exp2((logit - peak) * rate)


@triton.jit
def _search(
    source, vocabulary, low, high, limit, peak, rate, WEIGHED: tl.constexpr, BLOCK: tl.constexpr, SHIFT: tl.constexpr
):
    """The lowest line from `low` to `high` with less than `limit` above it, `high` if there is none below."""
    while low < high:
        span = high - low
        line_1, line_2, line_3 = low + span // 4, low + span // 2, low + 3 * span // 4
        value_1, value_2, value_3 = _value(line_1, SHIFT), _value(line_2, SHIFT), _value(line_3, SHIFT)
        above_1 = tl.zeros((BLOCK,), dtype=tl.float32)
        above_2 = tl.zeros((BLOCK,), dtype=tl.float32)
        above_3 = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, vocabulary, BLOCK):
            logit = _logits(source, start, vocabulary, BLOCK)
            weight = tl.full((BLOCK,), 1.0, tl.float32)
            if WEIGHED:
                weight = _weights(logit, peak, rate)
            above_1 += tl.where(logit > value_1, weight, 0.0)
            above_2 += tl.where(logit > value_2, weight, 0.0)
            above_3 += tl.where(logit > value_3, weight, 0.0)
        fits_1 = tl.sum(above_1, axis=0) < limit
        fits_2 = tl.sum(above_2, axis=0) < limit
        fits_3 = tl.sum(above_3, axis=0) < limit
        low = tl.where(fits_1, low, tl.where(fits_2, line_1, tl.where(fits_3, line_2, line_3)) + 1)
        high = tl.where(fits_1, line_1, tl.where(fits_2, line_2, tl.where(fits_3, line_3, high)))
    return high


@triton.jit
def _logits(source, start, vocabulary, BLOCK: tl.constexpr):
    token = start + tl.arange(0, BLOCK)
    return tl.load(source + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _lowest_at(border, temperature, low, high, SHIFT: tl.constexpr):
    """The lowest line from `low` to `high` that over the temperature is at `border` or above."""
    while low < high:
        middle = low + (high - low) // 2
        fits = tl.div_rn(_value(middle, SHIFT), temperature) >= border
        low = tl.where(fits, low, middle + 1)
        high = tl.where(fits, middle, high)
    return high


@triton.jit
def _mass_from(source, vocabulary, floor, peak, rate, BLOCK: tl.constexpr):
    """The sum of the weights of logits from `floor` on."""
    mass = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, vocabulary, BLOCK):
        logit = _logits(source, start, vocabulary, BLOCK)
        mass += tl.where(logit >= floor, _weights(logit, peak, rate), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def _first_kept(source, vocabulary, temperature, border, limit, line, peak, rate, BLOCK: tl.constexpr):
    """Of the tokens that are equal at top-p's border, the first that stays: as many as needed do, the last ones."""
    above = tl.zeros((BLOCK,), dtype=tl.float32)
    equal = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocabulary, BLOCK):
        logit = _logits(source, start, vocabulary, BLOCK)
        scaled = tl.div_rn(logit, temperature)
        above += tl.where(scaled > border, _weights(logit, peak, rate), 0.0)
        equal += (scaled == border).to(tl.int32)
    equals = tl.sum(equal, axis=0)
    each = _weights(line, peak, rate)
    missing = tl.ceil((limit - tl.sum(above, axis=0)) / tl.maximum(each, 1e-38))
    kept = tl.maximum(tl.minimum(missing, equals.to(tl.float32)), 1.0)
    dropped = equals - kept.to(tl.int32)
    first = tl.full((), 0, tl.int32)
    if dropped > 0:
        seen = tl.full((), 0, tl.int32)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            logit = _logits(source, start, vocabulary, BLOCK)
            is_equal = (tl.div_rn(logit, temperature) == border).to(tl.int32)
            count = tl.sum(is_equal, axis=0)
            if (seen <= dropped) & (dropped < seen + count):
                place = seen + tl.cumsum(is_equal, axis=0) - 1
                first = tl.max(tl.where((is_equal == 1) & (place == dropped), token, 0), axis=0)
            seen += count
    return first

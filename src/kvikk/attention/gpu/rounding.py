"""What the store kernel makes of rows of K and V in a quantised pool, bit for bit as `memory.quantise` does."""

from __future__ import annotations

import triton
import triton.language as tl

from kvikk.memory import int4

STEP = tl.constexpr(1.0 / int4.LEVELS)
LEAST = tl.constexpr(int4.LEAST)
TOP = tl.constexpr(float(int4.LEVELS))
PARTS = tl.constexpr(int4.PARTS)
ZERO_BITS = tl.constexpr(int4.ZERO_BITS)


@triton.jit
def over_scales(x, LARGEST: tl.constexpr):
    """Rows over their scales, and these, bit for bit as in `memory.quantise`; rounding them is left to the caller."""
    odd = tl.sum(tl.where(tl.abs(x) < float("inf"), 0, 1), axis=1)
    scale = tl.where(odd > 0, float("nan"), tl.max(tl.abs(x), axis=1) * (1.0 / LARGEST))
    divisor = tl.where(scale > 0, scale, 1.0)[:, None]
    ratio = tl.where((scale > 0)[:, None], tl.div_rn(x, tl.broadcast_to(divisor, x.shape)), 0.0)
    return tl.minimum(tl.maximum(ratio, -LARGEST), LARGEST), scale


@triton.jit
def turn_rows(x, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, TURN: tl.constexpr):
    """Rows as `int4.turn` turns them: its sums in its order."""
    for level in tl.static_range(9):
        if 2 << level <= TURN:
            pairs = tl.reshape(x, (HEADS, BLOCK_D // (2 << level), 2, 1 << level))
            low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            sums = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
            x = tl.reshape(sums, (HEADS, BLOCK_D))
    return x


@triton.jit
def _group(x, inside):
    """Of the numbers inside: step (0 where it is not used), zero, scale, and whether they are finite."""
    low = tl.min(tl.where(inside, x, 0.0), axis=1)
    high = tl.max(tl.where(inside, x, 0.0), axis=1)
    step = (high - low) * STEP
    is_finite = step < float("inf")
    step = tl.where((step >= LEAST) & is_finite, step, 0.0)
    zero = tl.div_rn(-low, tl.where(step > 0, step, 1.0)) * PARTS
    zero = (tl.where(step > 0, zero, 0.0) + 12582912.0) - 12582912.0
    scale = ((step * (1.0 / PARTS)).to(tl.int32, bitcast=True) & ~ZERO_BITS) | zero.to(tl.int32)
    return step, zero, scale.to(tl.float32, bitcast=True), is_finite


@triton.jit
def halves(x, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows as bytes of two numbers, of which the first HEAD_DIM / 2 count, and the scales of their groups."""
    number = tl.arange(0, BLOCK_D)[None, :]
    is_low = number < HEAD_DIM // 2
    odd = tl.sum(tl.where(tl.abs(x) < float("inf"), 0, 1), axis=1)
    low_step, low_zero, low_scale, low_finite = _group(x, is_low)
    high_step, high_zero, high_scale, high_finite = _group(x, (number >= HEAD_DIM // 2) & (number < HEAD_DIM))
    is_finite = (odd == 0) & low_finite & high_finite
    zero = tl.where(is_low, low_zero[:, None], high_zero[:, None])
    scale = tl.where(is_low, low_scale[:, None], high_scale[:, None])
    is_used = (tl.where(is_low, low_step[:, None], high_step[:, None]) > 0) & is_finite[:, None]
    divisor = tl.where(is_used, scale * PARTS, 1.0)
    numbers = (tl.div_rn(x, divisor) + zero * (1.0 / PARTS) + 12582912.0) - 12582912.0
    numbers = tl.where(is_used, tl.minimum(tl.maximum(numbers, 0.0), TOP), 0.0).to(tl.int32)
    partner = tl.minimum(number + HEAD_DIM // 2, BLOCK_D - 1)
    packed = numbers | (tl.gather(numbers, tl.broadcast_to(partner, (HEADS, BLOCK_D)), 1) << 4)
    nothing = float("nan")
    return packed.to(tl.uint8), tl.where(is_finite, low_scale, nothing), tl.where(is_finite, high_scale, nothing)

"""The running softmax of the attention kernel over int4 (`memory.int4`): see `running`, which has the other formats.

A row's halves are the two nibbles of its bytes, so each tile of bytes is two operands, and every product is two: of
half of the query's numbers each, and into half of the output's. All is on its side, slots down and queries across: what
was unpacked is then the first operand of a product, which the matrix units take from registers, and a group of 8
queries is not padded to 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvikk.attention.gpu.running import locate


@triton.jit
def turned_half(
    q, FIRST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, TURN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Half of the numbers of `int4.turn(q)`, from FIRST on, over TURN: times turned keys they are `k @ q`.

    q is `[BLOCK_D, ROWS]`, and so `[BLOCK, ROWS]` is what comes back.
    """
    row = FIRST + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    odd = row & column & (TURN - 1)  # bits that both have: an odd number of them is a minus
    odd = odd ^ (odd >> 8)
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1)
    is_inside = (row // TURN == column // TURN) & (row < FIRST + HEAD_DIM // 2)
    signs = tl.where(is_inside, 1 - 2 * (odd & 1), 0)
    return (tl.dot(signs.to(q.dtype), q, input_precision=PRECISION) * (1.0 / TURN)).to(q.dtype)


def _unpacking(kind: str, one: str, base: str) -> tl.constexpr:
    """Instructions that make `8 * number - zero` of the halves of four bytes, two at a time.

    The base, 128 in bf16 and 1024 in fp16, has room for a number below 128 in its last bits. So a byte becomes the sum
    of both when it is put beside the base's upper byte, and then less is added: minus base, minus the zero.

    Args:
        kind: of pairs of numbers.
        one: of these, in bits.
        base: upper bytes of the base, four.
    """
    halves = (("l", "shl.b32 l, $4, 3"), ("h", "shr.b32 h, $4, 1"))
    lines = [f".reg .b32 l, h, a, b, c, d, one; mov.b32 one, {one};"]
    lines += [f"{shift}; and.b32 {half}, {half}, 0x78787878;" for half, shift in halves]
    for index, to in enumerate("abcd"):
        half, pair = "llhh"[index], ("0x4140", "0x4342")[index % 2]
        lines += [f"prmt.b32 {to}, {half}, {base}, {pair}; fma.rn.{kind} ${index}, {to}, one, ${index + 5};"]
    return tl.constexpr("{ " + " ".join(lines) + " }")


UNPACK_BF16 = _unpacking("bf16x2", "0x3F803F80", "0x43434343")
UNPACK_FP16 = _unpacking("f16x2", "0x3C003C00", "0x64646464")
REGISTERS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")


@triton.jit
def _less(scales, BASE: tl.constexpr, dtype: tl.constexpr):
    """Minus the base and minus the zero, which lies in the last bits of both."""
    return ((scales.to(tl.int32, bitcast=True) & 127) | BASE).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _operands(packed, low_scales, high_scales, dtype: tl.constexpr, PAIRED: tl.constexpr):
    """`8 * number - zero` of both halves of each byte, exact; PAIRED: in instructions of the GPU, for 16-bit dtypes."""
    if PAIRED and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            UNPACK_BF16, REGISTERS, [packed, _less(low_scales, 0xC300, dtype), _less(high_scales, 0xC300, dtype)],
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    elif PAIRED and dtype == tl.float16:
        low, high = tl.inline_asm_elementwise(
            UNPACK_FP16, REGISTERS, [packed, _less(low_scales, 0xE400, dtype), _less(high_scales, 0xE400, dtype)],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low_zeros = low_scales.to(tl.int32, bitcast=True) & 127
        high_zeros = high_scales.to(tl.int32, bitcast=True) & 127
        low = (((packed << 3) & 120).to(tl.int32) - low_zeros).to(tl.float32).to(dtype)
        high = (((packed >> 1) & 120).to(tl.int32) - high_zeros).to(tl.float32).to(dtype)
    return low, high


@triton.jit
def take_packed_tile(
    low_q, high_q, low_sums, high_sums, largest, weight_sum, base, end, limit, body, padded_body,
    pool, scales, table, body_run, bias, bias_end, scale_log2, frames_per_block, lane,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, FRAME: tl.constexpr, SLOTS: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Take one tile of slots into the running softmax; queries and sums are `[BLOCK, ROWS]`."""
    slot, frame, is_live = locate(
        base, end, body, padded_body, table, body_run, frames_per_block, lane, PAGE, SLOTS, RAGGED
    )
    number = tl.arange(0, BLOCK)
    at = pool + (frame * FRAME + slot % PAGE * WIDTH)[:, None] + number[None, :]
    scale_at = scales + frame * (FRAME // 4) + slot % PAGE * 2
    keys = tl.load(at) if BLOCK == WIDTH else tl.load(at, mask=(number < WIDTH)[None, :], other=0.0)
    low_scales, high_scales = tl.load(scale_at), tl.load(scale_at + 1)
    low, high = _operands(keys, low_scales[:, None], high_scales[:, None], low_q.dtype, PAIRED)
    logits = tl.dot(low, low_q, input_precision=PRECISION) * (low_scales * scale_log2)[:, None]
    logits += tl.dot(high, high_q, input_precision=PRECISION) * (high_scales * scale_log2)[:, None]
    if HAS_BIAS:
        logits += tl.load(bias + slot, mask=slot < bias_end, other=0.0)[:, None] * 1.4426950408889634
    if MASKED:
        logits = tl.where(is_live[:, None] & (slot[:, None] <= limit[None, :]), logits, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(logits, axis=0))
    origin = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(logits - origin[None, :])
    shrink = tl.exp2(largest - origin)
    # Loaded as they are multiplied, numbers down: loads whose result is turned over are not made ahead of their tile.
    at = pool + (frame * FRAME + slot % PAGE * WIDTH)[None, :] + number[:, None] + PAGE * WIDTH
    values = tl.load(at) if BLOCK == WIDTH else tl.load(at, mask=(number < WIDTH)[:, None], other=0.0)
    low_scales = tl.load(scale_at + 2 * PAGE, mask=is_live, other=0.0)  # what is not live may be NaN
    high_scales = tl.load(scale_at + 2 * PAGE + 1, mask=is_live, other=0.0)
    low, high = _operands(values, low_scales[None, :], high_scales[None, :], low_q.dtype, PAIRED)
    weight_sum = weight_sum * shrink + tl.sum(weights, axis=0)
    low_weights = (weights * low_scales[:, None]).to(low_q.dtype)
    high_weights = (weights * high_scales[:, None]).to(low_q.dtype)
    low_sums = tl.dot(low, low_weights, low_sums * shrink[None, :], input_precision=PRECISION)
    high_sums = tl.dot(high, high_weights, high_sums * shrink[None, :], input_precision=PRECISION)
    return low_sums, high_sums, new_largest, weight_sum

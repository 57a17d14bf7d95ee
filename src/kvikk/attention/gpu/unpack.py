"""Operands for the matrix units out of 16-bit words of small numbers, exactly.

A word has two numbers of int8 or fp8, its bytes, or four of int4, and is taken apart into as many operands, in pairs of
words. No instruction of conversion is used: these are several times slower than others. Instead, a number's bits are
put where bf16 or fp16 has its last ones. Alone there they are one of the tiniest numbers, which follow each other in
steps of one size up to 255 of them, and one instruction multiplies and adds, which makes them what they stand for, in
units of `unit`, as no power of two of the type reaches from its tiniest numbers to 1.

Triton has no words for pairs of numbers, so this is PTX on a GPU, and plain arithmetic in the interpreter and in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl

from kvikk.memory import int4

ZERO_BITS = tl.constexpr(int4.ZERO_BITS)
PARTS = tl.constexpr(int4.PARTS)


@dataclass(frozen=True, slots=True)
class _Half:
    """A 16-bit type.

    Args:
        kind: PTX's name of two of it.
        mantissa: its bits.
        bias: of its exponent, which is also the largest one.
    """

    kind: str
    mantissa: int
    bias: int

    @property
    def unit(self) -> int:
        """Exponent of what the smallest of the tiny numbers becomes by the largest power of two."""
        return 1 - self.mantissa

    def power(self, exponent: int, sign: int = 0) -> str:
        """2 to the exponent, negative if sign is 1, twice, as PTX writes it."""
        half = sign << 15 | exponent + self.bias << self.mantissa
        return f"{half << 16 | half:#010x}"

    def make(self, out: int, exponent: int, less: str) -> str:
        """`$out` is `t` times 2 to the exponent, plus `less`."""
        return f"mov.b32 f, {self.power(exponent)}; fma.rn.{self.kind} ${out}, t, f, {less};"


_BF16: Final = _Half("bf16x2", 7, 127)
_FP16: Final = _Half("f16x2", 10, 15)
_START: Final = "{ .reg .b32 t, u, f, c; mov.b32 c, 0x80008000; "
"""c is -0, which is added where nothing is: a zero keeps its sign."""


def _int8(half: _Half) -> tl.constexpr:
    """Two of `number * 2**unit`. With their top bit turned over, numbers are 128 more, and not negative."""
    bits = "lop3.b32 t, {}, 0x00ff00ff, 0x00800080, 0x6a;"  # (a & b) ^ c
    return tl.constexpr(
        f"{_START} shr.u32 u, $2, 8; mov.b32 c, {half.power(7 + half.unit, sign=1)};"
        f"{bits.format('$2')} {half.make(0, half.bias, 'c')} {bits.format('u')} {half.make(1, half.bias, 'c')} }}"
    )


def _fp8(half: _Half) -> tl.constexpr:
    """Two numbers. A byte, drawn out by its sign and moved to where exponent and mantissa end, is a small number."""
    shift = half.mantissa - 3
    mask = 0x8000 | 0x7F << shift
    bits = f"prmt.b32 t, $2, 0, {{}}; shl.b32 t, t, {shift}; and.b32 t, t, {mask << 16 | mask:#010x};"
    low, high = half.make(0, half.bias - 7, "c"), half.make(1, half.bias - 7, "c")
    return tl.constexpr(f"{_START} {bits.format('0xa280')} {low} {bits.format('0xb391')} {high} }}")


def _int4(half: _Half) -> tl.constexpr:
    """Four of `(8 * number - zero) * 2**(unit - 3)`; zeros are $5 of the lower halves of bytes, $6 of the upper ones.

    An upper half is 16 times as large where it lies.
    """
    lines = [_START, "shr.u32 u, $4, 8;"]
    for out, byte in enumerate(("$4", "$4", "u", "u")):
        is_upper = out % 2
        mask = "0x00f000f0" if is_upper else "0x000f000f"
        lines += [f"and.b32 t, {byte}, {mask};", half.make(out, half.bias - 4 * is_upper, f"${5 + is_upper}")]
    return tl.constexpr(" ".join(lines) + " }")


def _minus_zeros(half: _Half) -> tl.constexpr:
    """What `_int4` adds, out of the last bits of two scales."""
    factor = half.power(half.bias - 3, sign=1)
    return tl.constexpr(
        f"{_START} prmt.b32 t, $1, $2, 0x5410; and.b32 t, t, 0x007f007f;"
        f"mov.b32 f, {factor}; fma.rn.{half.kind} $0, t, f, c; }}"
    )


INT8_BF16, INT8_FP16 = _int8(_BF16), _int8(_FP16)
FP8_BF16, FP8_FP16 = _fp8(_BF16), _fp8(_FP16)
INT4_BF16, INT4_FP16 = _int4(_BF16), _int4(_FP16)
ZEROS_BF16, ZEROS_FP16 = _minus_zeros(_BF16), _minus_zeros(_FP16)


@triton.constexpr_function
def unit(form: str, dtype: tl.dtype) -> float:
    """What a number of a format, or an eighth of a step of int4, is worth among its operands: a power of two."""
    if form == "fp8" or dtype == tl.float32:
        return 1.0
    half = _BF16 if dtype == tl.bfloat16 else _FP16
    return 2.0 ** (half.unit - (3 if form == "int4" else 0))


@triton.jit
def operands(words, scales, AXIS: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr, PAIRED: tl.constexpr):
    """Two or four operands of dtype, of the shape of the words: lower bytes first, and of these the lower halves.

    Args:
        words: int16, where slots run along one axis.
        scales: of the slots, as `row_scales` gives them.
        AXIS: the other axis.
        FORMAT: int8, fp8 or int4.
        dtype: the model's.
        PAIRED: in PTX, where dtype is of 16 bits.
    """
    UNIT: tl.constexpr = unit(FORMAT, dtype)
    wide = words.to(tl.int32)
    if PAIRED and dtype != tl.float32:
        if FORMAT == "int4":
            int4_code: tl.constexpr = INT4_BF16 if dtype == tl.bfloat16 else INT4_FP16
            zeros = [tl.expand_dims(_minus_zero_pairs(scale, dtype), AXIS) for scale in scales]
            bits = tl.inline_asm_elementwise(
                int4_code, "=&r,=&r,=&r,=&r,r,r,r", [words, zeros[0], zeros[1]],
                dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            int8_code: tl.constexpr = INT8_BF16 if dtype == tl.bfloat16 else INT8_FP16
            fp8_code: tl.constexpr = FP8_BF16 if dtype == tl.bfloat16 else FP8_FP16
            code: tl.constexpr = int8_code if FORMAT == "int8" else fp8_code
            bits = tl.inline_asm_elementwise(
                code, "=&r,=&r,r", [words], dtype=(tl.int16, tl.int16), is_pure=True, pack=2
            )  # fmt: skip
        made = [each.to(dtype, bitcast=True) for each in bits]
    elif FORMAT == "int4":
        zeros = [tl.expand_dims(scale.to(tl.int32, bitcast=True) & ZERO_BITS, AXIS) for scale in scales]
        made = [((((wide >> 4 * i) & 15) * PARTS - zeros[i % 2]).to(tl.float32) * UNIT).to(dtype) for i in (0, 1, 2, 3)]
    elif FORMAT == "int8":
        made = [((wide << 24 - 8 * i >> 24).to(tl.float32) * UNIT).to(dtype) for i in (0, 1)]
    else:
        made = [_of_fp8(wide >> 8 * i).to(dtype) for i in (0, 1)]
    return made


@triton.jit
def _minus_zero_pairs(scales, dtype: tl.constexpr):
    """What is added to numbers of int4, of each of `[SLOTS]` scales."""
    code: tl.constexpr = ZEROS_BF16 if dtype == tl.bfloat16 else ZEROS_FP16
    return tl.inline_asm_elementwise(code, "=r,r,r", [scales], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def _of_fp8(x):
    """The fp32 number of each last byte: its bits in their places, times what the exponents differ by."""
    return ((x & 127) << 20 | (x & 128) << 24).to(tl.float32, bitcast=True) * 1.329227995784916e36

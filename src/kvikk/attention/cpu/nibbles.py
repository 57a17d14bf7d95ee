"""int4 on a CPU: rows turned, packed and unpacked as `memory.int4` says, bit for bit.

Same rules as `vector`: raw addresses, fp32 rows are whole vectors, nothing is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core.cgutils import alloca_once_value, for_range

from kvikk.attention.cpu import ir as v
from kvikk.attention.cpu.table import OPTIONS
from kvikk.attention.cpu.vector import narrow_row, primitive, strips, tail_mask, widen_row
from kvikk.memory.int4 import LEAST, LEVELS, PARTS, ZERO_BITS

_SCALE_BYTES = 8
"""Of a row: two of fp32."""
_ROUND = 12582912.0
"""1.5 * 2 ** 23: adding it rounds to a whole number, halves to even, and leaves that in the low bits."""


def _is_packed(builder: Any, mark: Any) -> Any:
    return v.I1(int(mark == types.uint8))


def _ints(value: int) -> Any:
    return ir.Constant(v.VI, [value] * v.LANES)


def _turn_within(builder: Any, target: Any, count: Any, apart: int) -> None:
    """One round of a turn, of numbers that are `apart`, below 16, in a row of `count` in place."""
    order = ir.Constant(v.VI, [lane ^ apart for lane in range(v.LANES)])
    is_second = ir.Constant(ir.VectorType(v.I1, v.LANES), [bool(lane & apart) for lane in range(v.LANES)])
    with for_range(builder, strips(builder, count)) as loop:
        at = builder.add(target, builder.shl(loop.index, v.I64(6)))
        numbers = v.load(builder, at, v.VF)
        partners = builder.shuffle_vector(numbers, numbers, order)
        sums, differences = builder.fadd(numbers, partners), builder.fsub(partners, numbers)
        v.store(builder, builder.select(is_second, differences, sums), at)


def _turn_first(builder: Any, target: Any, count: Any, width: Any) -> None:
    """The rounds of a turn that stay within 16 numbers."""
    for apart in (1, 2, 4, 8):
        with builder.if_then(builder.icmp_signed(">", width, v.I64(apart))):
            _turn_within(builder, target, count, apart)


def _turn_pair(builder: Any, first: Any, second: Any) -> None:
    """A round of a turn for two vectors, in place."""
    one, other = v.load(builder, first, v.VF), v.load(builder, second, v.VF)
    v.store(builder, builder.fadd(one, other), first)
    v.store(builder, builder.fsub(one, other), second)


def _group(builder: Any, source: Any, count: Any) -> tuple[Any, Any]:
    """The least and the largest of `count` numbers and 0, both NaN where one is not finite."""
    low, high, nothing = (alloca_once_value(builder, v.full(0.0)) for _ in range(3))
    for total in (low, high, nothing):
        builder.store(v.full(0.0), total)
    with for_range(builder, strips(builder, count)) as loop:
        at = builder.add(source, builder.shl(loop.index, v.I64(6)))
        numbers = v.masked_load(builder, at, v.F32, tail_mask(builder, count, loop.index))
        builder.store(v.larger(builder, numbers, builder.load(high)), high)
        builder.store(v.smaller(builder, numbers, builder.load(low)), low)
        # A number times 0 is nothing, NaN and infinity times 0 are NaN.
        builder.store(v.fma(builder, numbers, v.full(0.0), builder.load(nothing)), nothing)
    odd = v.across(builder, builder.load(nothing), v.fadd)
    return (
        builder.fadd(v.across(builder, builder.load(low), v.smaller), odd),
        builder.fadd(v.across(builder, builder.load(high), v.larger), odd),
    )


def _pack_row(builder: Any, target: Any, scales: Any, source: Any, half: Any) -> None:
    """Store a row of `2 * half` fp32 numbers as `half` bytes, exactly that many, and its two scales."""
    rows = [source, builder.add(source, builder.shl(half, v.I64(2)))]
    zeros, used, divisors, words, finite = [], [], [], [], v.I1(1)
    for row in rows:
        low, high = _group(builder, row, half)
        step = builder.fmul(builder.fsub(high, low), v.F32(1.0 / LEVELS))
        is_finite = builder.fcmp_ordered("<", step, v.F32(float("inf")))
        finite = builder.and_(finite, is_finite)
        is_used = builder.and_(is_finite, builder.fcmp_ordered(">=", step, v.F32(LEAST)))
        ratio = builder.fdiv(builder.fneg(low), builder.select(is_used, step, v.F32(1.0)))
        raised = builder.fadd(builder.fmul(ratio, v.F32(PARTS)), v.F32(_ROUND))
        zero = builder.select(is_used, builder.fsub(raised, v.F32(_ROUND)), v.F32(0.0))
        bits = builder.and_(builder.bitcast(builder.fmul(step, v.F32(1.0 / PARTS)), v.I32), v.I32(~ZERO_BITS))
        scale = builder.bitcast(builder.or_(bits, builder.fptosi(zero, v.I32)), v.F32)
        zeros.append(v.splat(builder, builder.fmul(zero, v.F32(1.0 / PARTS))))
        used.append(is_used)
        divisors.append(v.splat(builder, builder.select(is_used, builder.fmul(scale, v.F32(PARTS)), v.F32(1.0))))
        words.append(builder.select(is_used, scale, v.F32(0.0)))
    for index, word in enumerate(words):
        told = builder.select(finite, word, v.F32(float("nan")))
        v.store(builder, told, builder.add(scales, v.I64(4 * index)))
    with for_range(builder, strips(builder, half)) as loop:
        mask = tail_mask(builder, half, loop.index)
        halves = []
        for row, zero, is_used, divisor in zip(rows, zeros, used, divisors, strict=True):
            at = builder.add(row, builder.shl(loop.index, v.I64(6)))
            ratio = builder.fdiv(v.masked_load(builder, at, v.F32, mask), divisor)
            number = builder.fadd(ratio, zero)
            number = builder.select(builder.fcmp_ordered(">", number, v.full(0.0)), number, v.full(0.0))
            number = v.smaller(builder, number, v.full(LEVELS))
            whole = builder.and_(builder.bitcast(builder.fadd(number, v.full(_ROUND)), v.VI), _ints(LEVELS))
            keeps = v.splat(builder, builder.and_(is_used, finite))
            halves.append(builder.select(keeps, whole, _ints(0)))
        packed = builder.or_(halves[0], builder.shl(halves[1], _ints(4)))
        at = builder.add(target, builder.shl(loop.index, v.I64(4)))
        v.masked_store(builder, builder.trunc(packed, ir.VectorType(v.I8, v.LANES)), at, mask)


def _unpack_row(builder: Any, target: Any, source: Any, scales: Any, half: Any) -> None:
    """What a row of `half` bytes stands for, `2 * half` fp32 numbers, exactly that many; keys stay turned."""
    factors, zeros = [], []
    for index in range(2):
        word = v.load(builder, builder.add(scales, v.I64(4 * index)), v.I32)
        factors.append(v.splat(builder, builder.bitcast(word, v.F32)))
        zeros.append(v.splat(builder, builder.and_(word, v.I32(ZERO_BITS))))
    targets = [target, builder.add(target, builder.shl(half, v.I64(2)))]
    eighths = _ints(LEVELS * PARTS)
    with for_range(builder, strips(builder, half)) as loop:
        mask = tail_mask(builder, half, loop.index)
        at = builder.add(source, builder.shl(loop.index, v.I64(4)))
        packed = builder.zext(v.masked_load(builder, at, v.I8, mask), v.VI)
        numbers = [
            builder.and_(builder.shl(packed, _ints(3)), eighths),
            builder.and_(builder.lshr(packed, _ints(1)), eighths),
        ]
        for number, zero, factor, row in zip(numbers, zeros, factors, targets, strict=True):
            value = builder.fmul(builder.sitofp(builder.sub(number, zero), v.VF), factor)
            v.masked_store(builder, value, builder.add(row, builder.shl(loop.index, v.I64(6))), mask)


is_packed = primitive(types.boolean, "", _is_packed)
turn_first = primitive(types.void, "iii", _turn_first, marked=False)
turn_pair = primitive(types.void, "ii", _turn_pair, marked=False)
pack_row = primitive(types.void, "iiii", _pack_row, marked=False)
unpack_row = primitive(types.void, "iiii", _unpack_row, marked=False)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def turn_row(row: int, dim: int) -> None:
    """Turn a row of fp32 numbers in place, as `int4.turn` does."""
    width = dim & -dim
    turn_first(row, dim, width)
    apart = 16
    while apart < width:
        for first in range(0, dim, 2 * apart):
            for lane in range(first, first + apart, 16):
                turn_pair(row + lane * 4, row + (lane + apart) * 4)
        apart *= 2


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def turned_query(mark: Any, to: Any, target: int, source: int, dim: int, spare: int) -> None:
    """A query for turned keys, in numbers of `to`: turned, and over the width of a turn. `spare`: room for a row."""
    widen_row(mark, spare, source, dim)
    turn_row(spare, dim)
    narrow_row(to, target, spare, dim, np.float32(1) / np.float32(dim & -dim))


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def store_packed(mark: Any, frame: int, row: int, rows: int, source: int, dim: int, is_key: bool, spare: int) -> None:
    """Store one row of K or V in a frame of so many. `spare`: room for a row."""
    half = dim // 2
    widen_row(mark, spare, source, dim)
    if is_key:
        turn_row(spare, dim)
    pack_row(frame + row * half, frame + rows * half + row * _SCALE_BYTES, spare, half)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def load_packed(target: int, frame: int, row: int, rows: int, dim: int) -> None:
    """One row of a frame of so many, as fp32; see `unpack_row`."""
    half = dim // 2
    unpack_row(target, frame + row * half, frame + rows * half + row * _SCALE_BYTES, half)

"""Vector primitives of the CPU kernels, called from numba code with raw addresses.

Two things are decided when code is generated: what numbers are, from the type of a `mark` argument (`uint16` stands for
bf16, `int16` for fp16, `float32` for fp32, `int8` for quantised ones, whose scale is the caller's, `uint8` for those
of int4, two in a byte, which are the business of `nibbles`), and whether
products are of bf16 pairs (one instruction for two products and a sum), which takes bf16 and a machine that has it.
Everything else is a run-time argument. Addresses are int64, strides are in bytes. None of them checks anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core.cgutils import alloca_once_value, for_range
from numba.extending import intrinsic

from kvikk.attention.cpu import ir as v
from kvikk.memory.quantise import LARGEST

Codegen = Callable[[Any, Any, Any, Any], Any]


def primitive(result: Any, kinds: str, emit: Callable[..., Any], *, marked: bool = True) -> Any:
    """Make an intrinsic. `kinds` has one letter for each argument after the mark: i(nt64) or f(loat32)."""
    wanted = tuple(types.int64 if kind == "i" else types.float32 for kind in kinds)

    def define(typingctx: Any, *args: Any) -> tuple[Any, Codegen]:
        mark = args[0] if marked else None

        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            value = emit(builder, mark, *values[1:]) if marked else emit(builder, *values)
            return context.get_dummy_value() if result is types.void else value

        return result(*((mark, *wanted) if marked else wanted)), codegen

    # numba asks for the signature and cannot pass *args: give it one parameter for each argument.
    names = ["typingctx", *(["mark"] if marked else []), *(f"a{i}" for i in range(len(kinds)))]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    define.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    define.__name__ = emit.__name__
    return intrinsic(define)


# Scalars.


def _get_i64(builder: Any, address: Any, index: Any) -> Any:
    return v.load(builder, builder.add(address, builder.shl(index, v.I64(3))), v.I64)


def _get_f32(builder: Any, address: Any, index: Any) -> Any:
    return v.load(builder, builder.add(address, builder.shl(index, v.I64(2))), v.F32)


def _set_f32(builder: Any, address: Any, index: Any, value: Any) -> None:
    v.store(builder, value, builder.add(address, builder.shl(index, v.I64(2))))


def _move32(builder: Any, target: Any, source: Any) -> None:
    v.store(builder, v.load(builder, source, v.I32), target)


def _half32(builder: Any, target: Any, source: Any) -> None:
    v.store(builder, builder.zext(v.load(builder, source, v.I16), v.I32), target)


def _next_index(builder: Any, counter: Any) -> Any:
    """Take the next number of a shared counter; what was stored before is seen by whoever takes a later one."""
    return builder.atomic_rmw("add", v.at(builder, counter, v.I64), v.I64(1), "acq_rel")


def _set_i64(builder: Any, address: Any, value: Any) -> None:
    v.store(builder, value, address)


def _widen_one(builder: Any, mark: Any, target: Any, source: Any) -> None:
    v.store(builder, v.widen(builder, v.load(builder, source, v.ELEMENT[mark])), target)


def _move(builder: Any, target: Any, source: Any, size: Any) -> None:
    kind = ir.IntType(8)
    args = (v.at(builder, target, kind), v.at(builder, source, kind), size, v.I1(0))
    v.call(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), *args)


def _zero(builder: Any, target: Any, size: Any) -> None:
    args = (v.at(builder, target, ir.IntType(8)), ir.IntType(8)(0), size, v.I1(0))
    v.call(builder, "llvm.memset.p0.i64", ir.VoidType(), *args)


def _prefetch(builder: Any, source: Any, size: Any) -> None:
    """Ask for `size` bytes, a line of 64 at a time. Addresses that cannot be read do no harm."""
    with for_range(builder, builder.lshr(builder.add(size, v.I64(63)), v.I64(6))) as loop:
        at = v.at(builder, builder.add(source, builder.shl(loop.index, v.I64(6))), ir.IntType(8))
        v.call(builder, "llvm.prefetch.p0", ir.VoidType(), at, v.I32(0), v.I32(3), v.I32(1))


def _log2(builder: Any, x: Any) -> Any:
    return v.call(builder, "llvm.log2.f32", v.F32, x)


def _exp2(builder: Any, x: Any) -> Any:
    return builder.extract_element(v.exp2(builder, v.splat(builder, x)), v.I32(0))


def _is_paired(builder: Any, mark: Any) -> Any:
    return v.I1(int(v.paired(mark)))


def _is_quantised(builder: Any, mark: Any) -> Any:
    return v.I1(int(mark == types.int8))


def _bytes_of(builder: Any, mark: Any) -> Any:
    return v.I64(v.element_bytes(v.ELEMENT[mark]))


def _call_int(builder: Any, function: Any) -> Any:
    """`int function(void)`."""
    kind = ir.FunctionType(v.I32, [])
    return builder.sext(builder.call(builder.inttoptr(function, ir.PointerType(kind)), []), v.I64)


def _call_void(builder: Any, function: Any) -> None:
    """`void function(void)`."""
    kind = ir.FunctionType(ir.VoidType(), [])
    builder.call(builder.inttoptr(function, ir.PointerType(kind)), [])


def _call_body(builder: Any, function: Any, argument: Any) -> None:
    """`void function(void *argument)`."""
    kind = ir.FunctionType(ir.VoidType(), [v.I64])
    builder.call(builder.inttoptr(function, ir.PointerType(kind)), [argument])


def _call_team(builder: Any, function: Any, body: Any, argument: Any, threads: Any) -> None:
    """`GOMP_parallel`: `void function(void (*body)(void *), void *argument, unsigned threads, unsigned flags)`."""
    kind = ir.FunctionType(ir.VoidType(), [v.I64, v.I64, v.I32, v.I32])
    args = [body, argument, builder.trunc(threads, v.I32), v.I32(0)]
    builder.call(builder.inttoptr(function, ir.PointerType(kind)), args)


get_i64 = primitive(types.int64, "ii", _get_i64, marked=False)
get_f32 = primitive(types.float32, "ii", _get_f32, marked=False)
set_f32 = primitive(types.void, "iif", _set_f32, marked=False)
move32 = primitive(types.void, "ii", _move32, marked=False)
half32 = primitive(types.void, "ii", _half32, marked=False)
next_index = primitive(types.int64, "i", _next_index, marked=False)
widen_one = primitive(types.void, "ii", _widen_one)
move = primitive(types.void, "iii", _move, marked=False)
zero = primitive(types.void, "ii", _zero, marked=False)
prefetch = primitive(types.void, "ii", _prefetch, marked=False)
log2 = primitive(types.float32, "f", _log2, marked=False)
exp2 = primitive(types.float32, "f", _exp2, marked=False)
is_paired = primitive(types.boolean, "", _is_paired)
is_quantised = primitive(types.boolean, "", _is_quantised)
bytes_of = primitive(types.int64, "", _bytes_of)
call_int = primitive(types.int64, "i", _call_int, marked=False)
call_void = primitive(types.void, "i", _call_void, marked=False)
call_body = primitive(types.void, "ii", _call_body, marked=False)
call_team = primitive(types.void, "iiii", _call_team, marked=False)
set_i64 = primitive(types.void, "ii", _set_i64, marked=False)


# Rows of numbers.


def strips(builder: Any, count: Any) -> Any:
    """Vectors that hold an i64 count of lanes."""
    return builder.lshr(builder.add(count, v.I64(v.LANES - 1)), v.I64(4))


def tail_mask(builder: Any, count: Any, strip: Any) -> Any:
    """Which lanes of a strip are below an i64 count of lanes in all."""
    return v.lanes_below(builder, builder.sub(count, builder.shl(strip, v.I64(4))))


def _widen_row(builder: Any, mark: Any, target: Any, source: Any, count: Any) -> None:
    """fp32 copy of `count` stored numbers, zero-padded to whole vectors."""
    element = v.ELEMENT[mark]
    with for_range(builder, strips(builder, count)) as loop:
        lane = builder.shl(loop.index, v.I64(4))
        at = builder.add(source, builder.mul(lane, v.I64(v.element_bytes(element))))
        value = v.masked_load(builder, at, element, tail_mask(builder, count, loop.index))
        v.store(builder, v.widen(builder, value), builder.add(target, builder.shl(lane, v.I64(2))))


def _narrow_row(builder: Any, mark: Any, target: Any, source: Any, count: Any, factor: Any) -> None:
    """Store `count` fp32 numbers times `factor` in the storage type, exactly that many."""
    element = v.ELEMENT[mark]
    with for_range(builder, strips(builder, count)) as loop:
        lane = builder.shl(loop.index, v.I64(4))
        value = v.load(builder, builder.add(source, builder.shl(lane, v.I64(2))), v.VF)
        value = v.narrow(builder, builder.fmul(value, v.splat(builder, factor)), element)
        at = builder.add(target, builder.mul(lane, v.I64(v.element_bytes(element))))
        v.masked_store(builder, value, at, tail_mask(builder, count, loop.index))


def _quantise_row(builder: Any, mark: Any, target: Any, source: Any, count: Any) -> Any:
    """Store `count` numbers as bytes, exactly that many, and return their scale; see `memory.quantise`."""
    element, largest = v.ELEMENT[mark], LARGEST[torch.int8]
    top = alloca_once_value(builder, v.full(0.0))
    nothing = alloca_once_value(builder, v.full(0.0))

    def strip(index: Any) -> tuple[Any, Any, Any]:
        lane = builder.shl(index, v.I64(4))
        mask = tail_mask(builder, count, index)
        at = builder.add(source, builder.mul(lane, v.I64(v.element_bytes(element))))
        return lane, mask, v.widen(builder, v.masked_load(builder, at, element, mask))

    builder.store(v.full(0.0), top)
    builder.store(v.full(0.0), nothing)
    with for_range(builder, strips(builder, count)) as loop:
        _, _, value = strip(loop.index)
        magnitude = v.call(builder, "llvm.fabs.v16f32", v.VF, value)
        builder.store(v.larger(builder, magnitude, builder.load(top)), top)
        # A number times 0 is nothing, NaN and infinity times 0 are NaN.
        builder.store(v.fma(builder, value, v.full(0.0), builder.load(nothing)), nothing)
    span = builder.fmul(v.across(builder, builder.load(top), v.larger), v.F32(1.0 / largest))
    scale = builder.fadd(span, v.across(builder, builder.load(nothing), v.fadd))
    divisor = v.splat(builder, scale)
    is_scaled = builder.fcmp_ordered(">", divisor, v.full(0.0))  # neither 0 nor NaN
    with for_range(builder, strips(builder, count)) as loop:
        lane, mask, value = strip(loop.index)
        value = builder.select(is_scaled, builder.fdiv(value, divisor), v.full(0.0))
        for bound, beyond in ((largest, ">"), (-largest, "<")):  # the scale of tiny numbers is a coarse one
            value = builder.select(builder.fcmp_ordered(beyond, value, v.full(bound)), v.full(bound), value)
        v.masked_store(builder, v.nearest_i8(builder, value), builder.add(target, lane), mask)
    return scale


def _scale_row(builder: Any, target: Any, factors: Any, count: Any) -> None:
    """target *= factors, `count` fp32 numbers, exactly that many."""
    with for_range(builder, strips(builder, count)) as loop:
        offset, mask = builder.shl(loop.index, v.I64(6)), tail_mask(builder, count, loop.index)
        at = builder.add(target, offset)
        factor = v.masked_load(builder, builder.add(factors, offset), v.F32, mask)
        v.masked_store(builder, builder.fmul(v.masked_load(builder, at, v.F32, mask), factor), at, mask)


def _add_row(builder: Any, target: Any, source: Any, count: Any, factor: Any) -> None:
    """target += factor * source, fp32, whole vectors."""
    with for_range(builder, strips(builder, count)) as loop:
        offset = builder.shl(loop.index, v.I64(6))
        at = builder.add(target, offset)
        part = v.load(builder, builder.add(source, offset), v.VF)
        total = v.fma(builder, part, v.splat(builder, factor), v.load(builder, at, v.VF))
        v.store(builder, total, at)


def _bias_row(builder: Any, target: Any, bias: Any, count: Any, scale: Any, log2e: Any) -> None:
    """target = scale * target + log2e * bias, `count` fp32 numbers (target is whole vectors)."""
    with for_range(builder, strips(builder, count)) as loop:
        offset = builder.shl(loop.index, v.I64(6))
        at = builder.add(target, offset)
        added = v.masked_load(builder, builder.add(bias, offset), v.F32, tail_mask(builder, count, loop.index))
        scaled = builder.fmul(v.load(builder, at, v.VF), v.splat(builder, scale))
        v.store(builder, v.fma(builder, added, v.splat(builder, log2e), scaled), at)


def _zip_rows(builder: Any, target: Any, first: Any, second: Any, count: Any) -> None:
    """Interleave two rows of `count` 16-bit numbers into pairs, zero-padded to whole vectors."""
    with for_range(builder, strips(builder, count)) as loop:
        lane = builder.shl(loop.index, v.I64(4))
        mask = tail_mask(builder, count, loop.index)
        halves = [
            builder.zext(v.masked_load(builder, builder.add(row, builder.shl(lane, v.I64(1))), v.I16, mask), v.VI)
            for row in (first, second)
        ]
        pairs = builder.or_(halves[0], builder.shl(halves[1], ir.Constant(v.VI, [16] * v.LANES)))
        v.store(builder, pairs, builder.add(target, builder.shl(lane, v.I64(2))))


widen_row = primitive(types.void, "iii", _widen_row)
narrow_row = primitive(types.void, "iiif", _narrow_row)
quantise_row = primitive(types.float32, "iii", _quantise_row)
scale_row = primitive(types.void, "iii", _scale_row, marked=False)
add_row = primitive(types.void, "iiif", _add_row, marked=False)
bias_row = primitive(types.void, "iiiff", _bias_row, marked=False)
zip_rows = primitive(types.void, "iiii", _zip_rows, marked=False)

"""Words for writing LLVM IR on vectors of 16 fp32 lanes, of which `vector` makes its primitives.

LLVM splits the vectors where the machine's are narrower. Each function appends instructions to a builder and returns
the value; none of them runs anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import types
from numba.core.cgutils import get_or_insert_function
from numpy.polynomial import Chebyshev, Polynomial

LANES = 16


class BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


I1, I8, I16, I32, I64, F32 = *(ir.IntType(bits) for bits in (1, 8, 16, 32, 64)), ir.FloatType()
VF = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)
PAIRS = bool(get_host_cpu_features().get("avx512bf16", False))
BF16 = BFloat() if PAIRS else I16
"""Where the machine knows no bf16 its bits are integers: LLVM would call functions that are not there."""
ELEMENT: dict[Any, Any] = {
    types.uint16: BF16, types.int16: ir.HalfType(), types.float32: F32, types.int8: I8, types.uint8: I8,
}  # fmt: skip


def paired(mark: Any) -> bool:
    """Whether products of this storage type are of bf16 pairs."""
    return PAIRS and mark == types.uint16


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call a function by name, an LLVM intrinsic mostly."""
    function = get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def at(builder: Any, address: Any, kind: Any) -> Any:
    """An int64 address as a pointer."""
    return builder.inttoptr(address, ir.PointerType(kind))


def load(builder: Any, address: Any, kind: Any) -> Any:
    """Load from an address that need not be aligned to more than an element."""
    return builder.load(at(builder, address, kind), align=2 if kind != I64 else 8, typ=kind)


def store(builder: Any, value: Any, address: Any) -> None:
    """Store to an address that need not be aligned to more than an element."""
    builder.store(value, at(builder, address, value.type), align=2)


def splat(builder: Any, scalar: Any, width: int = LANES) -> Any:
    """A vector with one scalar in all lanes."""
    kind = ir.VectorType(scalar.type, width)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(
        one, ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, width), [0] * width)
    )


def full(value: float) -> Any:
    """A constant fp32 vector."""
    return ir.Constant(VF, [value] * LANES)


def lanes_below(builder: Any, count: Any, width: int = LANES) -> Any:
    """`<width x i1>`: which lanes are below an i64 count."""
    lanes = ir.Constant(ir.VectorType(I32, width), list(range(width)))
    return builder.icmp_signed("<", lanes, splat(builder, builder.trunc(count, I32), width))


def masked_load(builder: Any, address: Any, element: Any, mask: Any, lanes: int = LANES) -> Any:
    """Load lanes under a mask; the others are zero and their memory is not touched."""
    kind = ir.VectorType(element, lanes)
    zero = ir.Constant(kind, None)
    args = (at(builder, address, kind), I32(element_bytes(element)), mask, zero)
    return call(builder, f"llvm.masked.load.v{lanes}{_suffix(element)}.p0", kind, *args)


def masked_store(builder: Any, vector: Any, address: Any, mask: Any) -> None:
    """Store lanes under a mask; the memory of the others is not touched."""
    element = vector.type.element
    args = (vector, at(builder, address, vector.type), I32(element_bytes(element)), mask)
    call(builder, f"llvm.masked.store.v{LANES}{_suffix(element)}.p0", ir.VoidType(), *args)


def _suffix(element: Any) -> str:
    """How the names of LLVM's intrinsics spell a type."""
    return {"bfloat": "bf16", "half": "f16", "float": "f32"}.get(str(element), str(element))


def element_bytes(element: Any) -> int:
    """Bytes of an LLVM storage element."""
    return {F32: 4, I8: 1}.get(element, 2)


def widen(builder: Any, value: Any) -> Any:
    """Stored numbers to fp32, a vector or one; of quantised ones, before they are scaled."""
    is_vector = isinstance(value.type, ir.VectorType)
    element, floats, words = (value.type.element, VF, VI) if is_vector else (value.type, F32, I32)
    if element == I8:
        return builder.sitofp(value, floats)
    if element == I16:
        half = ir.Constant(VI, [16] * LANES) if is_vector else I32(16)
        return builder.bitcast(builder.shl(builder.zext(value, words), half), floats)
    return value if element == F32 else builder.fpext(value, floats)


def narrow(builder: Any, vector: Any, element: Any) -> Any:
    """fp32 to stored numbers, rounded to nearest even."""
    if element == F32:
        return vector
    if element == I16:
        return _narrow_to_bits(builder, vector)
    return builder.fptrunc(vector, ir.VectorType(element, LANES))


def _narrow_to_bits(builder: Any, vector: Any) -> Any:
    """fp32 to the bits of bf16, rounded to nearest even; NaN stays NaN."""

    def constant(value: int) -> Any:
        return ir.Constant(VI, [value] * LANES)

    bits = builder.bitcast(vector, VI)
    upper = builder.lshr(bits, constant(16))
    to_even = builder.add(constant(0x7FFF), builder.and_(upper, constant(1)))
    rounded = builder.lshr(builder.add(bits, to_even), constant(16))
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    found = builder.select(is_nan, builder.or_(upper, constant(0x40)), rounded)
    return builder.trunc(found, ir.VectorType(I16, LANES))


def nearest_i8(builder: Any, vector: Any) -> Any:
    """fp32 within -127..127 to bytes, halves to even: adding 1.5 * 2 ** 23 leaves the integer in the low bits."""
    rounded = builder.fadd(vector, full(12582912.0))
    return builder.trunc(builder.bitcast(rounded, VI), ir.VectorType(I8, LANES))


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c`, rounded once."""
    return call(builder, "llvm.fma.v16f32", VF, a, b, c)


def pair_fma(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """`total + a0 * b0 + a1 * b1`, lanes of bf16 pairs given as 16 integers."""
    kind = ir.VectorType(BFloat(), 2 * LANES)
    args = (total, builder.bitcast(a, kind), builder.bitcast(b, kind))
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VF, *args)


def exp2(builder: Any, x: Any, degree: int = 6) -> Any:
    """2 ** x for x <= 0 (a rounding error above is fine): 1 for 0 exactly, 0 below -127, NaN for NaN.

    Adding 1.5 * 2 ** 23 rounds x to an integer and leaves that in the low bits; 127 more makes it an exponent's bits.
    A polynomial takes the rest: to 1e-8 at degree 6, to 4e-6 at degree 4.
    """
    magic = full(12582912.0 + 127.0)
    bounded = builder.select(builder.fcmp_ordered("<", x, full(-127.0)), full(-127.0), x)
    shifted = builder.fadd(bounded, magic)
    rest = builder.fsub(bounded, builder.fsub(shifted, magic))
    coefficients = _power_coefficients(degree)
    total = full(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = fma(builder, total, rest, full(coefficient))
    exponent = builder.shl(builder.bitcast(shifted, VI), ir.Constant(VI, [23] * LANES))
    return builder.fmul(total, builder.bitcast(exponent, VF))


def _power_coefficients(degree: int) -> list[float]:
    """Of a polynomial near 2 ** f for f in [-1/2, 1/2], lowest first; exact at 0."""
    series = Chebyshev.interpolate(np.exp2, degree, domain=[-0.5, 0.5])
    return [1.0, *series.convert(kind=Polynomial).coef[1:].tolist()]


def fold(builder: Any, vectors: list[Any], combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Reduce 16 vectors to one whose lane i is the reduction of vector i: four rounds of pairwise combining."""
    width = LANES
    while len(vectors) > 1:
        half = width // 2
        low, high = [], []
        for lane in range(LANES):
            block, within = divmod(lane, width)
            # After this round, the first half of each group holds vector a's part sums, the second half b's.
            source = 0 if within < half else LANES
            low.append(source + block * width + within % half)
            high.append(source + block * width + half + within % half)
        count = len(vectors) // 2
        pairs = [(vectors[i], vectors[i + count]) for i in range(count)]
        vectors = [
            combine(
                builder,
                builder.shuffle_vector(a, b, ir.Constant(VI, low)),
                builder.shuffle_vector(a, b, ir.Constant(VI, high)),
            )
            for a, b in pairs
        ]
        width = half
    return vectors[0]


def fadd(builder: Any, a: Any, b: Any) -> Any:
    """Sum, as a way to combine."""
    return builder.fadd(a, b)


def larger(builder: Any, a: Any, b: Any) -> Any:
    """Maximum, as a way to combine; `b` where a is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def smaller(builder: Any, a: Any, b: Any) -> Any:
    """Minimum, as a way to combine; `b` where a is NaN."""
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def across(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Reduce the lanes of one vector to a scalar."""
    half = LANES // 2
    while half:
        order = [(lane + half) % LANES for lane in range(LANES)]
        vector = combine(builder, vector, builder.shuffle_vector(vector, vector, ir.Constant(VI, order)))
        half //= 2
    return builder.extract_element(vector, I32(0))

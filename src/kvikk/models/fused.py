"""What a layer does between its projections, compiled for a CPU: norms, RoPE and the gate, one call each.

At a few rows torch spends more time on starting small operations than on their numbers. Here each is one C function
over raw addresses, on the calling thread. RoPE and the bf16 gate give torch's bits, so torch can take over where rows
are many and threads pay. A norm differs from torch's in the order of one fp32 sum, which shows in the last bit of few
numbers: it serves any number of rows, for a row's bits must not depend on that. In torch they may: where a tensor does
not divide into whole vectors for each thread, its remainder goes through another exponential.
Importing this module imports numba, which takes a second: only where it is used.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor

_LOG = logging.getLogger(__name__)

DTYPES = {torch.bfloat16: types.uint16, torch.float32: types.float32}
"""What can be computed, and as what the kernels see its numbers."""

_OPTIONS = {"error_model": "numpy", "inline": "never"}

Codegen = Callable[[Any, Any, Any, Any], Any]


@intrinsic  # type: ignore[untyped-decorator]
def _wide(typingctx: Any, x: Any) -> tuple[Any, Codegen]:
    """A stored number as float32."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (value,) = values
        if value.type == ir.FloatType():
            return value
        bits = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(value, bits), bits(16)), ir.FloatType())

    return types.float32(x), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _stored(typingctx: Any, like: Any, x: Any) -> tuple[Any, Codegen]:
    """A float32 as a stored number of `like`'s type: to bf16 it is rounded to nearest, ties to even."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        mark, value = values
        if mark.type == ir.FloatType():
            return value
        bits, half = ir.IntType(32), ir.IntType(16)
        raw = builder.bitcast(value, bits)
        odd = builder.and_(builder.lshr(raw, bits(16)), bits(1))
        rounded = builder.lshr(builder.add(builder.add(raw, odd), bits(0x7FFF)), bits(16))
        is_nan = builder.fcmp_unordered("uno", value, value)
        return builder.select(is_nan, half(0x7FC0), builder.trunc(rounded, half))

    return like(like, types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _fma(typingctx: Any, a: Any, b: Any, c: Any) -> tuple[Any, Codegen]:
    """`a * b + c`, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _floor(typingctx: Any, x: Any) -> tuple[Any, Codegen]:
    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.floor", [ir.FloatType()]), values)

    return types.float32(types.float32), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _power_of_two(typingctx: Any, n: Any) -> tuple[Any, Codegen]:
    """2 to a whole number of -126 to 127, by writing its exponent."""

    def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        bits = ir.IntType(32)
        exponent = builder.add(builder.fptosi(values[0], bits), bits(127))
        return builder.bitcast(builder.shl(exponent, bits(23)), ir.FloatType())

    return types.float32(types.float32), codegen


@njit(fastmath={"reassoc", "nsz", "contract"}, **_OPTIONS)  # type: ignore[untyped-decorator]
def _sum_squares(x: Any) -> Any:
    total = np.float32(0)
    for i in range(x.shape[0]):
        value = _wide(x[i])
        total += value * value
    return total


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _add_row(x: Any, delta: Any) -> None:
    for i in range(x.shape[0]):
        x[i] = _stored(x[i], _wide(x[i]) + _wide(delta[i]))


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _scale_row(x: Any, scale: Any, weight: Any, out: Any) -> None:
    """Multiply, round, multiply by the weight, round."""
    for i in range(x.shape[0]):
        out[i] = _stored(x[i], _wide(_stored(x[i], _wide(x[i]) * scale)) * _wide(weight[i]))


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _scale_row_wide(x: Any, scale: Any, weight: Any, out: Any) -> None:
    """Multiply twice, round once."""
    for i in range(x.shape[0]):
        out[i] = _stored(x[i], _wide(x[i]) * scale * _wide(weight[i]))


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _rotate_row(first: Any, second: Any, cos_sin: Any) -> None:
    """Rotate one head: the halves of its rotary part, by cos and signed sin `[2, 2, half]`, in the table's dtype."""
    for i in range(first.shape[0]):
        a, b = _wide(first[i]), _wide(second[i])
        turned_a = _wide(_stored(cos_sin[0, 0, i], a * _wide(cos_sin[0, 0, i])))
        turned_b = _wide(_stored(cos_sin[0, 1, i], b * _wide(cos_sin[0, 1, i])))
        first[i] = _stored(first[i], _fma(b, _wide(cos_sin[1, 0, i]), turned_a))
        second[i] = _stored(second[i], _fma(a, _wide(cos_sin[1, 1, i]), turned_b))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _exp(x: Any) -> Any:
    """torch's `exp_u20` (ATen/cpu/vec/vec512/vec512_float.h), operation by operation."""
    kept = min(max(x, np.float32(-87.33654)), np.float32(88.72284))
    n = _floor(_fma(kept, np.float32(1.442695), np.float32(0.5)))
    r = _fma(-n, np.float32(0.6931472), kept)
    y = _fma(r, np.float32(0.00828929059), np.float32(0.0418978221))
    y = _fma(r, y, np.float32(0.166676521))
    y = _fma(r, y, np.float32(0.499991506))
    y = _fma(r, y, np.float32(0.999999701))
    y = _fma(r, y, np.float32(1))
    y = y * _power_of_two(n - np.float32(1)) * np.float32(2)
    return np.float32(0) if x < np.float32(-87.33654) else y


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _exp_fine(x: Any) -> Any:
    """The exponential to about 2**-23: reduction in two steps to at most ln(2) / 2, and its series to the 7th power."""
    kept = min(max(x, np.float32(-87.33654)), np.float32(88.72284))
    n = _floor(_fma(kept, np.float32(1.442695), np.float32(0.5)))
    r = _fma(-n, np.float32(1.42860682e-6), _fma(-n, np.float32(0.693145752), kept))
    y = _fma(r, np.float32(1 / 5040), np.float32(1 / 720))
    y = _fma(r, y, np.float32(1 / 120))
    y = _fma(r, y, np.float32(1 / 24))
    y = _fma(r, y, np.float32(1 / 6))
    y = _fma(r, y, np.float32(1 / 2))
    y = _fma(r, y, np.float32(1))
    y = _fma(r, y, np.float32(1))
    y = y * _power_of_two(n - np.float32(1)) * np.float32(2)
    return np.float32(0) if x < np.float32(-87.33654) else y


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _gate_row(gate: Any, up: Any, out: Any) -> None:
    for i in range(gate.shape[0]):
        x = _wide(gate[i])
        silu = x / (np.float32(1) + _exp(-x))
        out[i] = _stored(gate[i], _wide(_stored(gate[i], silu)) * _wide(up[i]))


@njit(**_OPTIONS)  # type: ignore[untyped-decorator]
def _gate_row_fine(gate: Any, up: Any, out: Any) -> None:
    for i in range(gate.shape[0]):
        out[i] = gate[i] / (np.float32(1) + _exp_fine(-gate[i])) * up[i]


# What ctypes calls: addresses, and sizes in numbers.


def _norm(
    x: Any, delta: Any, weight: Any, out: Any, rows: int, stride: int, groups: int, width: int, eps: float, mode: int
) -> None:
    """Norm of `groups` neighbouring widths of each row. Mode: 1 adds `delta` to x before, 2 rounds only once."""
    size = rows * stride
    xs, ds, outs, w = carray(x, size), carray(delta, size), carray(out, size), carray(weight, width)
    for row in range(rows):
        for group in range(groups):
            start = row * stride + group * width
            values = xs[start : start + width]
            if mode & 1:
                _add_row(values, ds[start : start + width])
            mean = _sum_squares(values) / np.float32(width)
            scale = np.float32(1) / math.sqrt(mean + eps)
            if mode & 2:
                _scale_row_wide(values, scale, w, outs[start : start + width])
            else:
                _scale_row(values, scale, w, outs[start : start + width])


def _rotate(x: Any, cos_sin: Any, rows: int, stride: int, heads: int, head_dim: int, half: int) -> None:
    xs, tables = carray(x, rows * stride), carray(cos_sin, (rows, 2, 2, half))
    for row in range(rows):
        for head in range(heads):
            start = row * stride + head * head_dim
            _rotate_row(xs[start : start + half], xs[start + half : start + 2 * half], tables[row])


def _gate(gate_up: Any, out: Any, rows: int, ffn: int) -> None:
    pairs, outs = carray(gate_up, (rows, 2, ffn)), carray(out, (rows, ffn))
    for row in range(rows):
        _gate_row(pairs[row, 0], pairs[row, 1], outs[row])


def _gate_fine(gate_up: Any, out: Any, rows: int, ffn: int) -> None:
    pairs, outs = carray(gate_up, (rows, 2, ffn)), carray(out, (rows, ffn))
    for row in range(rows):
        _gate_row_fine(pairs[row, 0], pairs[row, 1], outs[row])


def _compile(function: Any, signature: Any) -> Any:
    """A C function, from numba's cache on disk after the first time on a machine."""
    try:
        return cfunc(signature, cache=True)(function)
    except RuntimeError as error:  # no folder that can be written
        _LOG.warning("compiled norms are not kept on disk (%s): set NUMBA_CACHE_DIR to a writable folder", error)
        return cfunc(signature)(function)


def _callable(compiled: Any, arguments: str) -> Any:
    """It as something to call, which keeps the interpreter lock: the calls are short. i(nt64) or f(loat32) each."""
    kinds = [ctypes.c_int64 if kind == "i" else ctypes.c_float for kind in arguments]
    return ctypes.PYFUNCTYPE(None, *kinds)(compiled.address)


class FusedOperations:
    """The operations, for contiguous CPU tensors of one dtype. Shapes and dtypes are not checked.

    A row's bits depend on that row alone.

    Args:
        dtype: one of `DTYPES`.
        table_dtype: of the rotary table, one of `DTYPES`.
        eps: of every norm.
        wide: whether a norm rounds only after the multiplication by its weight.
    """

    kind: ClassVar[Literal["cpu"]] = "cpu"

    def __init__(self, dtype: torch.dtype, *, table_dtype: torch.dtype, eps: float, wide: bool) -> None:
        self.eps = eps
        self._mode = 2 if wide else 0
        numbers, size, real = types.CPointer(DTYPES[dtype]), types.int64, types.float32
        norm = types.void(numbers, numbers, numbers, numbers, size, size, size, size, real, size)
        rotate = types.void(numbers, types.CPointer(DTYPES[table_dtype]), size, size, size, size, size)
        gate = types.void(numbers, numbers, size, size)
        gates = _gate if dtype == torch.bfloat16 else _gate_fine
        self._compiled = _compile(_norm, norm), _compile(_rotate, rotate), _compile(gates, gate)  # they own the code
        self._norm = _callable(self._compiled[0], "iiiiiiiifi")
        self._rotate = _callable(self._compiled[1], "iiiiiii")
        self._gate = _callable(self._compiled[2], "iiii")

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of `[rows, width]`."""
        out = torch.empty_like(x)
        at, (rows, width) = x.data_ptr(), x.shape
        self._norm(at, at, weight.data_ptr(), out.data_ptr(), rows, width, 1, width, self.eps, self._mode)
        return out

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """Add `delta` to x in place, and return the RMS norm of the sum; all `[rows, width]`."""
        out = torch.empty_like(x)
        rows, width = x.shape
        self._norm(
            x.data_ptr(), delta.data_ptr(), weight.data_ptr(), out.data_ptr(),
            rows, width, 1, width, self.eps, self._mode | 1,
        )  # fmt: skip
        return out

    def norm_heads_(self, heads: Tensor, first: int, count: int, weight: Tensor) -> None:
        """RMS norm in place of `count` heads of `[rows, heads, head_dim]` from `first` on, over the weight's width."""
        rows, total, head_dim = heads.shape
        at, width = heads.data_ptr() + first * head_dim * heads.element_size(), weight.shape[0]
        groups = count * head_dim // width
        self._norm(at, at, weight.data_ptr(), at, rows, total * head_dim, groups, width, self.eps, self._mode)

    def rotate_(self, heads: Tensor, count: int, cos_sin: Tensor) -> None:
        """Apply RoPE in place to the first `count` heads of `[rows, heads, head_dim]`; `cos_sin` as in `rope_table`."""
        rows, total, head_dim = heads.shape
        half = cos_sin.shape[2] // 2
        self._rotate(heads.data_ptr(), cos_sin.data_ptr(), rows, total * head_dim, count, head_dim, half)

    def gate(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `[rows, 2 * ffn]`, each rounded. In fp32 it differs from torch's in the last bits."""
        rows, ffn = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, ffn)
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, ffn)
        return out

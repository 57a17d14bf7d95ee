"""Triton's interpreter, so that kernels run on CPU tensors where there is no GPU, with four faults of it mended.

It also takes half the time here: what it does anew at every call of a function is done once.

Its matrix product takes the bits of bf16 numbers for whole numbers, and its cast from whole numbers to bf16 leaves
their bits: here both go by fp32. What a row of a product is depends, on some CPUs, on its place in the tile: here
products are summed up in fp64, where that shows no more. Its rounding from fp32 to fp8 loses the carry: here torch does
it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def use_interpreter() -> None:
    """To be called before anything imports triton; without triton, or with a GPU, it does nothing."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    _mend()
    _hasten()


def _mend() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product = InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar == tl.bfloat16:
            return (operand.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return operand.data.astype(np.float64)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        kinds = {a.dtype.scalar, b.dtype.scalar}
        if not kinds <= {tl.bfloat16, tl.float16, tl.float32}:
            return product(self, a, b, d, *options)
        with np.errstate(over="ignore"):
            found = np.matmul(widened(a), widened(b)).astype(d.data.dtype)
        return TensorHandle(found + d.data, d.dtype.scalar)

    cast = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and source.dtype.scalar.is_int():
            source = cast(self, source, tl.float32)
        return cast(self, source, target)

    narrow = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.float8e4nv:
            return narrow(self, source, target, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.float8_e4m3fn)
        return TensorHandle(rounded.view(torch.uint8).numpy(), tl.float8e4nv)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.cast_impl = cast_impl


def _hasten() -> None:
    """What it puts in place of Triton's language stays there: nothing in this process is compiled."""
    from triton.runtime import interpreter

    put_in_place, numpy_type_of = interpreter._patch_lang, interpreter._get_np_dtype
    numpy_types: dict[str, Any] = {}

    @functools.cache
    def put_in_place_once(function: Any) -> Any:
        put_in_place(function)
        return SimpleNamespace(restore=lambda: None)

    def known_numpy_type_of(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = numpy_type_of(scalar)
        return numpy_types[scalar.name]

    interpreter._patch_lang = put_in_place_once
    interpreter._get_np_dtype = known_numpy_type_of

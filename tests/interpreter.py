"""Triton's interpreter, so that kernels run on CPU tensors where there is no GPU, with a fault of it mended.

Its matrix product takes the bits of bf16 numbers for whole numbers; here they are widened first.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import torch


def use_interpreter() -> None:
    """To be called before anything imports triton; without triton, or with a GPU, it does nothing."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product = InterpreterBuilder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return product(self, widened(a), widened(b), d, *options)

    InterpreterBuilder.create_dot = create_dot

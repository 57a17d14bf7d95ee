"""Where tensors begin in memory, which decides how wide a kernel loads, and through that the order of its sums."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

ALIGNMENT_BYTES: Final = 16
"""What Triton tells apart: it compiles a kernel anew for pointers that are not divisible by this."""


def is_aligned(x: Tensor) -> bool:
    """Whether x begins where any allocation of torch does, modulo `ALIGNMENT_BYTES`."""
    return x.data_ptr() % ALIGNMENT_BYTES == 0


def aligned(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy where it is not aligned or its last dimension is strided.

    A slice of a larger tensor may begin anywhere; its numbers must be summed in the same order all the same.
    """
    return x if is_aligned(x) and x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)

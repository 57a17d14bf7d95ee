"""From K and V to small numbers and back: symmetric, one scale for each row of a head.

A row is one token's K, or its V, in one KV head, so what is stored of a token depends on that token alone: neither on
the chunk that it came in nor on its neighbours. Every kernel that stores K and V makes these very bytes.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

LARGEST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What the largest number of a row becomes, by storage type."""


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers nearest to `x / scale`, halves to even, where the row's largest magnitude is `LARGEST * scale`.

    A row of zeros has the scale 0 and zeros for numbers. So has one that holds NaN or infinity, with the scale NaN: it
    is NaN again when it is read, and never looks like a row that was fine.

    Args:
        x: `[..., head_dim]`.
        dtype: one of `LARGEST`.

    Returns:
        `[..., head_dim]` of `dtype`, and the scales, `[...]` fp32.
    """
    wide, largest = x.float(), LARGEST[dtype]
    top = wide.abs().amax(dim=-1)
    # A product and not a quotient: some devices divide by a constant in their own way.
    scales = torch.where(top.isfinite(), top * (1.0 / largest), torch.nan)
    divisors = scales.unsqueeze(-1)
    numbers = torch.where(divisors > 0, wide / divisors, 0.0).clamp(-largest, largest)
    return (numbers if dtype.is_floating_point else numbers.round()).to(dtype), scales


def dequantise(numbers: Tensor, scales: Tensor) -> Tensor:
    """What was stored, in fp32.

    Args:
        numbers: `[..., head_dim]`.
        scales: `[...]` fp32.
    """
    return numbers.float() * scales.unsqueeze(-1)

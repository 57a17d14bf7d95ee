"""From K and V to small numbers and back: `pack` and `unpack`, whatever the format.

A row is one token's K, or its V, in one KV head, so what is stored of a token depends on that token alone: neither on
the chunk that it came in nor on its neighbours. Every kernel that stores K and V makes these very bytes. Those of int8
and fp8 are here, symmetric, with one scale for each row; `int4` has its own.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kvikk.geometry import INT4
from kvikk.memory import int4

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


def pack(x: Tensor, part: int, quantised: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows as they are stored.

    Args:
        x: `[..., head_dim]`.
        part: of a frame: 0 where they are K, 1 where V.
        quantised: the format, as in `KVGeometry`.

    Returns:
        `[..., row_elements]` of the stored dtype, and the scales, `[...]` fp32, or `[..., 2]` in int4.
    """
    if quantised is not INT4:
        return quantise(x, quantised)
    return int4.encode(x if part else int4.turn(x))


def unpack(numbers: Tensor, scales: Tensor, part: int, quantised: torch.dtype) -> Tensor:
    """What `pack` stored, `[..., head_dim]` fp32."""
    if quantised is not INT4:
        return dequantise(numbers, scales)
    rows = int4.decode(numbers, scales)
    return rows if part else int4.turned_back(rows)

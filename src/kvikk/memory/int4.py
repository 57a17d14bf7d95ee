"""K and V in four bits a number: keys turned first, two scales a row, two numbers in a byte.

A row is one token's K, or its V, in one KV head, and what is stored of it depends on it alone, as in `quantise`. Three
things make four bits enough:

- **Keys are turned** by a Hadamard matrix, which spreads the few large channels that keys have over all of them
  (QuaRot, arXiv 2404.00456). Queries that are turned likewise give the same products, so no key need be turned back.
  Values have no such channels, and stay.
- **Two groups a row**, its halves, each with a scale of its own and a zero: a number stands for `(8 * number - zero) *
  scale`, and the 16 of them reach from the group's smallest to its largest. Zeros in eighths of a step cost nothing:
  what is in the brackets is a whole number below 128 in magnitude, which is exact in every dtype.
- **One word for both**: the zero lies in the last seven bits of the scale's fp32, which is the scale with them in.

Byte i of a row holds number i in its low half and number `head_dim / 2 + i` in its high half, so that the two groups
are told apart by the half of a byte.
Every kernel that stores K and V makes these very bytes: sums of a turn are taken in the order of `turn`, all in fp32.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

GROUPS: Final = 2
"""Of a row, each with a scale."""
LEVELS: Final = 15
"""Steps from a group's smallest number to its largest."""
PARTS: Final = 8
"""Of a step: zeros are told, and scales given, in these."""
ZERO_BITS: Final = 127
"""Where the zero lies in a scale."""
LEAST: Final = 2.0**-100
"""A step below this is taken for 0: of a scale near the smallest that there are, the last bits are too much."""


def turn_width(head_dim: int) -> int:
    """Neighbours that are turned together: the largest power of two that divides a head."""
    return head_dim & -head_dim


def turn(x: Tensor) -> Tensor:
    """Rows times a Hadamard matrix (of ones, positive and negative), block by block of `turn_width`, in fp32.

    Turned twice, a row is itself times `turn_width`, exactly a power of two. Neighbours are added first, then numbers
    two apart, and so on: any other order would round otherwise.

    Args:
        x: `[..., head_dim]`.
    """
    head_dim = x.shape[-1]
    turned, apart = x.float(), 1
    while apart < turn_width(head_dim):
        low, high = turned.reshape(*x.shape[:-1], head_dim // (2 * apart), 2, apart).unbind(-2)
        turned = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        apart *= 2
    return turned


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers nearest to `(x / scale + zero) / 8`, halves to even, two in a byte.

    A group of zeros, or of numbers near the smallest that there are, has the scale 0 and zeros for numbers. A row that
    holds NaN or infinity has NaN for both scales: it is NaN again when it is read.

    Args:
        x: `[..., head_dim]`; keys are turned already.

    Returns:
        `[..., head_dim / 2]` uint8, and the scales, `[..., 2]` fp32.
    """
    groups = x.float().reshape(*x.shape[:-1], GROUPS, x.shape[-1] // GROUPS)
    low, high = groups.amin(dim=-1).clamp(max=0.0), groups.amax(dim=-1).clamp(min=0.0)
    # Products and no quotients of constants: some devices divide by a constant in their own way.
    steps = (high - low) * (1.0 / LEVELS)
    is_finite = steps.isfinite()
    is_used = (steps >= LEAST) & is_finite
    zeros = torch.where(is_used, (-low / torch.where(is_used, steps, 1.0) * PARTS).round(), 0.0)
    scales = ((steps * (1.0 / PARTS)).view(torch.int32) & ~ZERO_BITS | zeros.int()).view(torch.float32)
    scales = torch.where(is_used, scales, 0.0)
    divisors = torch.where(is_used, scales * PARTS, 1.0).unsqueeze(-1)
    numbers = (groups / divisors + (zeros * (1.0 / PARTS)).unsqueeze(-1)).round().clamp(0.0, LEVELS)
    is_finite = is_finite.all(dim=-1, keepdim=True)
    numbers = torch.where((is_used & is_finite).unsqueeze(-1), numbers, 0.0)
    first, second = numbers.to(torch.uint8).unbind(-2)
    return first | (second << 4), torch.where(is_finite, scales, torch.nan)


def decode(numbers: Tensor, scales: Tensor) -> Tensor:
    """What was stored, in fp32; keys as they were turned.

    Args:
        numbers: `[..., head_dim / 2]` uint8.
        scales: `[..., 2]` fp32.
    """
    zeros = scales.contiguous().view(torch.int32) & ZERO_BITS
    groups = torch.stack((numbers & 15, numbers >> 4), dim=-2).int() * PARTS - zeros.unsqueeze(-1)
    return (groups.float() * scales.unsqueeze(-1)).flatten(-2)


def turned_back(x: Tensor) -> Tensor:
    """What `turn` made of a row, as it was."""
    return turn(x) * (1.0 / turn_width(x.shape[-1]))

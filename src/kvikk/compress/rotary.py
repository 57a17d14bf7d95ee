"""Rotary position embedding, undone and averaged: what policies that guess at future queries need of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotary:
    """How a layer rotates queries and keys.

    Args:
        inv_freq: `[rotary_dim / 2]` fp32, radians a position, of each pair of dimensions. Dimensions from `rotary_dim`
            on are not rotated. A factor on cosine and sine (YaRN) does not belong here: it stays in the vectors.
        interleaved: a pair is dimensions (2i, 2i + 1); else it is (i, i + rotary_dim / 2), as in Llama.
    """

    inv_freq: Tensor
    interleaved: bool = False

    def undo(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """Vectors as they were before they were rotated: `[..., w, head_dim]` at positions `[w]`, in fp32."""
        angles = -positions[:, None].to(torch.float64) * self.inv_freq
        return self._turned(vectors.float(), angles.cos().float(), angles.sin().float())

    def average(self, vectors: Tensor, *, start: int, count: int) -> Tensor:
        """The mean of `[..., head_dim]` vectors rotated to positions `start..start + count - 1`, in fp32."""
        positions = torch.arange(start, start + count, dtype=torch.float64, device=self.inv_freq.device)
        angles = positions[:, None] * self.inv_freq
        return self._turned(vectors.float(), angles.cos().mean(0).float(), angles.sin().mean(0).float())

    def _turned(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, rest = vectors.tensor_split((2 * len(self.inv_freq),), dim=-1)
        pairs = rotated.reshape(*rotated.shape[:-1], *((-1, 2) if self.interleaved else (2, -1)))
        axis = -1 if self.interleaved else -2
        first, second = pairs.unbind(axis)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=axis)
        return torch.cat((turned.flatten(-2), rest), dim=-1)

"""The slots of a layer, in whatever order they lie, and what can be said of them in the order of the text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvikk.errors import PolicyFailed


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSlots:
    """Which token of the text each slot of a layer's lanes holds.

    The order of slots says nothing. Lanes may hold different tokens, and different numbers of them.

    Args:
        positions: `[kv_heads, slots]` int64; anything where a slot is dead.
        live: `[kv_heads, slots]` bool. A lane holds a position at most once.
        length: tokens of the row so far: live positions are below it.
        in_order: each lane's live slots lie in the order of the text, so that nothing need be sorted for it.
        is_packed: and before all dead ones, so that nothing need be moved for it.
    """

    positions: Tensor
    live: Tensor
    length: int
    in_order: bool = False
    is_packed: bool = False

    @cached_property
    def order(self) -> Tensor:
        """`[kv_heads, slots]` int64: each lane's slots from its first position to its last, then the dead ones."""
        if self.is_packed:
            return torch.arange(self.live.shape[1], device=self.live.device).expand_as(self.live)
        if not self.in_order:
            return torch.where(self.live, self.positions, self.length).argsort(dim=-1, stable=True)
        living = self.live.cumsum(-1)
        slot = torch.arange(self.live.shape[1], device=self.live.device).expand_as(living)
        place = torch.where(self.live, living - 1, living[:, -1:] + slot - living)
        return torch.empty_like(place).scatter_(-1, place, slot)

    def of_lanes(self, start: int, stop: int) -> LayerSlots:
        """Those of lanes `start..stop - 1`."""
        if stop - start == len(self.positions):
            return self
        return replace(self, positions=self.positions[start:stop], live=self.live[start:stop])

    def protected(self, *, sinks: int, window: Tensor | int) -> Tensor:
        """`[kv_heads, slots]` bool: live slots of the row's first `sinks` positions and of its last `window`.

        Args:
            sinks: first positions of the row.
            window: last positions of the row; `[kv_heads, 1]` where lanes differ.
        """
        is_recent = self.positions >= self.length - window
        return self.live & ((self.positions < sinks) | is_recent)

    def pool(self, values: Tensor, width: int, kind: Literal["mean", "max"]) -> Tensor:
        """Mean or maximum over `width` (odd) live neighbours in the text; beyond a lane's ends the mean counts zeros.

        Args:
            values: `[kv_heads, slots]`.
            width: slots in a window, its centre included.
            kind: what is taken of them.

        Returns:
            `[kv_heads, slots]`; nothing of use where a slot is dead.

        Raises:
            PolicyFailed: values of another shape, an even width, or another kind.
        """
        if values.shape != self.live.shape:
            wanted, found = tuple(self.live.shape), tuple(values.shape)
            raise PolicyFailed(f"pool was given {found}, not [kv_heads, slots] = {wanted}: take a group_mean first")
        if width < 1 or width % 2 == 0:
            raise PolicyFailed(f"pool was given a width of {width}: it must be odd, so that it has a centre")
        if kind not in ("mean", "max"):
            raise PolicyFailed(f"pool was given the kind {kind!r}: it must be mean or max")
        if values.is_cuda and self.in_order and not self.is_packed:
            from kvikk.compress.gpu.neighbours import pool as on_gpu  # imports triton

            return on_gpu(values, self.live, width, is_mean=kind == "mean")
        outside = 0.0 if kind == "mean" else -torch.inf
        ordered = torch.where(self.live, values, outside)
        if not self.is_packed:
            ordered = ordered.gather(-1, self.order)
        pool = F.avg_pool1d if kind == "mean" else F.max_pool1d
        pooled = pool(ordered, width, stride=1, padding=width // 2)
        return pooled if self.is_packed else torch.empty_like(pooled).scatter(-1, self.order, pooled)

    def mean_over_lanes(self, values: Tensor, together: int) -> Tensor:
        """For each slot, the mean of `values` over the lanes that hold its position, of `together` in a row.

        Every lane is written to a row of its own before rows are added, so that the result is the same to the bit on
        every run and in every order of slots.
        """
        lanes = len(self.positions)
        column = torch.where(self.live, self.positions, self.length)
        dense = values.new_zeros((2, lanes, self.length + 1))
        dense[0].scatter_(-1, column, values)
        dense[1].scatter_(-1, column, 1.0)
        total, count = dense.view(2, -1, together, self.length + 1).sum(2)
        mean: Tensor = total / count.clamp(min=1)
        column = column.view(len(mean), -1)
        return mean.gather(-1, column).view(lanes, -1)

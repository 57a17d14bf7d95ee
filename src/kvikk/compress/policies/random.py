"""Random: what any policy must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvikk.compress.signals import Signal
from kvikk.compress.view import LayerView

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Random:
    """Keep tokens by lot, another one in each layer and KV head: the floor to compare others with.

    A lot is a hash of the request's seed, layer, KV head and position: the same alone, in any batch, and at each
    trigger.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.POSITIONS})

    def score(self, view: LayerView) -> Tensor:
        """A number from 0 to below 1."""
        heads = torch.arange(len(view.live), device=view.live.device)[:, None]
        lot = _mixed(torch.zeros_like(heads))
        for part in (view.seed & _MASK, view.seed >> 32 & _MASK, view.layer, heads, view.positions):
            lot = _mixed(lot ^ part)
        return (lot >> 8).float() / 2**24


def _mixed(word: Tensor) -> Tensor:
    """A 32-bit hash of 32-bit words held in int64: Wellons' `lowbias32` (github.com/skeeto/hash-prospector)."""
    word = (word ^ word >> 16) * 0x7FEB352D & _MASK  # wraps beyond 2**63, but the lower 32 bits are right
    word = (word ^ word >> 15) * 0x846CA68B & _MASK
    return word ^ word >> 16

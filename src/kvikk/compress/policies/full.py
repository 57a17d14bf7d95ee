"""Full: everything stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvikk.compress.signals import Signal
from kvikk.compress.view import LayerView


@dataclass(frozen=True, kw_only=True)
class Full:
    """Keep everything: the cache as it is without a policy."""

    needs: ClassVar[frozenset[Signal]] = frozenset()
    lanewise: ClassVar[bool] = True

    def score(self, view: LayerView) -> Tensor:
        """All slots matter alike."""
        return torch.zeros(view.live.shape, device=view.live.device)

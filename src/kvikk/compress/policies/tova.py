"""TOVA: what the last query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvikk.compress.signals import Signal
from kvikk.compress.view import LayerView


@dataclass(frozen=True, kw_only=True)
class TOVA:
    """Keep what the last query attends to, the same tokens in all heads of a layer (Oren et al., arXiv 2401.06104)."""

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.QUERIES})
    lanewise: ClassVar[bool] = True
    query_window: ClassVar[int] = 1

    def score(self, view: LayerView) -> Tensor:
        """The last query's attention, averaged over the heads of the layer."""
        return view.layer_mean(view.mean_attention())

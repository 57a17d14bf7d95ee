"""KNorm: keys of small norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvikk.compress.signals import Signal
from kvikk.compress.view import LayerView


@dataclass(frozen=True, kw_only=True)
class KNorm:
    """Keep the keys of smallest norm, which draw most attention (Devoto et al., arXiv 2406.11430)."""

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS})
    lanewise: ClassVar[bool] = True

    def score(self, view: LayerView) -> Tensor:
        """Less is more."""
        return -view.norms(view.keys)

"""H2O: heavy hitters, and the recent half."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvikk.compress.options import check_between
from kvikk.compress.signals import Signal
from kvikk.compress.view import LayerView


@dataclass(frozen=True, kw_only=True)
class H2O:
    """Keep what has received most attention so far, and the last tokens (Zhang et al., arXiv 2306.14048).

    Args:
        recent_share: of the budget, for the last tokens.
        per_query: divide what a token received by the number of queries that could see it. The paper does not, and so
            favours old tokens.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.ATTENTION_MASS, Signal.POSITIONS})
    lanewise: ClassVar[bool] = True

    recent_share: float = 0.5
    per_query: bool = False

    def __post_init__(self) -> None:
        check_between(self, 0, 1, "recent_share")

    def recent(self, budget: int) -> int:
        """The share of the budget that is not for heavy hitters."""
        return int(budget * self.recent_share)

    def score(self, view: LayerView) -> Tensor:
        """The attention that a slot has received."""
        if not self.per_query:
            return view.attention_mass
        seen_by = (view.length - view.positions).clamp(1, max(1, view.observed))
        return view.attention_mass / seen_by

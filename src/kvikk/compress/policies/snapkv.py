"""SnapKV: what the last queries attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvikk.compress.options import MAX_QUERY_WINDOW, check_between, check_odd
from kvikk.compress.signals import Signal
from kvikk.compress.view import LayerView


@dataclass(frozen=True, kw_only=True)
class SnapKV:
    """Keep what the last queries attend to, with its neighbours (Li et al., arXiv 2404.14469).

    Strong where the question stands at the end of the prompt; a second question finds what the first one needed.

    Args:
        query_window: so many of the last queries vote; their own tokens are kept.
        kernel: votes are pooled over so many neighbours; odd.
        pooling: `mean`, or `max`, which keeps whole surroundings of a peak.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.QUERIES})
    lanewise: ClassVar[bool] = True

    query_window: int = 32
    kernel: int = 5
    pooling: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        check_between(self, 1, MAX_QUERY_WINDOW, "query_window")
        check_odd(self, "kernel")

    def recent(self, budget: int) -> int:
        """The tokens of the queries that vote."""
        return self.query_window

    def score(self, view: LayerView) -> Tensor:
        """Mean attention of the window's queries to what is older than they are, pooled."""
        return view.pool(view.mean_attention(only_older=True), self.kernel, self.pooling)

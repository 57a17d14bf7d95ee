"""R-KV: attended to, and not said before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvikk.compress.attending import masked_softmax
from kvikk.compress.options import MAX_QUERY_WINDOW, check_between, check_odd
from kvikk.compress.signals import Signal
from kvikk.compress.similarity import redundancy
from kvikk.compress.view import LayerView


@dataclass(frozen=True, kw_only=True)
class RKV:
    """Keep what the last queries attend to and no later key repeats, for long thought (Cai et al., arXiv 2505.24133).

    Args:
        query_window: so many of the last queries vote; their own tokens are kept.
        kernel: votes are pooled (maximum) over so many neighbours; odd.
        importance: weight of the votes, against repetition. The paper's text has 0.1, its code this.
        similar: keys of a higher cosine repeat each other.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.QUERIES})
    cost: ClassVar[str] = "time with the square of the slots where few keys are alike"

    query_window: int = 8
    kernel: int = 7
    importance: float = 0.07
    similar: float = 0.5

    def __post_init__(self) -> None:
        check_between(self, 1, MAX_QUERY_WINDOW, "query_window")
        check_between(self, 0, 1, "importance", "similar")
        check_odd(self, "kernel")

    def recent(self, budget: int) -> int:
        """The tokens of the queries that vote."""
        return self.query_window

    def score(self, view: LayerView) -> Tensor:
        """The votes, less how much a key repeats the others."""
        votes = masked_softmax(view.group_max(view.logits()), view.before_window()[:, None]).mean(1)
        repeats = masked_softmax(redundancy(view.keys, view.slots, similar=self.similar), view.live)
        return self.importance * view.pool(votes, self.kernel, "max") - (1 - self.importance) * repeats

"""Scissorhands: tokens that were important stay important."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvikk.compress.options import MAX_QUERY_WINDOW, check_between
from kvikk.compress.signals import Signal
from kvikk.compress.view import LayerView


@dataclass(frozen=True, kw_only=True)
class Scissorhands:
    """Keep the tokens that most queries gave more than an equal share of attention (Liu et al., arXiv 2305.17118).

    The paper's recent tokens (10) are fewer than those that are kept anyway.

    Args:
        query_window: the history: so many of the last queries are counted at a trigger. The paper has 400.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.QUERIES})
    lanewise: ClassVar[bool] = True
    state: ClassVar[tuple[str, ...]] = ("hits",)

    query_window: int = 128

    def __post_init__(self) -> None:
        check_between(self, 1, MAX_QUERY_WINDOW, "query_window")

    def score(self, view: LayerView) -> Tensor:
        """How many queries so far found the slot important; each is counted once, whatever the trigger."""
        equal_share = 1 / view.live.sum(-1).clamp(min=1)
        is_hit = view.grouped(view.attention()) > equal_share[:, None, None, None]
        is_new = view.query_positions >= view.since
        hits = view.state("hits") + (is_hit & is_new[:, None]).float().sum(2).mean(1)
        view.remember("hits", hits)
        return hits

"""Expected Attention: what queries to come would attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvikk.compress.attending import masked_softmax
from kvikk.compress.expectation import QueryModel
from kvikk.compress.options import MAX_QUERY_WINDOW, check_between
from kvikk.compress.signals import Signal
from kvikk.compress.view import LayerView


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention:
    """Keep what a normal model of future queries attends to (Devoto et al., arXiv 2510.00636).

    The model is made of the last queries, with their RoPE undone; the paper takes those of the whole prompt.
    Args:
        query_window: so many of the last queries make the model.
        future: the rotation of so many positions to come is averaged.
        sinks: the first tokens are kept anyway, and are left out.
        epsilon: added to the expected attention before it is weighted by the norm of the value.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset(Signal) - {Signal.ATTENTION_MASS}
    lanewise: ClassVar[bool] = True

    query_window: int = 128
    future: int = 512
    sinks: int = 4
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_between(self, 1, MAX_QUERY_WINDOW, "query_window")
        check_between(self, 1, 2**16, "future")
        check_between(self, 0, 2**16, "sinks", "epsilon")

    def score(self, view: LayerView) -> Tensor:
        """Expected attention, averaged over a KV head's query heads, times the norm of the value."""
        queries = view.rotary.undo(view.queries, view.query_positions)
        of_sinks = max(0, min(self.sinks - (view.length - queries.shape[1]), queries.shape[1] - 1))
        model = QueryModel.of(view.grouped(queries[:, of_sinks:])).ahead(view.rotary, view.length, self.future)
        takes_part = view.live & (view.positions >= self.sinks)
        expected = masked_softmax(model.expected_logits(view.keys, view.scale), takes_part[:, None]).mean(1)
        return (expected + self.epsilon) * view.norms(view.values)

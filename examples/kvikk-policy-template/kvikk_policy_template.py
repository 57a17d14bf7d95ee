"""VATP: attention, weighted by what it brings."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvikk.compress import LayerView, Signal
from kvikk.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class VATP:
    """Keep what the last queries attend to, times the size of its value (Guo et al., arXiv 2406.12335).

    Args:
        query_window: so many of the last queries are asked; their own tokens are kept.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.VALUES, Signal.QUERIES})

    query_window: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.query_window <= 256:
            raise ConfigError(f"VATP: query_window is {self.query_window}: it must lie between 1 and 256")

    def recent(self, budget: int) -> int:
        """The tokens of the queries that are asked."""
        return self.query_window

    def score(self, view: LayerView) -> Tensor:
        """[kv_heads, slots], higher = keep."""
        attention = view.group_mean(view.attention().mean(1))  # over the queries, then over a KV head's query heads
        return attention * view.values.float().abs().sum(-1)

"""CAKE's eviction indicator: attention, and how much it wavers."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvikk.compress import LayerView, Signal
from kvikk.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CAKE:
    """Keep what the last queries attend to, steadily or by turns (Qin et al., arXiv 2503.12491).

    The indicator only, mean + gamma * variance: how CAKE shares the budget over layers is an allocator's matter.

    Args:
        query_window: so many of the last queries are asked; their own tokens are kept.
        gamma: weight of the variance over these queries.
        kernel: so many neighbours in the text share their scores.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS, Signal.QUERIES})

    query_window: int = 32
    gamma: float = 200.0
    kernel: int = 5

    def __post_init__(self) -> None:
        if not 2 <= self.query_window <= 256:
            raise ConfigError(f"CAKE: query_window is {self.query_window}: it must lie between 2 and 256")
        if not 0 <= self.gamma < float("inf"):
            raise ConfigError(f"CAKE: gamma is {self.gamma}: it must be a number of at least 0")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"CAKE: kernel is {self.kernel}: it must be odd")

    def recent(self, budget: int) -> int:
        """The tokens of the queries that are asked."""
        return self.query_window

    def score(self, view: LayerView) -> Tensor:
        """[kv_heads, slots], higher = keep."""
        attention = view.attention()
        indicator = attention.mean(1) + self.gamma * attention.var(1, correction=0)  # over the queries
        return view.pool(view.group_mean(indicator), self.kernel, "mean")

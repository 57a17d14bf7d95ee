"""StreamingLLM: the sinks and the last tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvikk.compress.signals import Signal
from kvikk.compress.view import LayerView


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Keep the first and the last tokens (Xiao et al., arXiv 2309.17453).

    The first are the sinks, which every policy keeps. The paper counts positions within the cache; here, as everywhere,
    a key keeps the position of its token.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.POSITIONS})
    lanewise: ClassVar[bool] = True
    by_recency: ClassVar[bool] = True

    def score(self, view: LayerView) -> Tensor:
        """Later is better."""
        return view.positions.float()

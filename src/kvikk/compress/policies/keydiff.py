"""KeyDiff: keys unlike the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

from kvikk.compress.signals import Signal
from kvikk.compress.view import LayerView


@dataclass(frozen=True, kw_only=True)
class KeyDiff:
    """Keep the keys that point elsewhere than the average key (Park et al., arXiv 2504.15364).

    The paper compresses after each block of 128 tokens: the trigger `every:128` does so while generating.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.KEYS})
    lanewise: ClassVar[bool] = True

    def score(self, view: LayerView) -> Tensor:
        """Minus the cosine between a key and the mean direction of all live keys."""
        keys = view.keys.float()
        return -F.cosine_similarity(keys, view.live_mean(F.normalize(keys, dim=-1)), dim=-1)

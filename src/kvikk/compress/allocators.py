"""How a row's budget is shared over its layers, and a layer's over its KV heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from kvikk.compress.options import check_between
from kvikk.compress.select import ranking
from kvikk.compress.slots import LayerSlots
from kvikk.memory import upload


class Allocator(Protocol):
    """Shares a budget out. A frozen, keyword-only dataclass: its fields are its options.

    A share below what is protected is no mistake: what is protected stays in any case.
    """

    by_scores: ClassVar[bool]
    """Whether `over_heads` looks at the scores; else every KV head keeps its layer's budget."""

    def over_layers(self, budget: int, *, layers: int, length: int, protected: int) -> list[int]:
        """Slots that the lanes of each layer keep on average: `layers` numbers whose mean is `budget`.

        Args:
            budget: slots that a lane keeps on average, at most `length`.
            layers: of the model, with KV heads of the same number (where they differ, the mean is over layers).
            length: tokens of the row so far.
            protected: of these, tokens that every lane keeps.
        """
        ...

    def over_heads(self, budgets: Sequence[int], scores: Tensor, slots: LayerSlots, protected: Tensor) -> Tensor:
        """Slots that each KV head of some layers keeps: `[lanes]` int64, on the device of the scores.

        A layer's add up to its KV heads times its budget, or to what is alive or protected where that is fewer or more.

        Args:
            budgets: for each of the layers, slots that its lanes keep on average.
            scores: `[lanes, slots]` fp32, layer after layer, each with the same number of KV heads.
            slots: which token each slot holds.
            protected: `[lanes, slots]` bool, live slots that are kept in any case.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """The same number of tokens for every KV head of every layer."""

    by_scores: ClassVar[bool] = False

    def over_layers(self, budget: int, *, layers: int, length: int, protected: int) -> list[int]:
        """The budget for each."""
        return [budget] * layers

    def over_heads(self, budgets: Sequence[int], scores: Tensor, slots: LayerSlots, protected: Tensor) -> Tensor:
        """The layer's budget for each."""
        return over_lanes(budgets, scores)


@dataclass(frozen=True, kw_only=True)
class Pyramid(Uniform):
    """More tokens for the lower layers, fewer for the upper ones (PyramidKV: Cai et al., arXiv 2406.02069).

    What is not protected falls linearly from layer to layer.

    Args:
        beta: the last layer gets one `beta`-th of the average, the first one twice the average less that; less steep
            where the first layer would get more than there is.
    """

    beta: float = 20.0

    def __post_init__(self) -> None:
        check_between(self, 1, inf, "beta")

    def over_layers(self, budget: int, *, layers: int, length: int, protected: int) -> list[int]:
        """A falling line, rounded so that the mean is the budget."""
        spare = max(0, budget - protected)
        least = max(spare / self.beta, 2 * spare - max(0, length - protected))
        step = 2 * (spare - least) / max(1, layers - 1)
        exact = [2 * spare - least - layer * step if layers > 1 else spare for layer in range(layers)]
        return [budget - spare + slots for slots in _rounded(exact, layers * spare)]


@dataclass(frozen=True, kw_only=True)
class Pooled(Uniform):
    """The KV heads of a layer compete for its tokens (Ada-KV: Feng et al., arXiv 2407.11550).

    Args:
        safeguard: share of what is not protected that each head fills with its own best. The rest goes to the best of
            all heads. The paper has 0.5; its authors advise little for small budgets, but not 0.
    """

    by_scores: ClassVar[bool] = True

    safeguard: float = 0.2

    def __post_init__(self) -> None:
        check_between(self, 0, 1, "safeguard")

    def over_heads(self, budgets: Sequence[int], scores: Tensor, slots: LayerSlots, protected: Tensor) -> Tensor:
        """How many of a layer's best slots are each head's."""
        layers, live = len(budgets), slots.live
        of_layer = over_lanes(budgets, scores)
        own = protected.sum(-1)
        spare = (of_layer - own).clamp(min=0)
        safe = (spare * self.safeguard).long()
        if self.safeguard > 0:
            safe = torch.minimum(safe.clamp(min=1), spare)
        is_safe = live & (ranking(scores, slots, protected) < (own + safe)[:, None])
        pool = LayerSlots(positions=slots.positions.view(layers, -1), live=live.view(layers, -1), length=slots.length)
        rank = ranking(scores.view(layers, -1), pool, is_safe.view(layers, -1)).view_as(live)
        return (live & (rank < (of_layer * (len(live) // layers))[:, None])).sum(-1)


def over_lanes(numbers: Sequence[int], like: Tensor) -> Tensor:
    """A number of each layer, said of each of its lanes: `[lanes]` int64, on the device of `[lanes, ...]`."""
    if len(set(numbers)) == 1:  # nothing to copy to the device
        return torch.full((len(like),), numbers[0], device=like.device)
    return upload(np.repeat(numbers, len(like) // len(numbers)), like.device)


def _rounded(exact: list[float], total: int) -> list[int]:
    """Whole numbers that add up to the total: those with the largest remainders are rounded up, the first of equals."""
    whole = [floor(value + 1e-9) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: whole[index] - exact[index])
    for index in by_remainder[: total - sum(whole)]:
        whole[index] += 1
    return whole

"""Policy, budget and allocator, put together: what a row keeps at a trigger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kvikk.compress.allocators import Allocator, over_lanes
from kvikk.compress.budgets import Budget
from kvikk.compress.policy import Policy, count_unscored, recent_tokens, score_layer
from kvikk.compress.select import keep_best, keep_mask
from kvikk.compress.slots import LayerSlots
from kvikk.compress.view import LayerView
from kvikk.memory.body import IntArray


@dataclass(frozen=True, kw_only=True)
class Method:
    """How the KV of a row is kept small.

        quotas = method.quotas(length, layers=layers, token_bytes=token_bytes)
        scores = torch.cat([method.score(view_of(layer, quotas[layer])) for layer in range(layers)])
        kept, unscored = method.select(scores, slots, quotas, kv_heads)  # of all layers at once
        refuse_unscored(method.name, unscored, live)                     # waits for the device

    Args:
        name: of the policy.
        policy: scores.
        budget: how much stays.
        allocator: shares the budget over layers and heads.
        sinks: first tokens that stay in any case.
        window: last tokens that stay in any case.
    """

    name: str
    policy: Policy
    budget: Budget
    allocator: Allocator
    sinks: int
    window: int

    def quotas(self, length: int, *, layers: int, token_bytes: int, unfinished: int = 0) -> list[int]:
        """Slots that the lanes of each layer keep on average.

        Args:
            length: tokens of the row so far.
            layers: of the model.
            token_bytes: what one slot in each lane takes.
            unfinished: the last tokens that stay in any case, since their block is not full.
        """
        budget = self.budget.slots(length, token_bytes=token_bytes)
        protected = min(length, self.sinks + self.recent(budget, unfinished))
        return self.allocator.over_layers(budget, layers=layers, length=length, protected=protected)

    def recent(self, budget: int, unfinished: int = 0) -> int:
        """How many of the last tokens stay in any case: the window, the unfinished block, and what the policy wants.

        Args:
            budget: slots that a lane keeps on average, which bounds what the policy gets.
            unfinished: tokens of the last, partly filled block.
        """
        wanted = min(recent_tokens(self.policy, budget), budget - self.sinks)
        return max(self.window, unfinished, wanted)

    def score(self, view: LayerView) -> Tensor:
        """The policy's scores, `[kv_heads, slots]` fp32; `check_scores` looks at them.

        Raises:
            PolicyFailed: the policy broke its contract.
        """
        return score_layer(self.name, self.policy, view)

    def known_counts(
        self, quotas: Sequence[int], kv_heads: Sequence[int], live: IntArray, length: int, unfinished: int = 0
    ) -> IntArray | None:
        """How many slots of each lane `select` keeps, `[lanes]`; None: that hangs on the scores.

        Args:
            quotas: of some layers.
            kv_heads: of these layers.
            live: `[lanes]`, live slots.
            length: tokens of the row so far.
            unfinished: tokens of the last, partly filled block.
        """
        protected = {quota: min(length, self.sinks + self.recent(quota, unfinished)) for quota in set(quotas)}
        if self.allocator.by_scores or any(most > quota for quota, most in protected.items()):
            return None
        counts: IntArray = np.minimum(live, np.repeat(quotas, kv_heads))
        return counts

    def select(
        self, scores: Tensor, slots: LayerSlots, quotas: Sequence[int], kv_heads: Sequence[int], unfinished: int = 0
    ) -> tuple[Tensor, Tensor]:
        """What stays of some layers, and whether their scores say anything.

        Args:
            scores: `[lanes, slots]` fp32, layer after layer.
            slots: of these lanes.
            quotas: of these layers.
            kv_heads: of these layers.
            unfinished: tokens of the last, partly filled block.

        Returns:
            `[lanes, slots]` bool, what stays; and `[lanes]`, live slots with NaN or +inf: where there is one, as much
            stays, and it means nothing.
        """
        if len(set(kv_heads)) > 1:  # layers that differ are ranked one by one
            ends = list(accumulate(kv_heads))
            each = zip(quotas, kv_heads, ends, strict=True)
            selected = [
                self.select(scores[end - heads : end], slots.of_lanes(end - heads, end), [quota], [heads], unfinished)
                for quota, heads, end in each
            ]
            kept, unscored = zip(*selected, strict=True)
            return torch.cat(kept), torch.cat(unscored)
        recent = {quota: self.recent(quota, unfinished) for quota in set(quotas)}
        windows = [recent[quota] for quota in quotas]
        if len(recent) == 1 and not self.allocator.by_scores:
            return keep_best(scores, slots, quotas[0], sinks=self.sinks, window=windows[0])
        window = windows[0] if len(set(windows)) == 1 else over_lanes(windows, scores)[:, None]
        protected = slots.protected(sinks=self.sinks, window=window)
        counts = self.allocator.over_heads(quotas, scores, slots, protected)
        return keep_mask(scores, slots, counts, protected), count_unscored(scores, slots.live)

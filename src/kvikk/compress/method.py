"""Policy, budget and allocator, put together: what a row keeps at a trigger."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvikk.compress.allocators import Allocator
from kvikk.compress.budgets import Budget
from kvikk.compress.policy import Policy, recent_tokens, score_layer
from kvikk.compress.select import keep_mask
from kvikk.compress.view import LayerView


@dataclass(frozen=True, kw_only=True)
class Method:
    """How the KV of a row is kept small.

        quotas = method.quotas(length, layers=layers, token_bytes=token_bytes)
        for layer in range(layers):
            view = LayerView(layer=layer, budget=quotas[layer], needs=method.policy.needs, ...)
            kept, scores = method.keep(view)
        check_scores(method.name, all_scores, all_live)          # waits for the device, once

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

    def keep(self, view: LayerView, unfinished: int = 0) -> tuple[Tensor, Tensor]:
        """What stays of a layer: the mask and the scores, each `[kv_heads, slots]`.

        The mask means nothing until the scores were looked at by `check_scores`.

        Raises:
            PolicyFailed: the policy broke its contract.
        """
        scores = score_layer(self.name, self.policy, view)
        sinks, window = self.sinks, self.recent(view.budget, unfinished)
        protected = view.slots.protected(sinks=sinks, window=window)
        counts = self.allocator.over_heads(view.budget, scores, view.slots, protected)
        return keep_mask(scores, view.slots, counts, sinks=sinks, window=window), scores

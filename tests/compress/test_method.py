"""Policy, budget and allocator together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvikk.compress import KVCacheParams, check_scores
from kvikk.compress.registry import BUILT_IN, installed
from kvikk.errors import PolicyFailed
from kvikk.testing.layers import fresh_layer

NAMES = [entry.name for entry in installed().entries if entry.origin == BUILT_IN and entry.name != "full"]


@pytest.mark.parametrize("allocator", ["uniform", "pyramid", "pooled"])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_keeps_its_quota_to_the_slot(name: str, allocator: str) -> None:
    layer = fresh_layer(kv_heads=3, group=2, length=200)
    method = KVCacheParams(policy=name, budget="30%", allocator=allocator, sinks=2, window=8).method
    quotas = method.quotas(200, layers=4, token_bytes=1)
    assert sum(quotas) == 4 * 60
    view = replace(layer.view(method.policy), budget=quotas[1])
    kept, scores = method.keep(view)
    check_scores(name, scores, view.live)
    assert int(kept.sum()) == 3 * quotas[1]
    assert not (view.slots.protected(sinks=2, window=8) & ~kept).any()


def test_a_budget_of_everything_keeps_everything() -> None:
    layer = fresh_layer(kv_heads=2, group=2, length=50)
    for name in NAMES:
        method = KVCacheParams(policy=name, budget="100%", allocator="pooled").method
        kept, _ = method.keep(replace(layer.view(method.policy), budget=50))
        assert torch.equal(kept, layer.slots.live)


def test_a_policy_never_gets_more_recent_tokens_than_the_budget_leaves_beside_the_sinks() -> None:
    method = KVCacheParams(policy="snapkv", policy_options={"query_window": 64}, budget="10%", window=8).method
    assert method.recent(1000) == 64
    assert method.recent(40) == 36
    assert method.recent(3) == 8, "what the operator set stays in any case"
    assert method.recent(3, unfinished=15) == 15, "and so does the block that is not full"


def test_the_unfinished_block_stays_and_counts_in_the_budget() -> None:
    layer = fresh_layer(kv_heads=2, group=1, length=100)
    method = KVCacheParams(policy="random", budget=50, sinks=0, window=0).method
    kept, _ = method.keep(replace(layer.view(method.policy), budget=50), unfinished=15)
    assert kept[:, 85:100].all()
    assert kept.sum(-1).tolist() == [50, 50]


def test_nan_is_an_error_that_names_the_policy_and_dead_slots_may_have_it() -> None:
    live = torch.tensor([True, True, False])
    check_scores("mine", torch.tensor([1.0, -torch.inf, torch.nan]), live)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(PolicyFailed, match="policy 'mine': 1 of 2 live slots were scored NaN or"):
            check_scores("mine", torch.tensor([1.0, bad, 0.0]), live)

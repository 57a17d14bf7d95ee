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
    scores = method.score(replace(layer.view(method.policy), budget=quotas[1]))
    check_scores(name, scores, layer.slots.live)
    kept, _ = method.select(scores, layer.slots, [quotas[1]], [3])
    assert int(kept.sum()) == 3 * quotas[1]
    assert not (layer.slots.protected(sinks=2, window=8) & ~kept).any()


def test_a_budget_of_everything_keeps_everything() -> None:
    layer = fresh_layer(kv_heads=2, group=2, length=50)
    for name in NAMES:
        method = KVCacheParams(policy=name, budget="100%", allocator="pooled").method
        scores = method.score(replace(layer.view(method.policy), budget=50))
        assert torch.equal(method.select(scores, layer.slots, [50], [2])[0], layer.slots.live)


def test_a_policy_never_gets_more_recent_tokens_than_the_budget_leaves_beside_the_sinks() -> None:
    method = KVCacheParams(policy="snapkv", policy_options={"query_window": 64}, budget="10%", window=8).method
    assert method.recent(1000) == 64
    assert method.recent(40) == 36
    assert method.recent(3) == 8, "what the operator set stays in any case"
    assert method.recent(3, unfinished=15) == 15, "and so does the block that is not full"


def test_the_unfinished_block_stays_and_counts_in_the_budget() -> None:
    layer = fresh_layer(kv_heads=2, group=1, length=100)
    method = KVCacheParams(policy="random", budget=50, sinks=0, window=0).method
    scores = method.score(replace(layer.view(method.policy), budget=50))
    kept, _ = method.select(scores, layer.slots, [50], [2], unfinished=15)
    assert kept[:, 85:100].all()
    assert kept.sum(-1).tolist() == [50, 50]


@pytest.mark.parametrize("kv_heads", [(2, 2, 2), (1, 3, 2)])
@pytest.mark.parametrize("allocator", ["uniform", "pyramid", "pooled"])
@pytest.mark.parametrize("name", ["h2o", "knorm"])
def test_layers_selected_at_once_keep_what_each_keeps_alone(
    name: str, allocator: str, kv_heads: tuple[int, ...]
) -> None:
    """H2O's recent tokens depend on the layer's budget."""
    method = KVCacheParams(policy=name, budget="30%", allocator=allocator, sinks=2, window=8).method
    quotas = method.quotas(100, layers=3, token_bytes=1)
    slots = fresh_layer(kv_heads=6, group=1, length=100).slots
    scores = torch.rand(slots.live.shape, generator=torch.Generator().manual_seed(0))
    kept, _ = method.select(scores, slots, quotas, kv_heads)
    lane = 0
    for quota, heads in zip(quotas, kv_heads, strict=True):
        lanes = slice(lane, lane + heads)
        alone, _ = method.select(scores[lanes], slots.of_lanes(lane, lane + heads), [quota], [heads])
        assert torch.equal(kept[lanes], alone)
        assert int(alone.sum()) == heads * quota
        lane += heads


@pytest.mark.parametrize("unfinished", [0, 5, 15])
@pytest.mark.parametrize("budget", [12, 20, 45, "30%", "100%"])
@pytest.mark.parametrize("allocator", ["uniform", "pyramid", "pooled"])
@pytest.mark.parametrize("name", ["h2o", "knorm", "snapkv"])
def test_numbers_that_are_known_beforehand_are_those_that_stay_even_of_nan(
    name: str, allocator: str, budget: int | str, unfinished: int
) -> None:
    """With lanes that hold fewer than they may keep, and a budget below what is protected."""
    method = KVCacheParams(policy=name, budget=budget, allocator=allocator, sinks=2, window=8).method
    kv_heads = (2, 2, 2)
    quotas = method.quotas(100, layers=3, token_bytes=1, unfinished=unfinished)
    slots = fresh_layer(kv_heads=6, group=1, length=100).slots
    live = slots.live.clone()
    live[1, 10:80] = live[4, 20:60] = False
    slots = replace(slots, live=live)
    counts = method.known_counts(quotas, kv_heads, live.sum(1).numpy(), 100, unfinished)
    assert (counts is None) == (allocator == "pooled" or (budget == 12 and unfinished == 15))
    scores = torch.rand(live.shape, generator=torch.Generator().manual_seed(0))
    scores[2, ::3] = torch.nan
    kept, unscored = method.select(scores, slots, quotas, kv_heads, unfinished)
    assert unscored.tolist() == [0, 0, int(live[2, ::3].sum()), 0, 0, 0]
    if counts is not None:
        assert kept.sum(1).tolist() == counts.tolist()


def test_nan_is_an_error_that_names_the_policy_and_dead_slots_may_have_it() -> None:
    live = torch.tensor([True, True, False])
    check_scores("mine", torch.tensor([1.0, -torch.inf, torch.nan]), live)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(PolicyFailed, match="policy 'mine': 1 of 2 live slots were scored NaN or"):
            check_scores("mine", torch.tensor([1.0, bad, 0.0]), live)

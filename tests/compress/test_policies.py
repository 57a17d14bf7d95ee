"""What each policy keeps, beyond what is compared with others' code in `test_golden.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvikk.compress import LayerSlots, Policy
from kvikk.compress.policies.expected_attention import ExpectedAttention
from kvikk.compress.policies.full import Full
from kvikk.compress.policies.h2o import H2O
from kvikk.compress.policies.knorm import KNorm
from kvikk.compress.policies.r_kv import RKV
from kvikk.compress.policies.random import Random
from kvikk.compress.policies.scissorhands import Scissorhands
from kvikk.compress.policies.snapkv import SnapKV
from kvikk.compress.policies.streaming import Streaming
from kvikk.compress.policies.tova import TOVA
from kvikk.compress.similarity import CHUNK_KEYS, redundancy
from kvikk.errors import ConfigError
from kvikk.testing.layers import Layer, compacted_layer, fresh_layer


def scores(policy: Policy, layer: Layer, states: dict[str, Tensor] | None = None) -> Tensor:
    return policy.score(layer.view(policy, states=states))


def test_full_scores_all_alike_and_streaming_by_position() -> None:
    layer = compacted_layer(kv_heads=2, group=2, length=50)
    assert scores(Full(), layer).unique().tolist() == [0]
    assert torch.equal(scores(Streaming(), layer), layer.slots.positions.float())


def test_random_is_a_function_of_seed_layer_head_and_position() -> None:
    layer, policy = compacted_layer(kv_heads=3, group=1, length=4000), Random()
    first = scores(policy, layer)
    at = [
        dict(zip(*(row.tolist() for row in rows), strict=True))
        for rows in zip(layer.slots.positions, first, strict=True)
    ]
    shared = set(at[0]) & set(at[1]) - {-1}
    assert len(shared) > 500
    assert sum(at[0][position] == at[1][position] for position in shared) < 3, "heads draw lots of their own"
    view = layer.view(policy)
    for other in (replace(view, seed=8), replace(view, seed=7 + 2**32), replace(view, layer=2)):
        assert not torch.equal(policy.score(other), first)


def test_random_lots_are_spread_evenly() -> None:
    lots = scores(Random(), fresh_layer(kv_heads=4, group=1, length=8000, spare=0)).flatten()
    assert lots.min() >= 0
    assert lots.max() < 1
    assert lots.mean().item() == pytest.approx(0.5, abs=0.01)
    assert torch.histc(lots, bins=10).min() > 3000


def test_snapkv_keeps_the_neighbours_of_what_is_attended_to() -> None:
    layer = fresh_layer(kv_heads=1, group=1, length=60, spare=0)
    assert layer.signals.keys is not None
    assert layer.signals.queries is not None
    keys, queries = torch.zeros_like(layer.signals.keys), torch.zeros_like(layer.signals.queries)
    keys[0, 20, 0], queries[0, :, 0] = 10, 10  # every query looks at position 20
    layer = replace(layer, signals=replace(layer.signals, keys=keys, queries=queries))
    best = scores(SnapKV(query_window=8, kernel=5), layer).topk(5).indices
    assert sorted(best[0].tolist()) == [18, 19, 20, 21, 22]


def test_snapkv_and_r_kv_ask_for_their_window_and_h2o_for_half() -> None:
    assert SnapKV(query_window=16).recent(100) == 16
    assert RKV().recent(100) == 8
    assert H2O().recent(101) == 50
    assert H2O(recent_share=0).recent(101) == 0


def test_h2o_per_query_is_fair_to_young_tokens() -> None:
    layer = fresh_layer(kv_heads=2, group=1, length=40, spare=0)
    mass = torch.arange(40, 0, -1).float().repeat(2, 1)  # each query gave every token 1
    layer = replace(layer, signals=replace(layer.signals, attention_mass=mass))
    assert torch.equal(scores(H2O(), layer), mass)
    assert scores(H2O(per_query=True), layer).unique().tolist() == [1]
    some = replace(layer, signals=replace(layer.signals, attention_mass=mass.clamp(max=10), observed=10))
    assert scores(H2O(per_query=True), some).unique().tolist() == [1], "only the last 10 queries were counted"


def test_tova_scores_a_token_alike_in_all_heads_of_a_layer() -> None:
    layer = compacted_layer(kv_heads=3, group=2, length=80)
    by_position: dict[int, set[float]] = {}
    for row, found, live in zip(layer.slots.positions, scores(TOVA(), layer), layer.slots.live, strict=True):
        for position, score in zip(row[live].tolist(), found[live].tolist(), strict=True):
            by_position.setdefault(position, set()).add(score)
    assert all(len(alike) == 1 for alike in by_position.values())
    assert len(by_position) > 40


def test_scissorhands_counts_each_query_once_whatever_the_trigger() -> None:
    """One trigger after 64 queries counts what two triggers, 24 queries apart and with windows of 64, count."""
    policy = Scissorhands(query_window=64)
    late = fresh_layer(kv_heads=2, group=2, length=64, spare=0)
    once: dict[str, Tensor] = {}
    scores(policy, late, once)

    assert late.signals.queries is not None
    assert late.signals.query_positions is not None
    early_slots = LayerSlots(positions=late.slots.positions, live=late.slots.positions < 40, length=40)
    early_signals = replace(
        late.signals, queries=late.signals.queries[:, :40], query_positions=late.signals.query_positions[:40]
    )
    twice: dict[str, Tensor] = {}
    scores(policy, replace(late, slots=early_slots, signals=early_signals), twice)
    scores(policy, replace(late, since=40), twice)
    seen = late.slots.positions[0] >= 40  # a share of 40 tokens is not one of 64: older ones may differ
    assert torch.equal(once["hits"][:, seen], twice["hits"][:, seen])
    assert (twice["hits"].sum() - once["hits"].sum()).abs() < 0.2 * once["hits"].sum()


def test_scissorhands_counts_queries_that_give_more_than_an_equal_share() -> None:
    layer = fresh_layer(kv_heads=1, group=2, length=30, spare=0)
    policy = Scissorhands(query_window=10)
    view = layer.view(policy)
    assert torch.equal(policy.score(view), (view.attention() > 1 / 30).float().sum(1).mean(0, keepdim=True))


def test_expected_attention_is_the_attention_of_many_queries_drawn_from_the_model() -> None:
    """Monte Carlo over rotated normal queries. The rotation is averaged before the exponent, so the future is short."""
    torch.manual_seed(0)
    policy = ExpectedAttention(query_window=60, future=1, sinks=4)
    layer = fresh_layer(kv_heads=1, group=1, length=60, spare=0)
    assert layer.signals.queries is not None
    assert layer.signals.rotary is not None
    assert layer.signals.keys is not None
    assert layer.signals.values is not None
    plain = layer.signals.rotary.undo(layer.signals.queries, torch.arange(60))[0, 4:]
    drawn = torch.distributions.MultivariateNormal(plain.mean(0), plain.T.cov(correction=0)).sample((400_000,))
    drawn = layer.signals.rotary.average(drawn, start=60, count=1)
    expected = (drawn @ layer.signals.keys[0, 4:].T * 0.25).exp().mean(0)
    expected = expected / expected.sum() * layer.signals.values[0, 4:].norm(dim=-1)
    torch.testing.assert_close(scores(policy, layer)[0, 4:], expected, rtol=0.1, atol=1e-4)


def test_r_kv_spares_the_latest_of_keys_that_repeat_each_other() -> None:
    torch.manual_seed(0)
    units = F.normalize(torch.eye(12, 16) + 0.01 * torch.randn(12, 16), dim=-1)
    keys = torch.cat((units[:4], units[:1], units[4:], units[:1]))[None]  # positions 0, 4 and 13 repeat each other
    positions = torch.randperm(14)[None]
    slots = LayerSlots(positions=positions, live=torch.ones((1, 14), dtype=torch.bool), length=14)
    found = redundancy(keys[:, positions[0]], slots, similar=0.5)
    repeats = dict(zip(positions[0].tolist(), found[0].tolist(), strict=True))
    worst = sorted(repeats, key=repeats.__getitem__)[-2:]
    assert sorted(worst) == [0, 4]
    assert repeats[13] < repeats[4] / 5


def test_r_kv_is_its_authors_formula() -> None:
    """Slot by slot, for one KV head with two query heads: votes of 8 queries, pooled over 7; cosines above a half."""
    layer = fresh_layer(kv_heads=1, group=2, length=40, spare=0)
    keys, queries = layer.signals.keys, layer.signals.queries
    assert keys is not None
    assert queries is not None
    older = 32
    logits = (queries[:, older:] @ keys[0, :older].T * 0.25).amax(0)  # [8, 32]
    votes = logits.softmax(-1).mean(0).tolist()
    pooled = [max(votes[max(0, slot - 3) : slot + 4]) for slot in range(older)]
    cosines = F.cosine_similarity(keys[0][:, None], keys[0][None], dim=-1)
    for row in range(40):
        cosines[row, row] = 0
        like = (cosines[row] > 0.5).nonzero().flatten().tolist()
        cosines[row, like[-1] if like else 0] = 0
    repeats = cosines.mean(0).softmax(-1)[:older]
    expected = 0.07 * torch.tensor(pooled) - 0.93 * repeats
    torch.testing.assert_close(scores(RKV(), layer)[0, :older], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("similar", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("common", [0.0, 1.0], ids=["strangers", "much alike"])
def test_redundancy_is_its_definition_in_chunks_of_any_size(
    monkeypatch: pytest.MonkeyPatch, similar: float, common: float
) -> None:
    torch.manual_seed(0)
    slots = compacted_layer(kv_heads=3, group=1, length=90).slots
    keys = torch.randn(*slots.live.shape, 8) + common
    expected = torch.zeros(slots.live.shape)
    for lane, (live, positions) in enumerate(zip(slots.live, slots.positions, strict=True)):
        text = live.nonzero().flatten()[positions[live].argsort()]
        cosines = F.cosine_similarity(keys[lane, text][:, None], keys[lane, text][None], dim=-1).fill_diagonal_(0)
        for row in cosines:
            alike = (row > similar).nonzero().flatten().tolist()
            row[alike[-1] if alike else 0] = 0
        expected[lane, text] = cosines.mean(0)
    for at_once in (1, 7, 90):
        monkeypatch.setattr("kvikk.compress.similarity.CHUNK_KEYS", at_once)
        found = redundancy(keys, slots, similar=similar)
        torch.testing.assert_close(found[slots.live], expected[slots.live], rtol=1e-4, atol=1e-6)


def test_redundancy_compares_all_keys_with_those_at_the_end_alone_where_all_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = []
    multiply = torch.Tensor.__matmul__
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda a, b: (compared.append(a.shape[1] * b.shape[2]), multiply(a, b))[1]
    )
    length = 4 * CHUNK_KEYS
    positions = torch.arange(length)[None]
    slots = LayerSlots(positions=positions, live=positions >= 0, length=length)
    redundancy(torch.randn(1, length, 8) / 100 + 1, slots, similar=0.5)
    assert max(compared) == length * CHUNK_KEYS
    assert sum(compared) < 1.1 * length * CHUNK_KEYS


def test_knorm_keeps_small_keys() -> None:
    layer = fresh_layer(kv_heads=1, group=1, length=10, spare=0)
    assert layer.signals.keys is not None
    keys = layer.signals.keys.clone()
    keys[0, 3] *= 1e-3
    assert scores(KNorm(), replace(layer, signals=replace(layer.signals, keys=keys))).argmax() == 3


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: SnapKV(kernel=4), "kernel is 4: a window around a token is odd, such as 5"),
        (lambda: SnapKV(kernel=0), "kernel is 0: it must lie between 1 and 1023"),
        (lambda: SnapKV(query_window=0), "query_window is 0: it must lie between 1 and 1024"),
        (lambda: SnapKV(query_window=10**9), "it must lie between 1 and 1024"),
        (lambda: H2O(recent_share=1.5), "recent_share is 1.5: it must lie between 0 and 1"),
        (lambda: Scissorhands(query_window=-1), "query_window is -1"),
        (lambda: ExpectedAttention(future=0), "future is 0"),
        (lambda: ExpectedAttention(epsilon=-1), "epsilon is -1: it must lie between 0 and 65536"),
        (lambda: RKV(importance=2), "importance is 2: it must lie between 0 and 1"),
        (lambda: RKV(kernel=6), "kernel is 6"),
    ],
)
def test_an_option_out_of_its_limits_is_refused(make: type[Policy], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()

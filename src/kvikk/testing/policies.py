"""What every policy must meet, kvikk's own and others': run it on yours before you publish it.

In a file of tests:

    import pytest
    from kvikk.testing.policies import PolicyConformance

    class TestMine(PolicyConformance):
        @pytest.fixture
        def policy(self):
            return Mine()

Without pytest: `check_policy(Mine())` raises an AssertionError that says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvikk.compress import (
    Policy,
    Signal,
    check_scores,
    is_by_recency,
    is_lanewise,
    keep_mask,
    query_window,
    state_names,
)
from kvikk.compress.policy import recent_tokens, score_layer
from kvikk.compress.registry import fault_of
from kvikk.testing.layers import Layer, compacted_layer, fresh_layer, stacked

COSTLY = frozenset({Signal.KEYS, Signal.VALUES, Signal.QUERIES, Signal.ATTENTION_MASS})
"""Signals that an engine has to gather."""


def layers() -> dict[str, Layer]:
    """The layers that a policy is tried on, by what is special about them."""
    return {
        "several KV heads": fresh_layer(kv_heads=3, group=4, length=90),
        "one KV head": fresh_layer(kv_heads=1, group=8, length=70),
        "a query head for each KV head": fresh_layer(kv_heads=4, group=1, length=70),
        "one token": fresh_layer(kv_heads=2, group=2, length=1),
        "few tokens": fresh_layer(kv_heads=2, group=2, length=9, spare=0),
        "lanes after compaction": compacted_layer(kv_heads=4, group=2, length=120),
    }


class PolicyConformance:
    """The claims. Make a subclass whose name begins with `Test`, with a fixture `policy`."""

    def test_it_is_declared_as_a_policy_is(self, policy: Policy) -> None:
        """A frozen dataclass with `needs` and `score`, and a docstring for those who choose."""
        fault = fault_of(type(policy))
        assert fault is None, fault
        parameters: Any = getattr(type(policy), "__dataclass_params__", None)
        assert parameters.frozen, "a policy serves all requests at once: make it @dataclass(frozen=True)"
        assert (type(policy).__doc__ or "").strip(), "its docstring's first line is what people choose it by"
        if Signal.QUERIES in policy.needs:
            assert query_window(policy) >= 1, "query_window says how many of the last queries it wants"
        for budget in (1, 64, 4096):
            assert recent_tokens(policy, budget) >= 0, "recent(budget) is a number of tokens"

    def test_it_gives_numbers_also_for_the_shortest_rows(self, policy: Policy) -> None:
        """A row may have one token, and no more queries than that: where an unbiased variance is NaN, for instance."""
        for what, layer in layers().items():
            scores = _scores(policy, layer.with_dead(0.0))[layer.slots.live]
            bad = ~(scores < torch.inf)
            assert not bad.any(), f"{what}: {int(bad.sum())} of {len(scores)} scores are NaN or +inf"

    def test_every_live_slot_gets_a_number(self, policy: Policy) -> None:
        """One score for each slot, finite or -inf where the slot is live."""
        for what, layer in layers().items():
            scores = _scores(policy, layer)
            assert scores.is_floating_point(), f"{what}: scores are {scores.dtype}"
            check_scores(type(policy).__name__, scores, layer.slots.live)

    def test_what_lies_in_dead_slots_changes_nothing(self, policy: Policy) -> None:
        """Recycled memory holds anything: numbers, and NaN."""
        for what, layer in layers().items():
            live = layer.slots.live
            wanted = _scores(policy, layer.with_dead(0.0))[live]
            for content in (torch.nan, torch.inf, 1e4):
                found = _scores(policy, layer.with_dead(content))[live]
                assert torch.equal(found, wanted), f"{what}: {content} in dead slots reaches the scores of live ones"

    def test_more_dead_slots_change_nothing(self, policy: Policy) -> None:
        """How many slots are dead depends on the engine's pages."""
        for what, layer in layers().items():
            order = layer.slots.order
            longest = int(layer.slots.live.sum(-1).max())
            shorter = layer.in_order(order[:, :longest])
            wanted = _scores(policy, layer.in_order(order))[:, :longest]
            _assert_close(_scores(policy, shorter), shorter, wanted, f"{what}: with fewer dead slots")

    def test_the_order_of_slots_changes_nothing(self, policy: Policy) -> None:
        """Slots lie in any order once a row was compacted; `positions` says which token is where."""
        for what, layer in layers().items():
            order = torch.rand(layer.slots.live.shape, generator=torch.Generator().manual_seed(3)).argsort(-1)
            shuffled = layer.in_order(order)
            wanted = _scores(policy, layer).gather(-1, order)
            _assert_close(_scores(policy, shuffled), shuffled, wanted, f"{what}: with slots in another order")

    def test_the_same_layer_gets_the_same_scores(self, policy: Policy) -> None:
        """To the bit: nothing is drawn by lot or kept between calls but by `remember`."""
        for what, layer in layers().items():
            live = layer.slots.live
            assert torch.equal(_scores(policy, layer)[live], _scores(policy, layer)[live]), what

    def test_what_it_is_shown_it_leaves_as_it_is(self, policy: Policy) -> None:
        """Keys and values may be the cache itself."""
        for what, layer in layers().items():
            before = [tensor.clone() for tensor in _tensors(layer)]
            _scores(policy, layer)
            for old, new in zip(before, _tensors(layer), strict=True):
                assert torch.equal(old.nan_to_num(1e9), new.nan_to_num(1e9)), f"{what}: the policy writes to its view"

    def test_every_signal_that_costs_something_is_read(self, policy: Policy) -> None:
        """An engine gathers what is declared; reading what is not is an error in any of these tests."""
        unread = set(COSTLY & policy.needs)
        for layer in layers().values():
            asked = _Asked(policy.needs)
            policy.score(layer.view(policy, needs=asked))
            unread -= asked.read
        assert not unread, f"it needs {', '.join(signal.name for signal in unread)} and never reads it"

    def test_a_cache_in_bf16_is_scored_in_fp32(self, policy: Policy) -> None:
        """Scores in bf16 have so many ties that the order of positions decides."""
        for what, layer in layers().items():
            rounded = layer.stored_as(torch.bfloat16)
            wanted = _scores(policy, rounded.stored_as(torch.float32))
            _assert_close(_scores(policy, rounded), layer, wanted, f"{what}: in bf16; use .float() before computing")

    def test_as_many_slots_are_kept_as_were_asked_for(self, policy: Policy) -> None:
        """And the sinks and the window among them."""
        for what, layer in layers().items():
            slots, scores = layer.slots, _scores(policy, layer)
            for count in (1, 17, 60, 1000):
                kept = keep_mask(scores, slots, count, slots.protected(sinks=2, window=5))
                protected = slots.protected(sinks=2, window=5)
                wanted = slots.live.sum(-1).clamp(max=count).maximum(protected.sum(-1))
                assert torch.equal(kept.sum(-1), wanted), f"{what}: {kept.sum(-1)} kept of {count}"
                assert not (protected & ~kept).any(), what
                assert not (kept & ~slots.live).any(), what

    def test_layers_that_are_shown_as_one_get_the_scores_of_each(self, policy: Policy) -> None:
        """If it says that it is `lanewise`: scores hang on their KV head, or on its layer by `layer_mean`."""
        if not is_lanewise(policy):
            return
        each = [compacted_layer(kv_heads=2, group=3, length=80, seed=seed) for seed in range(3)]
        together = stacked(each)
        wanted = torch.cat([_scores(policy, layer) for layer in each])
        _assert_close(_scores(policy, together), together, wanted, "three layers as one")

    def test_a_later_token_is_scored_higher(self, policy: Policy) -> None:
        """If it says that it goes `by_recency`: an engine may keep the last tokens without asking it."""
        if not is_by_recency(policy):
            return
        for what, layer in layers().items():
            ordered = layer.in_order(layer.slots.order)
            scores = torch.where(ordered.slots.live, _scores(policy, ordered), torch.inf)  # dead ones come last
            is_higher = (scores[:, 1:] > scores[:, :-1]) | scores[:, 1:].isinf()
            assert is_higher.all(), f"{what}: not by recency: of equal scores the earlier token stays"

    def test_what_it_remembers_is_a_number_for_each_slot(self, policy: Policy) -> None:
        """At a later trigger a layer is shown with what was remembered at the one before."""
        for what, layer in layers().items():
            states: dict[str, Tensor] = {}
            score_layer(type(policy).__name__, policy, layer.view(policy, states=states))
            assert set(states) <= set(state_names(policy)), what
            for name, state in states.items():
                assert state[layer.slots.live].isfinite().all(), (
                    f"{what}: the state {name!r} of a live slot is no number"
                )
            later = replace(layer, since=layer.slots.length)
            scores = score_layer(type(policy).__name__, policy, later.view(policy, states=states))
            check_scores(type(policy).__name__, scores, layer.slots.live)


def check_policy(policy: Policy) -> None:
    """Run every test of `PolicyConformance`.

    Raises:
        AssertionError: the policy does not meet a claim; the message says which, and on what layer.
        PolicyFailed: it broke its contract: a wrong shape, NaN, a signal that it does not declare.
    """
    suite = PolicyConformance()
    for name in vars(PolicyConformance):  # in the order of the class: what is most basic first
        if name.startswith("test_"):
            getattr(suite, name)(policy)


def _scores(policy: Policy, layer: Layer) -> Tensor:
    return score_layer(type(policy).__name__, policy, layer.view(policy))


def _tensors(layer: Layer) -> Iterator[Tensor]:
    """Everything that a policy could write to."""
    for part in (layer.slots, layer.signals, layer.signals.rotary):
        assert is_dataclass(part)
        for each in fields(part):
            if isinstance(value := getattr(part, each.name), Tensor):
                yield value


def _assert_close(found: Tensor, layer: Layer, wanted: Tensor, what: str) -> None:
    """Equal on live slots, up to rounding on the scale of the layer's scores."""
    live = layer.slots.live
    found, wanted = found[live], wanted[live]
    finite = wanted[wanted.isfinite()]
    scale = float(finite.abs().max()) if len(finite) else 1.0
    is_close = (found == wanted) | ((found - wanted).abs() <= 1e-4 * scale)
    assert is_close.all(), f"{what}: {int((~is_close).sum())} of {len(found)} scores differ"


class _Asked:
    """What may be read, noting what is."""

    def __init__(self, needs: frozenset[Signal]) -> None:
        self._needs = needs
        self.read: set[Signal] = set()

    def __contains__(self, signal: object) -> bool:
        if isinstance(signal, Signal):
            self.read.add(signal)
        return signal in self._needs

    def __iter__(self) -> Iterator[Signal]:
        return iter(self._needs)

    def __len__(self) -> int:
        return len(self._needs)

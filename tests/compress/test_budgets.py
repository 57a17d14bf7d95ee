"""How much may stay, and how it is shared."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvikk.compress import Budget, LayerSlots, keep_mask
from kvikk.compress.allocators import Allocator, Pooled, Pyramid, Uniform
from kvikk.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "length", "slots"),
    [
        ("25%", 1000, 250), (0.25, 1000, 250), ("0.25", 1000, 250), ("12.5%", 1001, 125), (0.7, 10, 7),
        ("0.29", 100, 29), ("100%", 77, 77), (1.0, 77, 77), ("1%", 10, 1), ("1.0", 77, 77), ("1", 77, 1),
        (0.001, 5000, 5), ("1e-3", 5000, 5), ("1E-3", 5000, 5), ("5e-1", 10, 5), ("25e-1%", 1000, 25),
        (2048, 5000, 2048), ("2048", 5000, 2048), (2048.0, 5000, 2048), ("2e3", 5000, 2000), (2048, 100, 100),
        ("2e+3", 5000, 2000),
        ("1MiB", 5000, 1024), ("500KB", 5000, 488), ("1 mib", 100, 100), ("10b", 10, 1),
    ],
)  # fmt: skip
def test_a_budget_is_a_share_tokens_or_bytes_rounded_down(written: object, length: int, slots: int) -> None:
    assert Budget.parse(written).slots(length, token_bytes=1024) == slots


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("lots", "write a share"), ("", "write a share"), ("-5", "write a share"), (-5, "write a share"),
        (None, "write a share"), (True, "write a share"), ("5 apples", "write a share"), ([], "write a share"),
        (0, "above 0"), ("0%", "above 0"), (0.0, "above 0"), (-0.5, "above 0"), (float("nan"), "above 0"),
        ("101%", "at most 100%"), (1.5, "whole number"), ("1.5", "whole number"), (float("inf"), "at most"),
        (2**40, "at most"), ("1e999", "at most"), ("1e999GiB", "at most"), (10**400, "at most"),
        ("٢٥%", "write a share"), ("५%", "write a share"), ("1e", "write a share"),
    ],
)  # fmt: skip
def test_what_is_no_budget_is_refused_with_the_way_out(written: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Budget.parse(written)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("100.0001%", "100.0001%"), (1.000001, "1.000001 tokens"), ("1.5", "1.5 tokens"), ("101%", "101%"),
        (2**31 + 1, "2147483649 tokens"), ("0B", "0 bytes"), ("2048TiB", "2251799813685248"),
    ],
)  # fmt: skip
def test_what_is_refused_is_shown_as_it_was_written_and_never_as_the_limit(written: object, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"^{shown}") as caught:
        Budget.parse(written)
    assert " no budget: " in str(caught.value)


def test_only_a_whole_share_keeps_everything() -> None:
    assert Budget.parse("100%").is_everything
    assert not Budget.parse("99.9%").is_everything
    assert not Budget.parse(2**31).is_everything


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_mean_over_layers_is_the_budget_exactly(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 40_000))
    budget = data.draw(st.integers(1, length))
    layers, protected = data.draw(st.integers(1, 80)), data.draw(st.integers(0, min(length, 4000)))
    beta = data.draw(st.floats(1, 1000))
    for allocator in (Uniform(), Pyramid(beta=beta), Pooled()):
        slots = allocator.over_layers(budget, layers=layers, length=length, protected=protected)
        assert len(slots) == layers
        assert sum(slots) == layers * budget
        assert slots == sorted(slots, reverse=True), "no layer gets more than one below it"
        assert max(slots) <= length
        assert min(slots) >= min(budget, protected), "what is protected has room in every layer"


def test_the_pyramid_falls_from_twice_the_average_to_a_twentieth() -> None:
    slots = Pyramid().over_layers(1036, layers=5, length=100_000, protected=36)
    assert slots == [36 + spare for spare in (1950, 1475, 1000, 525, 50)]


def test_a_pyramid_is_flatter_where_its_first_layer_would_get_more_than_there_is() -> None:
    slots = Pyramid().over_layers(500, layers=3, length=600, protected=0)
    assert slots == [600, 500, 400]


def layer(scores: Tensor, live: Tensor | None = None) -> LayerSlots:
    heads, length = scores.shape
    live = torch.ones_like(scores, dtype=torch.bool) if live is None else live
    return LayerSlots(positions=torch.arange(length).repeat(heads, 1), live=live, length=length)


def counts(allocator: Allocator, budget: int, scores: Tensor, *, sinks: int = 0, window: int = 0) -> list[int]:
    slots = layer(scores)
    protected = slots.protected(sinks=sinks, window=window)
    return allocator.over_heads([budget], scores, slots, protected).tolist()


def test_pooled_heads_keep_the_best_of_the_layer() -> None:
    strong, weak = torch.arange(10.0) + 100, torch.arange(10.0)
    assert counts(Pooled(safeguard=0), 5, torch.stack((strong, weak))) == [10, 0]
    assert counts(Uniform(), 5, torch.stack((strong, weak))) == [5, 5]


def test_the_safeguard_is_each_heads_own_beside_what_is_protected() -> None:
    strong, weak = torch.arange(100.0) + 1000, torch.arange(100.0)
    assert counts(Pooled(safeguard=0.5), 20, torch.stack((strong, weak))) == [30, 10]
    assert counts(Pooled(safeguard=0.5), 20, torch.stack((strong, weak)), sinks=4, window=6) == [25, 15]
    assert counts(Pooled(safeguard=1), 20, torch.stack((strong, weak))) == [20, 20]


def test_a_small_safeguard_is_one_slot() -> None:
    strong, weak = torch.arange(100.0) + 1000, torch.arange(100.0)
    assert counts(Pooled(safeguard=0.001), 20, torch.stack((strong, weak))) == [39, 1]


def test_pooled_ties_go_to_the_lower_position_then_to_the_lower_head() -> None:
    assert counts(Pooled(safeguard=0), 2, torch.zeros((3, 4))) == [2, 2, 2]
    assert counts(Pooled(safeguard=0), 1, torch.zeros((2, 5))) == [1, 1]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_layer_keeps_its_budget_in_all_however_heads_share_it(data: st.DataObject) -> None:
    heads, length = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    scores = torch.randint(0, 6, (heads, length), generator=generator).float()
    live = torch.rand((heads, length), generator=generator) < data.draw(st.floats(0.2, 1))
    sinks, window = (data.draw(st.integers(0, length)) for _ in range(2))
    budget = data.draw(st.integers(1, length))
    live |= layer(scores).protected(sinks=sinks, window=window)  # these are never dropped
    slots = layer(scores, live)
    protected = slots.protected(sinks=sinks, window=window)
    allocator = Pooled(safeguard=data.draw(st.floats(0, 1)))
    numbers = allocator.over_heads([budget], scores, slots, protected)
    kept = keep_mask(scores, slots, numbers, slots.protected(sinks=sinks, window=window))
    wanted = min(heads * max(budget, int(protected[0].sum())), int(live.sum()))
    assert int(kept.sum()) == wanted


def test_options_out_of_their_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"safeguard is 1\.5: it must lie between 0 and 1"):
        Pooled(safeguard=1.5)
    with pytest.raises(ConfigError, match=r"beta is 0\.5: it must be at least 1"):
        Pyramid(beta=0.5)

"""From scores and numbers to what stays."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvikk.compress import LayerSlots, keep_mask


def lane(*positions: int, length: int | None = None) -> LayerSlots:
    """One lane that holds these positions; -1 for a dead slot."""
    there = torch.tensor([positions])
    return LayerSlots(positions=there, live=there >= 0, length=length or max(positions) + 1)


def kept_positions(scores: list[float], slots: LayerSlots, count: int, *, sinks: int = 0, window: int = 0) -> list[int]:
    mask = keep_mask(torch.tensor([scores]), slots, count, slots.protected(sinks=sinks, window=window))
    return sorted(slots.positions[mask].tolist())


def test_the_best_stay() -> None:
    assert kept_positions([0.1, 0.9, 0.5, 0.7], lane(0, 1, 2, 3), 2) == [1, 3]


def test_of_equal_scores_the_lower_position_stays_wherever_it_lies() -> None:
    assert kept_positions([1.0, 1.0, 1.0, 1.0], lane(7, 2, 5, 3), 2) == [2, 3]


def test_scores_below_zero_zero_and_tiny_ones_are_told_apart() -> None:
    scores = [-1e-45, 1e-45, -3.0, 3.4e38, -3.4e38, 2.0]
    best = [3, 5, 1, 0, 2, 4]
    for count in range(1, 7):
        assert kept_positions(scores, lane(0, 1, 2, 3, 4, 5), count) == sorted(best[:count])


def test_zero_and_minus_zero_are_equal() -> None:
    assert kept_positions([-0.0, 0.0, -0.0], lane(0, 1, 2), 1) == [0]
    assert kept_positions([0.0, -0.0, 0.0], lane(2, 0, 1), 2) == [0, 1]


def test_sinks_and_window_stay_whatever_they_are_scored() -> None:
    scores = [-torch.inf, 5.0, 6.0, 7.0, -torch.inf]
    assert kept_positions(scores, lane(0, 1, 2, 3, 4), 3, sinks=1, window=1) == [0, 3, 4]


def test_what_is_protected_stays_even_where_it_is_more_than_the_number() -> None:
    assert kept_positions([9.0, 9.0, 9.0, 0.0, 0.0], lane(0, 1, 2, 3, 4), 1, window=2) == [3, 4]


def test_protected_tokens_count_in_the_number() -> None:
    assert len(kept_positions([0.0] * 8, lane(*range(8)), 5, sinks=2, window=2)) == 5


def test_a_dead_slot_never_stays_and_its_score_does_not_matter() -> None:
    for dead in (torch.nan, torch.inf, -torch.inf, 1e30):
        assert kept_positions([dead, 1.0, 2.0, dead], lane(-1, 4, 9, -1), 3) == [4, 9]


def test_the_first_positions_of_a_dead_slot_protect_nothing() -> None:
    slots = LayerSlots(positions=torch.tensor([[0, 1, 2]]), live=torch.tensor([[False, True, True]]), length=3)
    assert kept_positions([1.0, 1.0, 2.0], slots, 1, sinks=1) == [2]


def test_minus_infinity_goes_first_but_stays_where_there_is_room() -> None:
    scores = [-torch.inf, -1e38, -torch.inf]
    assert kept_positions(scores, lane(0, 1, 2), 1) == [1]
    assert kept_positions(scores, lane(0, 1, 2), 2) == [0, 1]


def test_heads_may_keep_different_numbers() -> None:
    slots = LayerSlots(positions=torch.arange(6).repeat(3, 1), live=torch.ones((3, 6), dtype=torch.bool), length=6)
    mask = keep_mask(torch.rand((3, 6)), slots, torch.tensor([1, 4, 99]), slots.protected(sinks=0, window=0))
    assert mask.sum(-1).tolist() == [1, 4, 6]


def reference(scores: Tensor, slots: LayerSlots, count: int, sinks: int, window: int) -> list[set[int]]:
    """Slot by slot, in plain Python."""
    kept = []
    for head, row in enumerate(slots.positions.tolist()):
        live = [slot for slot in range(len(row)) if slots.live[head, slot]]
        first = [slot for slot in live if row[slot] < sinks or row[slot] >= slots.length - window]
        rest = sorted(set(live) - set(first), key=lambda slot: (-float(scores[head, slot]), row[slot]))
        kept.append({*first, *rest[: max(0, count - len(first))]})
    return kept


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_is_what_a_slot_by_slot_computation_keeps(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 24))
    heads, columns = data.draw(st.integers(1, 3)), length + data.draw(st.integers(0, 4))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    positions = torch.stack([torch.randperm(columns, generator=generator) for _ in range(heads)])
    live = (positions < length) & (torch.rand(positions.shape, generator=generator) < data.draw(st.floats(0, 1)))
    slots = LayerSlots(positions=positions, live=live, length=length)
    scores = torch.randint(0, data.draw(st.integers(1, 8)), positions.shape, generator=generator).float()
    count, sinks, window = (data.draw(st.integers(0, length + 2)) for _ in range(3))
    mask = keep_mask(scores, slots, count, slots.protected(sinks=sinks, window=window))
    found = [set(row.nonzero().flatten().tolist()) for row in mask]
    assert found == reference(scores, slots, count, sinks, window)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 30), st.floats(0, 1))
def test_slots_that_lie_in_order_need_no_sorting_to_be_found_in_the_order_of_the_text(
    seed: int, columns: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    live = torch.rand((3, columns), generator=generator) < share
    positions = torch.where(live, torch.arange(columns) * 2, torch.randint(0, 99, live.shape, generator=generator))
    sorted_, known = (
        LayerSlots(positions=positions, live=live, length=2 * columns, in_order=in_order).order
        for in_order in (False, True)
    )
    assert torch.equal(sorted_, known)


@pytest.mark.parametrize("kind", ["mean", "max"])
def test_slots_that_lie_packed_in_order_are_pooled_where_they_lie(kind: Literal["mean", "max"]) -> None:
    live = torch.arange(20) < torch.tensor([[20], [13], [0]])
    values = torch.rand((3, 20), generator=torch.Generator().manual_seed(1))
    sorted_, known = (
        LayerSlots(positions=torch.arange(20).repeat(3, 1), live=live, length=20, is_packed=is_packed)
        for is_packed in (False, True)
    )
    assert torch.equal(sorted_.order, known.order)
    assert torch.equal(sorted_.pool(values, 5, kind)[live], known.pool(values, 5, kind)[live])

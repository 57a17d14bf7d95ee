"""What a policy is shown, and the words that it may use."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch.nn import functional as F

from kvikk.compress import LayerSlots, LayerView, Rotary, Signal, Signals, accumulated_attention, attending
from kvikk.errors import PolicyFailed
from kvikk.testing.layers import HEAD_DIM, Layer, compacted_layer, fresh_layer


def view_of(layer: Layer, needs: Iterable[Signal] = Signal, remembers: tuple[str, ...] = ()) -> LayerView:
    return LayerView(
        layer=0, layers=1, slots=layer.slots, budget=10, scale=0.25, signals=layer.signals, needs=frozenset(needs),
        remembers=remembers,
    )  # fmt: skip


@pytest.mark.parametrize("signal", list(Signal))
def test_a_signal_that_was_not_declared_cannot_be_read(signal: Signal) -> None:
    view = view_of(fresh_layer(kv_heads=2, group=2, length=20), set(Signal) - {signal})
    name = {Signal.ATTENTION_MASS: "attention_mass"}.get(signal, str(signal))
    with pytest.raises(
        PolicyFailed, match=f"reads the signal {signal.name} and does not declare it: add it to `needs`"
    ):
        getattr(view, name)


def test_attention_needs_keys_and_queries_declared() -> None:
    layer = fresh_layer(kv_heads=2, group=2, length=20)
    with pytest.raises(PolicyFailed, match="QUERIES"):
        view_of(layer, {Signal.KEYS}).attention()
    with pytest.raises(PolicyFailed, match="KEYS"):
        view_of(layer, {Signal.QUERIES}).attention()


def test_a_declared_signal_that_was_not_gathered_is_an_error_and_not_none() -> None:
    slots = fresh_layer(kv_heads=1, group=1, length=3).slots
    view = LayerView(
        layer=0, layers=1, slots=slots, budget=1, scale=1.0, signals=Signals(), needs=frozenset({Signal.VALUES})
    )
    with pytest.raises(PolicyFailed, match="VALUES was declared and not gathered"):
        view.values  # noqa: B018


def test_attention_is_torchs_causal_attention_where_everything_is_held() -> None:
    layer = fresh_layer(kv_heads=2, group=3, length=40, spare=0)
    view = view_of(layer)
    keys, values = (tensor.repeat_interleave(3, dim=0) for tensor in (view.keys, view.values))
    expected = F.scaled_dot_product_attention(view.queries, keys, values, is_causal=True, scale=0.25)
    torch.testing.assert_close(view.attention() @ values, expected, rtol=1e-5, atol=1e-6)


def test_mean_attention_is_that_of_queries_and_of_the_heads_of_a_kv_head() -> None:
    view = view_of(compacted_layer(kv_heads=3, group=2, length=60))
    assert torch.equal(view.mean_attention(), view.group_mean(view.attention().mean(1)))


def test_attention_in_a_compacted_layer_is_over_what_is_held_up_to_the_query() -> None:
    layer = compacted_layer(kv_heads=3, group=2, length=60)
    view = view_of(layer)
    weights = view.attention()
    for head in range(6):
        lane = head // 2
        for query in (0, 30, 59):
            seen = view.live[lane] & (view.positions[lane] <= query)
            logits = view.keys[lane][seen] @ view.queries[head, query] * 0.25
            torch.testing.assert_close(weights[head, query][seen], logits.softmax(-1), rtol=1e-5, atol=1e-6)
            assert (weights[head, query][~seen] == 0).all()


def test_a_query_that_sees_nothing_gives_nothing() -> None:
    slots = LayerSlots(positions=torch.tensor([[5, 6]]), live=torch.tensor([[True, True]]), length=7)
    logits = torch.zeros((1, 2, 2))
    weights = attending.attention_weights(logits, torch.tensor([4, 6]), slots)
    assert weights.tolist() == [[[0.0, 0.0], [0.5, 0.5]]]


def test_attention_mass_is_the_sum_over_queries_and_the_mean_over_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = compacted_layer(kv_heads=3, group=2, length=60)
    view = view_of(layer)
    arguments = (view.queries, view.query_positions, view.keys, view.slots)
    mass = accumulated_attention(*arguments, scale=0.25)
    torch.testing.assert_close(mass, view.group_mean(view.attention().sum(1)), rtol=1e-5, atol=1e-6)
    assert (mass[~view.live] == 0).all()
    torch.testing.assert_close(mass.sum(-1), torch.full((3,), 60.0), rtol=1e-5, atol=1e-3)  # position 0 is always held
    monkeypatch.setattr(attending, "CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(accumulated_attention(*arguments, scale=0.25), mass, rtol=1e-5, atol=1e-6)


def test_neighbours_are_neighbours_in_the_text_not_in_memory() -> None:
    positions = torch.tensor([[9, 2, 4, 7, 0, 1]])
    slots = LayerSlots(positions=positions, live=torch.tensor([[True, True, True, True, False, False]]), length=10)
    values = torch.tensor([[8.0, 1.0, 2.0, 4.0, torch.nan, 1e9]])
    mean = slots.pool(values, 3, "mean")
    assert mean[0, :4].tolist() == pytest.approx([12 / 3, 3 / 3, 7 / 3, 14 / 3])
    assert slots.pool(values, 3, "max")[0, :4].tolist() == [8, 2, 4, 8]
    assert slots.pool(values, 1, "mean")[0, :4].tolist() == [8, 1, 2, 4]


def test_the_layer_mean_is_over_the_lanes_that_hold_a_token() -> None:
    positions = torch.tensor([[3, 0, 1], [0, 3, 7], [9, 9, 0]])
    live = torch.tensor([[True, True, True], [True, True, False], [False, False, True]])
    slots = LayerSlots(positions=positions, live=live, length=4)
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, torch.nan], [torch.nan, torch.nan, 12.0]])
    assert slots.mean_over_lanes(values, len(values))[live].tolist() == [3, 6, 3, 6, 3, 6]


def test_the_live_mean_leaves_dead_slots_out() -> None:
    layer = compacted_layer(kv_heads=3, group=1, length=30)
    view = view_of(layer)
    for lane in range(3):
        torch.testing.assert_close(view.live_mean(view.keys)[lane, 0], view.keys[lane][view.live[lane]].mean(0))


def test_only_what_all_queries_can_see_lies_before_the_window() -> None:
    layer = fresh_layer(kv_heads=1, group=1, length=10, spare=2)
    signals = Signals(queries=torch.zeros((1, 3, HEAD_DIM)), query_positions=torch.tensor([7, 8, 9]))
    view = view_of(Layer(slots=layer.slots, signals=signals, budget=5))
    assert view.before_window().sum() == 7


def test_state_begins_at_zero_and_must_be_declared_and_of_the_right_shape() -> None:
    layer = fresh_layer(kv_heads=2, group=1, length=5)
    view = view_of(layer, remembers=("age",))
    assert (view.state("age") == 0).all()
    view.remember("age", torch.ones((2, 8), dtype=torch.float64))
    assert view.state("age").dtype == torch.float32
    assert (view.state("age") == 1).all()
    with pytest.raises(PolicyFailed, match="state 'aeg' and does not declare it"):
        view.remember("aeg", torch.ones((2, 8)))
    with pytest.raises(PolicyFailed, match="does not declare it"):
        view.state("aeg")
    with pytest.raises(PolicyFailed, match=r"is \(2, 1\), not \[kv_heads, slots\] = \(2, 8\)"):
        view.remember("age", torch.ones((2, 1)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_undone_and_averaged(interleaved: bool) -> None:
    """Against complex numbers; dimensions beyond the rotary ones are left alone."""
    inv_freq = torch.tensor([1.0, 0.3, 0.01])
    rotary = Rotary(inv_freq=inv_freq, interleaved=interleaved)
    vectors, positions = torch.randn((2, 5, 8)), torch.tensor([0, 3, 10, 500, 4000])

    def turned(plain: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        pairs = plain[..., :6].unflatten(-1, (3, 2) if interleaved else (2, 3))
        first, second = pairs.unbind(-1 if interleaved else -2)
        product = torch.complex(first.double(), second.double()) * factor
        rotated = torch.stack((product.real, product.imag), dim=-1 if interleaved else -2).flatten(-2)
        return torch.cat((rotated.float(), plain[..., 6:]), dim=-1)

    angles = positions[:, None].double() * inv_freq.double()
    rotated = turned(vectors, torch.polar(torch.ones_like(angles), angles))
    torch.testing.assert_close(rotary.undo(rotated, positions), vectors, rtol=1e-4, atol=1e-4)
    ahead = torch.arange(100, 164).double()[:, None] * inv_freq.double()
    mean = turned(vectors, torch.polar(torch.ones_like(ahead), ahead).mean(0))
    torch.testing.assert_close(rotary.average(vectors, start=100, count=64), mean, rtol=1e-4, atol=1e-4)

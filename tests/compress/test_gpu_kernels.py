"""What policies ask most of a GPU, and what is kept by their scores, by kernels: against the twins."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvikk.compress import LayerSlots, accumulated_attention, keep_mask
from kvikk.compress.gpu import best, mass, neighbours
from kvikk.compress.select import keep_best


def slots_of(lanes: int, columns: int, share: float, seed: int) -> LayerSlots:
    """Lanes that hold different positions, in any order, between dead slots; positions of those are garbage."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(2 * columns, generator=generator)[:columns] for _ in range(lanes)])
    live = torch.rand((lanes, columns), generator=generator) < share
    return LayerSlots(positions=torch.where(live, positions, -(10**9)), live=live, length=2 * columns)


def on(device: torch.device, slots: LayerSlots) -> LayerSlots:
    return LayerSlots(positions=slots.positions.to(device), live=slots.live.to(device), length=slots.length)


def masses(device: torch.device, queries: Tensor, at: Tensor, keys: Tensor, slots: LayerSlots) -> tuple[Tensor, Tensor]:
    """By the kernel, and by the twin."""
    scale = queries.shape[2] ** -0.5
    clean = torch.where(slots.live[..., None], keys, 0)  # sums of the twin have no NaN in them either
    wanted = accumulated_attention(queries, at, clean, slots, scale=scale)
    there = (each.to(device) for each in (queries, at, keys))
    return mass.accumulated_attention(*there, on(device, slots), scale=scale).cpu(), wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("kv_heads", "group", "window", "columns", "head_dim"),
    [(2, 3, 32, 300, 64), (1, 1, 1, 16, 64), (3, 4, 50, 130, 80), (2, 7, 5, 129, 16)],
)
def test_the_attention_mass_is_the_twins(
    kv_heads: int, group: int, window: int, columns: int, head_dim: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(window)
    slots = slots_of(kv_heads, columns, 0.7, seed=window)
    keys = torch.randn(kv_heads, columns, head_dim, generator=generator).to(dtype)
    keys[~slots.live] = torch.nan
    queries = torch.randn(kv_heads * group, window + 3, head_dim, generator=generator).to(dtype)[:, 3:]
    at = torch.arange(2 * columns - window, 2 * columns)
    found, wanted = masses(kernel_device, queries, at, keys, slots)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.sum(1), slots.live.any(1) * float(window), rtol=1e-4, atol=1e-4)


def test_a_query_gives_nothing_to_what_comes_after_it_and_one_that_sees_nothing_gives_nothing(
    kernel_device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(1)
    slots = LayerSlots(positions=torch.arange(40).repeat(2, 1), live=torch.arange(40).repeat(2, 1) >= 8, length=40)
    queries, keys = torch.randn(4, 20, 16, generator=generator), torch.randn(2, 40, 16, generator=generator)
    found, wanted = masses(kernel_device, queries, torch.arange(20), keys, slots)
    torch.testing.assert_close(found, wanted)
    assert (found[:, 20:] == 0).all()
    torch.testing.assert_close(found.sum(1), torch.full((2,), 12.0)), "eight of them see nothing"


def test_many_slots_are_summed_in_parts(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mass, "SPLIT_SLOTS", 128)
    generator = torch.Generator().manual_seed(2)
    for columns in (700, 128 * mass.MAX_SPLITS + 40):
        slots = slots_of(1, columns, 0.5, seed=3)
        queries = torch.randn(2, 3, 16, generator=generator)
        keys = torch.randn(1, columns, 16, generator=generator) * 3
        found, wanted = masses(kernel_device, queries, torch.full((3,), 2 * columns), keys, slots)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_lane_without_a_live_slot_gets_nothing(kernel_device: torch.device) -> None:
    slots = LayerSlots(positions=torch.zeros(1, 20, dtype=torch.int64), live=torch.zeros(1, 20) > 0, length=20)
    found, _ = masses(kernel_device, torch.ones(1, 2, 16), torch.tensor([18, 19]), torch.ones(1, 20, 16), slots)
    assert (found == 0).all()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_is_what_sorting_keeps(
    seed: int, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few scores, many of them equal, with zeros of both signs and infinities; NaN where nothing lives."""
    monkeypatch.setattr(best, "SLOTS_AT_ONCE", [(64,), (64, 512)][seed % 2])
    generator = torch.Generator().manual_seed(seed)
    columns = [3, 90, 500][seed % 3]
    slots = slots_of(4, columns, [0.3, 0.8, 1.0][seed // 3 % 3], seed)
    kinds = torch.tensor([0.0, -0.0, 1e-45, -1e-45, -torch.inf, 3.4e38, -3.4e38, 0.5, 0.25, -7.0])
    scores = kinds[torch.randint(0, len(kinds), slots.live.shape, generator=generator)]
    if seed > 8:
        scores = torch.randn(slots.live.shape, generator=generator)
    scores[~slots.live] = torch.nan
    protected = slots.protected(sinks=columns // 8, window=columns // 8)
    there = on(kernel_device, slots)
    for counts in (0, 1, columns // 3, 2 * columns, torch.tensor([0, 2, columns // 2, columns])):
        of_device = counts.to(kernel_device) if isinstance(counts, Tensor) else counts
        found = best.keep_mask(scores.to(kernel_device), there, of_device, protected.to(kernel_device))
        assert torch.equal(found.cpu(), keep_mask(scores, slots, counts, protected)), counts
        if isinstance(counts, int):
            of_device = scores.clone()
            of_device[:, ::7] = torch.tensor([torch.nan, torch.inf, -torch.nan])[seed % 3]
            for some in (scores, of_device):
                best_of = {"sinks": columns // 8, "window": columns // 8}
                kept, unscored = best.keep_best(some.to(kernel_device), there, counts, **best_of)
                wanted = keep_best(some, slots, counts, **best_of)
                assert torch.equal(kept.sum(1).cpu(), wanted[0].sum(1)), "as many, whatever is scored NaN"
                assert torch.equal(unscored.cpu(), wanted[1])
            kept, _ = best.keep_best(scores.to(kernel_device), there, counts, **best_of)
            assert torch.equal(kept, found), counts


@pytest.mark.parametrize("kind", ["mean", "max"])
@pytest.mark.parametrize("width", [1, 5, 41])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_neighbours_are_those_that_live_on_either_side_of_dead_slots(
    share: float, width: int, kind: Literal["mean", "max"], kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "SLOTS_AT_ONCE", 64)
    generator = torch.Generator().manual_seed(width)
    live = torch.rand((5, 300), generator=generator) < share
    values = torch.randn(live.shape, generator=generator)
    values[0] = torch.where(torch.arange(300) % 50 == 0, torch.nan, values[0])
    clean = torch.where(live, values, 0)
    slots = LayerSlots(positions=torch.arange(300).expand(5, -1), live=live, length=300, in_order=True)
    values[~live] = torch.nan
    on_device = (each.to(kernel_device) for each in (values, live))
    found = neighbours.pool(*on_device, width, is_mean=kind == "mean").cpu()
    torch.testing.assert_close(found[live], slots.pool(clean, width, kind)[live], equal_nan=True)

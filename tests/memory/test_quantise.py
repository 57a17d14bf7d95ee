"""Quantised KV in the pool: how near it is to what was meant, and that every copy takes its scales along."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvikk.geometry import KVGeometry
from kvikk.memory import KVStore, held_by, plan_compaction
from kvikk.memory.quantise import dequantise, quantise
from kvikk.types import BlockId, Position

CPU = torch.device("cpu")
GEOMETRY = KVGeometry(kv_heads=(2, 1, 3), head_dim=6, page_size=4, dtype=torch.float32, quantised=torch.int8)
LANES = 6


def a_store(blocks: int = 6) -> KVStore:
    """Poisoned, with random tokens in every slot of every layer but those of the null block and of the last one."""
    store = KVStore(GEOMETRY, blocks, CPU)
    store.poison()
    slots = torch.arange(4, (blocks - 1) * 4)
    for layer, heads in enumerate(GEOMETRY.kv_heads):
        store.write(layer, slots, *torch.randn(2, len(slots), heads, 6, generator=torch.Generator().manual_seed(layer)))
    return store


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20))
def test_what_is_read_is_within_half_a_step_of_what_was_written(values: list[float]) -> None:
    row = torch.tensor(values)
    numbers, scale = quantise(row, torch.int8)
    assert numbers.abs().max() <= 127
    error = (dequantise(numbers, scale).double() - row.double()).abs().max().item()
    assert error <= float(scale) * 0.5001 + 1e-44, "a scale of its own, too, is a number of fp32"


def test_halves_go_to_the_even_neighbour_and_the_largest_to_127() -> None:
    numbers, scale = quantise(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0]), torch.int8)
    assert scale == 1.0
    assert numbers.tolist() == [127, 0, 2, 2, 0, -2, -127]


def test_a_row_of_zeros_is_zeros_again() -> None:
    numbers, scale = quantise(torch.zeros(3, 8), torch.int8)
    assert not numbers.any()
    assert torch.equal(dequantise(numbers, scale), torch.zeros(3, 8))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_all_nan_and_its_neighbours_are_not(bad: float) -> None:
    rows = torch.ones(3, 8)
    rows[1, 5] = bad
    numbers, scales = quantise(rows, torch.int8)
    assert not numbers[1].any()
    assert scales.isnan().tolist() == [False, True, False]
    read = dequantise(numbers, scales)
    assert read[1].isnan().all()
    assert torch.equal(read[[0, 2]], torch.ones(2, 8))


def test_the_bytes_of_a_token_hang_on_nothing_but_the_token() -> None:
    x = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 40)[:, None, None]
    together = quantise(x, torch.int8)
    for token in range(40):
        for ours, alone in zip(together, quantise(x[token], torch.int8), strict=True):
            assert torch.equal(ours[token], alone)


@pytest.mark.parametrize(("head_dim", "page"), [(64, 16), (128, 32), (33, 16), (2, 2)])
def test_a_frame_is_its_numbers_and_behind_them_their_scales(head_dim: int, page: int) -> None:
    geometry = KVGeometry(
        kv_heads=(2, 2), head_dim=head_dim, page_size=page, dtype=torch.bfloat16, quantised=torch.int8
    )
    assert geometry.frame_bytes == 2 * page * (head_dim + 4)
    store = KVStore(geometry, 3, CPU)
    assert store.size_bytes == store.words.numel() * 4 == 3 * geometry.block_bytes
    store.words.zero_()
    store.write(1, torch.tensor([2 * page + 1]), torch.full((1, 2, head_dim), 2.0), torch.ones(1, 2, head_dim))
    frame = store.words.view(torch.int8)[geometry.frame(BlockId(2), 1, 0)]
    numbers, scales = frame[: 2 * page * head_dim].view(2, page, head_dim), frame[2 * page * head_dim :]
    assert numbers[:, 1].unique().item() == 127
    assert scales.view(torch.float32).view(2, page)[:, 1].tolist() == pytest.approx([2 / 127, 1 / 127])
    assert numbers.count_nonzero() == 2 * head_dim


def test_a_geometry_whose_scales_would_lie_askew_is_refused() -> None:
    with pytest.raises(ValueError, match="pages of 1 slots of 33 numbers"):
        KVGeometry(kv_heads=(1,), head_dim=33, page_size=1, dtype=torch.float32, quantised=torch.int8)


def test_the_null_block_is_zero_and_poison_is_nan_in_all_others() -> None:
    store = KVStore(GEOMETRY, 3, CPU)
    store.poison()
    read = store.read(torch.arange(3 * LANES))
    assert torch.equal(read[:LANES], torch.zeros(LANES, 2, 4, 6))
    assert read[LANES:].isnan().all()


def test_keys_and_values_are_the_halves_of_what_is_read() -> None:
    plain = KVStore(KVGeometry(kv_heads=(2,), head_dim=4, page_size=4, dtype=torch.float32), 6, CPU)
    plain.frames.normal_(generator=torch.Generator().manual_seed(0))
    for store in (a_store(), plain):
        frames = torch.tensor([[5, 2], [1, 3]])
        read = store.read(frames)
        assert read.shape[:3] == (2, 2, 2)
        assert torch.equal(store.keys(frames), read[:, :, 0])
        assert torch.equal(store.values(frames), read[:, :, 1])


def test_copies_of_blocks_and_of_frames_are_what_was_copied_scales_included() -> None:
    store = a_store()
    store.copy_blocks([(BlockId(2), BlockId(5))])
    ids = torch.arange(LANES)
    assert torch.equal(store.read(5 * LANES + ids), store.read(2 * LANES + ids))
    store.copy_frames(np.array([7, 9]), np.array([32, 31]))
    assert torch.equal(store.read(torch.tensor([32, 31])), store.read(torch.tensor([7, 9])))
    assert store.read(torch.arange(LANES, 6 * LANES)).isfinite().all()


def test_a_token_that_moves_takes_its_scales_along() -> None:
    store = a_store()
    page, device = GEOMETRY.page_size, store.device
    blocks = [BlockId(2), BlockId(4)]
    held = held_by(None, blocks, [True, True], length=2 * page, lanes=LANES, page_size=page, device=device)
    before = store.read(held.table).transpose(2, 3).flatten(1, 2)  # [lanes, slots, 2, head_dim]
    keep = torch.arange(2 * page).repeat(LANES, 1) % 3 == 1
    counts = keep.sum(1).numpy()
    plan = plan_compaction(held, counts, np.array([], dtype=np.int64), stop=Position(2 * page))
    store.pack(held, keep, plan)
    after = store.read(torch.from_numpy(plan.frames)).transpose(2, 3).flatten(1, 2)
    for lane, count in enumerate(counts.tolist()):
        torch.testing.assert_close(after[lane, :count], before[lane][keep[lane]], rtol=0, atol=0, equal_nan=True)


def test_what_was_saved_comes_back_byte_for_byte_in_other_places() -> None:
    store = a_store()
    before = store.words.clone()
    saved = store.save(np.array([8, 13]), [BlockId(4), BlockId(2)])
    store.poison()
    store.restore(saved, np.array([20, 12]), [BlockId(1), BlockId(5)])
    assert torch.equal(store.words[[20, 12]], before[[8, 13]])
    by_block, old = store.words.view(6, -1), before.view(6, -1)
    assert torch.equal(by_block[[1, 5]], old[[4, 2]])

"""int4: keys that are turned, two scales a row, two numbers in a byte, and how near all that is to what was meant."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvikk.errors import ConfigError
from kvikk.geometry import INT4, KVGeometry
from kvikk.memory import KVStore
from kvikk.memory.int4 import LEAST, decode, encode, turn, turn_width, turned_back
from kvikk.types import BlockId

CPU = torch.device("cpu")


def draw(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("head_dim", "width"), [(64, 64), (128, 128), (256, 256), (80, 16), (96, 32), (6, 2)])
def test_a_turn_is_a_hadamard_matrix_in_blocks_of_the_largest_power_of_two(head_dim: int, width: int) -> None:
    assert turn_width(head_dim) == width
    matrix = turn(torch.eye(head_dim))
    row, column = torch.arange(head_dim)[:, None], torch.arange(head_dim)
    parity = sum(((row & column) >> bit) & 1 for bit in range(width.bit_length() - 1))
    expected = torch.where(row // width == column // width, 1.0 - 2.0 * (parity % 2), 0.0)
    assert torch.equal(matrix, expected)
    assert torch.equal(turned_back(matrix), torch.eye(head_dim))


def test_products_of_turned_rows_are_those_of_rows() -> None:
    q, k = draw(5, 96), draw(7, 96, seed=1)
    torch.testing.assert_close(turn(q) @ turn(k).T / 32, q @ k.T, rtol=0, atol=1e-5)


def test_a_turn_spreads_a_large_channel_so_that_the_others_are_still_told_apart() -> None:
    keys = draw(100, 64)
    keys[:, 5] += 40.0
    plain, turned = decode(*encode(keys)), turned_back(decode(*encode(turn(keys))))
    others = torch.arange(64) != 5
    error = [(read - keys)[:, others].square().mean().item() for read in (plain, turned)]
    assert error[1] < error[0] / 4


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=2, max_size=20).filter(lambda row: not len(row) % 2)
)
def test_what_is_read_is_within_a_part_more_than_half_a_step_of_what_was_written(values: list[float]) -> None:
    row = torch.tensor(values)
    numbers, scales = encode(row)
    error = (decode(numbers, scales) - row).abs().view(2, -1).double()
    steps = 8 * scales.double()[:, None]
    assert bool((error <= steps * (0.5 + 1 / 16) * 1.01 + 16 * LEAST).all())


def test_the_first_half_of_a_row_lies_in_the_low_halves_of_its_bytes() -> None:
    numbers, scales = encode(torch.tensor([0.0, 15.0, 3.0, 0.0, -30.0, -2.0]))
    assert [(byte & 15, byte >> 4) for byte in numbers.tolist()] == [(0, 15), (15, 0), (3, 14)]
    zeros = scales.view(torch.int32) & 127
    assert zeros.tolist() == [0, 120], "in eighths of a step"
    assert scales.tolist() == pytest.approx([1 / 8, 2 / 8], rel=1e-4)


def test_groups_have_scales_of_their_own() -> None:
    row = torch.cat((draw(32) * 1000, draw(32)))
    assert (decode(*encode(row)) - row)[32:].abs().max() < 0.3


def test_a_row_of_zeros_is_zeros_again_and_so_are_numbers_that_are_next_to_nothing() -> None:
    for row in (torch.zeros(8), torch.full((8,), 1e-40), torch.full((8,), -LEAST)):
        numbers, scales = encode(row)
        assert not numbers.any()
        assert scales.view(torch.int32).tolist() == [0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [1, 6])
def test_a_row_that_is_not_finite_is_all_nan_and_its_neighbours_are_not(bad: float, where: int) -> None:
    rows = torch.ones(3, 8)
    rows[1, where] = bad
    numbers, scales = encode(rows)
    assert not numbers[1].any()
    read = decode(numbers, scales)
    assert read[1].isnan().all()
    torch.testing.assert_close(read[[0, 2]], torch.ones(2, 8))


def test_the_bytes_of_a_token_hang_on_nothing_but_the_token() -> None:
    x = draw(40, 3, 64) * torch.logspace(-3, 3, 40)[:, None, None]
    together = encode(turn(x))
    for token in range(40):
        for ours, alone in zip(together, encode(turn(x[token])), strict=True):
            assert torch.equal(ours[token], alone)


@pytest.mark.parametrize(("head_dim", "page"), [(64, 16), (128, 32), (6, 16)])
def test_a_frame_is_its_bytes_and_behind_them_two_scales_a_row(head_dim: int, page: int) -> None:
    geometry = KVGeometry(kv_heads=(2, 2), head_dim=head_dim, page_size=page, dtype=torch.bfloat16, quantised=INT4)
    assert geometry.format == "int4"
    assert geometry.frame_bytes == 2 * page * (head_dim // 2 + 8)
    store = KVStore(geometry, 3, CPU)
    store.poison()
    k, v = draw(2, 1, 2, head_dim)
    store.write(1, torch.tensor([2 * page + 1]), k, v)
    frame = torch.tensor(geometry.frame(BlockId(2), 1, 0))
    read = store.read(frame)
    torch.testing.assert_close(read[:, 1], torch.stack((k[0, 0], v[0, 0])), rtol=0, atol=0.5)
    assert read[:, 0].isnan().all()
    raw = store.words[frame].view(torch.uint8)
    assert torch.equal(
        raw[page * head_dim // 2 :][: page * head_dim // 2][head_dim // 2 :][: head_dim // 2], encode(v)[0][0, 0]
    )
    assert torch.equal(raw[page * head_dim :].view(torch.float32).view(2, page, 2)[0, 1], encode(turn(k))[1][0, 0])


def test_heads_of_an_odd_width_are_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match="heads of 33 are odd: choose int8"):
        KVGeometry(kv_heads=(1,), head_dim=33, page_size=16, dtype=torch.float32, quantised=INT4)

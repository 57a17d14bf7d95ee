"""The model of a device on which the whole KV of some rows is on the host."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvikk.engine.drafting import HostCosts, Room, best_lengths, best_mix, tokens_per_s

ROW_S = 42e-6
"""To read the whole KV of a row of 7,680 tokens of SmolLM2 on an H200; the link takes 3.2 ms for it."""


def costs(share: float = 0.25, *, load_row_s: float = 3.2e-3) -> HostCosts:
    return HostCosts(
        draft_step_s=1.3e-3,
        draft_row_s=share * ROW_S,
        verify_step_s=1.4e-3,
        verify_row_s=ROW_S,
        verify_token_s=1e-6,
        plain_step_s=1.3e-3,
        plain_row_s=ROW_S,
        load_row_s=load_row_s,
    )


def test_with_all_rows_whole_it_is_what_their_best_rounds_give() -> None:
    best = best_lengths([0.95] * 64, [32] * 64, costs().of_round(64))
    assert tokens_per_s(64, 0, 0.95, 32, 32, costs()) == best.tokens_per_s


def test_the_link_bounds_what_parted_rows_commit_however_many_there_are() -> None:
    bound = (1 / (1 - 0.95)) / costs().load_row_s
    few, many = (tokens_per_s(0, parted, 0.95, 32, 32, costs()) for parted in (20, 200))
    assert few < bound
    assert many < bound


def test_a_faster_link_and_better_drafts_are_never_worse() -> None:
    for whole in (0, 3, 20):
        rates = [tokens_per_s(whole, 10, 0.95, 32, 32, costs(load_row_s=s)) for s in (6e-3, 3e-3, 1e-3, 0.0)]
        assert rates == sorted(rates)
        rates = [tokens_per_s(whole, 10, acceptance, 32, 32, costs()) for acceptance in (0.0, 0.5, 0.9, 0.99, 1.0)]
        assert rates == sorted(rates)


@pytest.mark.parametrize(("room", "acceptance", "gain"), [(10, 0.95, 1.10), (10, 0.98, 1.46), (26, 0.95, 1.12)])
def test_some_whole_rows_beside_parted_ones_beat_either_alone(room: int, acceptance: float, gain: float) -> None:
    """The same memory holds `room` plain rows; two of them are needed to bring parted rows back."""
    plain = room / (1.3e-3 + room * ROW_S)
    mixed = {
        whole: tokens_per_s(whole, int((room - 2 - 1.25 * whole) / 0.25), acceptance, 32, 32, costs())
        for whole in range(int((room - 2) / 1.25))
    }
    best = max(mixed, key=lambda whole: mixed[whole])
    all_whole = tokens_per_s(int(room / 1.25), 0, acceptance, 32, 32, costs())
    assert 0 < best < max(mixed)
    assert mixed[best] / plain == pytest.approx(gain, abs=0.03)
    assert mixed[best] > 1.02 * max(mixed[0], all_whole)


ROOM = Room(rows=64, blocks=5825, row_blocks=495, cache_blocks=121, tail_blocks=29, host_rows=64)
"""Of 2 GiB for SmolLM2, and of 64 rows with some 8,000 tokens."""


def test_rows_part_where_the_link_is_quick_and_drafts_are_long_and_not_where_either_is_not() -> None:
    mix = best_mix(ROOM, 0.99, 32, 128, costs())
    assert mix.parted > 2 * ROOM.plain
    assert mix.length > 32
    assert mix.gain > 1.3
    assert best_mix(ROOM, 0.9, 32, 128, costs()).gain < 1
    assert best_mix(ROOM, 0.99, 32, 128, costs(load_row_s=50e-3)).parted == 0
    assert best_mix(ROOM, 0.99, 32, 128, costs(load_row_s=math.inf)).parted == 0
    assert best_mix(replace(ROOM, host_rows=0), 0.99, 32, 128, costs()).parted == 0


@pytest.mark.parametrize("acceptance", [0.0, 0.9, 0.96, 0.99])
@pytest.mark.parametrize("blocks", [400, 5825, 14562, 200_000])
def test_what_is_promised_fits_into_memory_and_is_what_so_many_rows_commit(acceptance: float, blocks: int) -> None:
    room = replace(ROOM, blocks=blocks)
    mix = best_mix(room, acceptance, 32, 128, costs())
    staging = room.loads * room.row_blocks if mix.parted else 0
    rows = mix.whole * (room.row_blocks + room.cache_blocks) + mix.parted * (room.cache_blocks + room.tail_blocks)
    assert rows + staging <= blocks
    assert mix.whole + mix.parted <= room.rows
    if mix.parted == 0:
        assert mix.tokens_per_s == pytest.approx(tokens_per_s(mix.whole, 0, acceptance, 32, 128, costs()))
    assert mix.plain_tokens_per_s == pytest.approx(room.plain / costs().of_round(room.plain).plain_s)


def test_where_all_rows_have_room_for_small_caches_it_is_what_their_best_rounds_give() -> None:
    mix = best_mix(replace(ROOM, blocks=64 * 616), 0.95, 32, 128, costs())
    assert (mix.whole, mix.parted) == (64, 0)
    assert mix.tokens_per_s == tokens_per_s(64, 0, 0.95, 32, 128, costs())

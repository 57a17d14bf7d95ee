"""Traces: the distributions they promise, the same for a seed everywhere, and the published serving traces."""

from __future__ import annotations

import pytest

from kvikk.bench.traces import (
    SERVING_TRACES,
    TRACES,
    Draw,
    ServingTrace,
    chosen_traces,
    parse_lengths,
    ragged_lengths,
)
from kvikk.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("homogeneous", 32_768, 32_768),
        ("uniform", 4_096, 32_768),
        ("bimodal", 2_048, 65_536),
        ("zipf", 2_048 + 11_585 - 512, 2_048 + 65_536 + 512),
        ("one_long", 2_048, 65_536),
        ("short", 128, 2_048),
    ],
)
def test_lengths_keep_to_the_range_of_their_trace_and_use_it(name: str, low: int, high: int) -> None:
    lengths = [length for seed in range(20) for length in TRACES[name].lengths(64, seed)]
    assert low <= min(lengths) <= max(lengths) <= high
    assert max(lengths) - min(lengths) >= 0.9 * (high - low)


def test_every_fourth_row_of_bimodal_is_long_and_one_long_has_one() -> None:
    bimodal = TRACES["bimodal"].lengths(64, 3)
    assert all(length >= 24_576 for length in bimodal[::4])
    assert all(length <= 12_288 for index, length in enumerate(bimodal) if index % 4)
    assert sorted(TRACES["one_long"].lengths(48, 3))[-2:] == [max(TRACES["one_long"].lengths(48, 3)[1:]), 65_536]


def test_a_seed_gives_the_same_lengths_another_seed_others_and_fewer_rows_the_first_of_more() -> None:
    trace = TRACES["uniform"]
    assert trace.lengths(32, 5) == trace.lengths(32, 5) != trace.lengths(32, 6)
    assert trace.lengths(8, 5) == trace.lengths(32, 5)[:8]
    assert trace.lengths(4, 0) == [18_829, 32_589, 9_212, 24_257]  # torch's CPU generator, on every machine


def test_traces_with_a_number_of_rows_of_their_own_keep_it() -> None:
    assert (TRACES["single_8k"].sizes([4, 8]), TRACES["eight_short"].sizes([4])) == ([1], [8])
    assert TRACES["uniform"].sizes([4, 8]) == [4, 8]
    assert TRACES["single_8k"].lengths(1, 0) == [8_192]


def test_ragged_heads_keep_a_share_that_falls_off_and_never_nothing() -> None:
    kept = ragged_lengths(10_000, 8)
    assert kept[:3] == [9_000, 5_400, 3_240]
    assert ragged_lengths(1, 8) == [1] * 8


def test_numbers_are_drawn_with_both_ends_included() -> None:
    draw = Draw(0)
    assert {draw(2, 4) for _ in range(100)} == {2, 3, 4}


@pytest.mark.parametrize(
    ("name", "mebibytes"),
    [
        ("persistentkv_bucketed", 32.1),
        ("persistentkv_bimodal", 550.5),
        ("persistentkv_uniform", 671.0),
        ("persistentkv_zipf", 672.2),
    ],
)
def test_serving_traces_are_the_published_ones(name: str, mebibytes: float) -> None:
    """The logs of the first published seed tell the KV that a step reads: 8 KV heads, 128 wide, two bytes a number."""
    batches = SERVING_TRACES[name].batches(0)
    tokens = sum(row.length for batch in batches for row in batch) / len(batches)
    assert tokens * 8 * 128 * 2 * 2 / 2**20 == pytest.approx(mebibytes, abs=0.05)


def test_a_request_grows_by_a_token_a_step_until_its_end_and_waits_for_a_place() -> None:
    trace = ServingTrace(prompt=lambda index, draw: 20, decode=lambda index: (4, 4), rows=2, requests=6, steps=6)
    lengths = [{row.request: row.length for row in batch} for batch in trace.batches(0)]
    assert lengths[0] == {0: 32, 1: 32}  # rounded up to whole pages
    assert lengths[1] == {0: 33, 1: 33}  # 2 and 3 have come, and have no place
    assert lengths[4] == {2: 35, 3: 35}  # what they would have decoded meanwhile is lost
    assert lengths[5] == {4: 35, 5: 35}


def test_names_of_traces_are_checked() -> None:
    assert chosen_traces("all") == [*TRACES, *SERVING_TRACES]
    assert chosen_traces("zipf, persistentkv_zipf") == ["zipf", "persistentkv_zipf"]
    with pytest.raises(ConfigError, match="'zip' is not known: choose from homogeneous, uniform"):
        chosen_traces("zip")


def test_lengths_can_be_written_one_by_one_or_as_so_many_of_one() -> None:
    assert parse_lengths("65536, 2048x3,7") == [65_536, 2_048, 2_048, 2_048, 7]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no length"),
        ("2k", "'2k' is no length"),
        ("0", "0 is out of its limits"),
        ("5x0", "names 0 rows"),
        ("5x99999999999", "1,025 rows or more"),
        ("99999999", "99,999,999 is out of its limits"),
    ],
)
def test_lengths_that_cannot_be_measured_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_lengths(text)

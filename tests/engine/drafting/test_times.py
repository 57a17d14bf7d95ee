"""What steps take, estimated from measurements that noise and pauses have been added to."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import astuple

import pytest

from kvikk.engine.drafting import StepKind, StepTimes

Truth = Callable[[int, int], float]


def verify(rows: int, drafted: int) -> float:
    return 1.5e-3 + 42e-6 * rows + 0.7e-6 * drafted


def draft(rows: int, drafted: int) -> float:
    return 1.5e-3 + 10e-6 * rows


def feed(times: StepTimes, kind: StepKind, truth: Truth, shapes: list[tuple[int, int]], factor: float = 1.0) -> None:
    for rows, drafted in shapes:
        times.record(kind, rows=rows, tokens=rows + drafted, seconds=factor * truth(rows, drafted))


def measured(chance: random.Random, *, noise: float = 0.0, pauses: float = 0.0, steps: int = 200) -> StepTimes:
    times = StepTimes()
    for _ in range(steps):
        rows, length = chance.randint(1, 512), chance.randint(0, 12)
        for kind, truth, drafted in (
            (StepKind.DRAFT, draft, 0),
            (StepKind.VERIFY, verify, rows * length),
            (StepKind.PLAIN, verify, 0),
        ):
            seconds = truth(rows, drafted) * (1 + abs(chance.gauss(0, noise)))
            if chance.random() < pauses:
                seconds += chance.choice([0.02, 0.2, 5.0])
            times.record(kind, rows=rows, tokens=rows + drafted, seconds=seconds)
    return times


def assert_right(times: StepTimes, rows: int, within: float) -> None:
    costs = times.costs(rows)
    assert costs is not None
    assert costs.draft_step_s + rows * costs.draft_row_s == pytest.approx(draft(rows, 0), rel=within)
    for drafted in (0, 4 * rows, 8 * rows):
        assert costs.verify_s + drafted * costs.verify_token_s == pytest.approx(verify(rows, drafted), rel=within)
    assert costs.plain_s == pytest.approx(verify(rows, 0), rel=within)


@pytest.mark.parametrize("rows", [16, 64, 256, 512])
def test_the_parts_of_a_step_are_told_apart_once_rows_and_lengths_have_varied(rows: int) -> None:
    assert_right(measured(random.Random(0)), rows, within=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_noise_pauses_and_compilations_hardly_move_the_estimates(seed: int) -> None:
    times = measured(random.Random(seed), noise=0.05, pauses=0.1)
    for rows in (16, 64, 256, 512):
        assert_right(times, rows, within=0.12)


def test_a_first_step_that_compiles_does_not_count() -> None:
    times = StepTimes()
    for kind, truth in ((StepKind.DRAFT, draft), (StepKind.VERIFY, verify)):
        times.record(kind, rows=64, tokens=64, seconds=30.0)
        feed(times, kind, truth, [(64, 0)] * 2)
    costs = times.costs(64)
    assert costs is not None
    assert costs.draft_step_s == pytest.approx(draft(64, 0), rel=0.01)
    assert costs.verify_s == pytest.approx(verify(64, 0), rel=0.01)


def test_where_the_shape_of_steps_never_changed_all_of_a_step_is_fixed() -> None:
    times = StepTimes()
    feed(times, StepKind.DRAFT, draft, [(64, 0)] * 20)
    feed(times, StepKind.VERIFY, verify, [(64, 256)] * 20)
    costs = times.costs(64)
    assert costs is not None
    assert costs.token_s == pytest.approx(0, abs=1e-12)
    assert costs.verify_s == pytest.approx(verify(64, 256))
    assert costs.draft_step_s == pytest.approx(draft(64, 0))


def test_without_a_plain_step_it_is_a_verify_step_with_its_drafts_taken_off() -> None:
    times = StepTimes()
    feed(times, StepKind.DRAFT, draft, [(256, 0)] * 5)
    feed(times, StepKind.VERIFY, lambda rows, drafted: 8e-3 + 5e-6 * drafted, [(256, 256 * x) for x in range(1, 9)])
    costs = times.costs(256)
    assert costs is not None
    assert costs.plain_s == costs.verify_s == pytest.approx(8e-3, rel=0.02)


def test_a_plain_step_counts_as_measured_unless_a_verify_step_would_do_the_same_in_less() -> None:
    times = StepTimes()
    feed(times, StepKind.DRAFT, draft, [(64, 0)] * 5)
    feed(times, StepKind.VERIFY, verify, [(64, 0)] * 5)
    feed(times, StepKind.PLAIN, verify, [(64, 0)] * 5, factor=0.8)
    costs = times.costs(64)
    assert costs is not None
    assert costs.plain_s == pytest.approx(0.8 * verify(64, 0))
    feed(times, StepKind.PLAIN, verify, [(64, 0)] * 500, factor=1.5)
    costs = times.costs(64)
    assert costs is not None
    assert costs.plain_s == pytest.approx(verify(64, 0))


def test_steps_that_get_slower_are_followed() -> None:
    times = StepTimes()
    for factor in (1.0, 3.0):
        feed(times, StepKind.DRAFT, draft, [(64, 0)] * 1000, factor)
        feed(times, StepKind.VERIFY, verify, [(64, 256)] * 1000, factor)
    costs = times.costs(64)
    assert costs is not None
    assert costs.draft_step_s == pytest.approx(3 * draft(64, 0), rel=0.1)
    assert costs.verify_s == pytest.approx(3 * verify(64, 256), rel=0.1)


def test_what_was_measured_long_ago_gives_way_to_a_few_new_steps() -> None:
    times = StepTimes()
    feed(times, StepKind.DRAFT, draft, [(64, 0)] * 1000)
    feed(times, StepKind.VERIFY, verify, [(64, 0)] * 4000)
    feed(times, StepKind.DRAFT, draft, [(64, 0)] * 2, factor=3)
    costs = times.costs(64)
    assert costs is not None
    assert costs.draft_step_s == pytest.approx(3 * draft(64, 0), rel=0.1)


def test_nothing_is_said_before_drafting_and_verifying_have_been_measured() -> None:
    times = StepTimes()
    assert times.costs(8) is None
    feed(times, StepKind.VERIFY, verify, [(8, 32)] * 3)
    assert times.costs(8) is None
    feed(times, StepKind.DRAFT, draft, [(8, 0)] * 2)
    assert times.costs(8) is None
    feed(times, StepKind.DRAFT, draft, [(8, 0)])
    assert times.costs(8) is not None


def test_drafts_that_are_free_need_no_draft_step() -> None:
    times = StepTimes()
    feed(times, StepKind.VERIFY, verify, [(8, 32), (8, 16), (8, 64)])
    before = times.costs(8, drafts_are_free=True)
    feed(times, StepKind.DRAFT, draft, [(8, 0)] * 3)
    after = times.costs(8, drafts_are_free=True)
    assert before is not None
    assert (before.draft_step_s, before.draft_row_s) == (0, 0)
    assert before.verify_s == pytest.approx(verify(8, 0), rel=0.02)
    assert after is not None
    assert astuple(after) == pytest.approx(astuple(before))


def test_no_part_of_a_step_takes_less_than_nothing() -> None:
    times = StepTimes()
    shapes = [(rows, drafted) for rows in (8, 16, 64) for drafted in (0, 32, 512)]
    feed(times, StepKind.DRAFT, lambda rows, drafted: 5e-3 - 50e-6 * rows, [(rows, 0) for rows, _ in shapes])
    feed(times, StepKind.VERIFY, lambda rows, drafted: 5e-3 + 20e-6 * rows - 6e-6 * drafted, shapes)
    feed(times, StepKind.PLAIN, lambda rows, drafted: 50e-6 * rows - 0.3e-3, shapes)
    costs = times.costs(8)
    assert costs is not None
    assert min(costs.draft_step_s, costs.verify_s, costs.plain_s) > 0
    assert costs.draft_row_s == costs.verify_token_s == 0


@pytest.mark.parametrize(("rows", "tokens", "seconds"), [(0, 0, 1.0), (4, 3, 1.0), (4, 4, 0.0), (4, 4, float("nan"))])
def test_figures_that_are_no_step_are_refused(rows: int, tokens: int, seconds: float) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows computes {tokens} tokens"):
        StepTimes().record(StepKind.PLAIN, rows=rows, tokens=tokens, seconds=seconds)


def test_no_step_is_taken_to_cost_nothing_but_its_extra_tokens() -> None:
    times = StepTimes()
    feed(
        times,
        StepKind.VERIFY,
        lambda rows, drafted: 1e-4 * (drafted - rows / 2),
        [(1, 8), (2, 4), (3, 9), (4, 5), (5, 3)],
    )
    costs = times.costs(4, drafts_are_free=True)
    assert costs is not None
    assert 0 < costs.plain_s <= costs.verify_s


def mixed(drafting: int, plain: int, verified: int = 0, drafted: int = 0) -> float:
    fixed = 1.7e-3 if verified else 1.1e-3 if plain else 1.0e-3
    return fixed + 20e-6 * drafting + 46e-6 * plain + 75e-6 * verified + 5e-6 * drafted


def test_steps_in_which_some_rows_draft_and_others_do_not_teach_what_each_of_them_takes() -> None:
    times, chance = StepTimes(), random.Random(0)
    for _ in range(100):
        drafting, plain, verified = (chance.randint(1, 32) for _ in range(3))
        for kind, of_verified in ((StepKind.PLAIN, 0), (StepKind.VERIFY, verified)):
            times.record(
                kind,
                rows=drafting + plain + of_verified,
                tokens=drafting + plain + 9 * of_verified,
                seconds=mixed(drafting, plain, of_verified, 8 * of_verified) * (1 + abs(chance.gauss(0, 0.02))),
                drafting=drafting,
                plain=plain if of_verified else 0,
            )
    for rows in (4, 16, 32):
        costs = times.costs(rows)
        assert costs is not None
        assert costs.draft_step_s + rows * costs.draft_row_s == pytest.approx(mixed(rows, 0), rel=0.12)
        assert costs.plain_s == pytest.approx(mixed(0, rows), rel=0.06)
        assert costs.verify_s + 8 * rows * costs.verify_token_s == pytest.approx(mixed(0, 0, rows, 8 * rows), rel=0.06)

from __future__ import annotations

import pytest

from kvikk.engine.prompt_speed import MEASURED_TOKENS, PromptSpeed
from kvikk.engine.step import StepPlan


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


def plan_of(tokens: int) -> StepPlan:
    return StepPlan(tokens=tokens)


def test_as_long_as_nothing_is_known_the_time_given_holds() -> None:
    clock = Clock()
    speed = PromptSpeed(clock)
    small = plan_of(MEASURED_TOKENS - 1)
    speed.note_planned(small)
    clock.now += 1
    speed.note_computed(small)
    assert speed.bound(2.0, 10) == 2.0


def test_the_time_is_what_computing_takes_where_that_is_less() -> None:
    clock = Clock()
    speed = PromptSpeed(clock)
    for step_s in (1.0, 1.0, 90.0):  # the last one compiled something
        plan = plan_of(1000)
        speed.note_planned(plan)
        clock.now += step_s
        speed.note_computed(plan)
        clock.now += 500  # idle
    assert speed.bound(2.0, 500) == pytest.approx(0.5)
    assert speed.bound(2.0, 5000) == 2.0


def test_a_step_that_was_planned_over_another_begins_when_that_one_is_done() -> None:
    clock = Clock()
    speed = PromptSpeed(clock)
    first, second = plan_of(1000), plan_of(1000)
    speed.note_planned(first)
    speed.note_planned(second)
    for plan in (first, second):
        clock.now += 1
        speed.note_computed(plan)
    assert speed.bound(9.0, 1000) == pytest.approx(1.0)


def test_a_step_that_failed_is_not_counted() -> None:
    clock = Clock()
    speed = PromptSpeed(clock)
    failed, done = plan_of(1000), plan_of(1000)
    speed.note_planned(failed)
    clock.now += 50
    speed.note_planned(done)
    clock.now += 1
    speed.note_computed(done)
    assert speed.bound(99.0, 1000) == pytest.approx(1.0)

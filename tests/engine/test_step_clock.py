"""What steps take, as the estimates are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvikk.engine.step import RowResult, StepPlan
from kvikk.engine.step_clock import StepClock


@dataclass
class OnDevice:
    """A step that the device began and ended at these times."""

    began: float
    ended: float

    def results(self) -> list[RowResult]:
        return []

    def seconds(self, until: Any = None) -> float | None:
        return (self.ended if until is None else until.began) - self.began


class ByTheHost:
    """A step of which the device tells nothing."""

    def results(self) -> list[RowResult]:
        return []

    def seconds(self, until: Any = None) -> float | None:
        return None


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.noted: list[tuple[StepPlan, float]] = []
        self.clock = StepClock(lambda: self.now, lambda plan, seconds: self.noted.append((plan, seconds)))

    def read(self, step: Any, at: float = 0.0) -> StepPlan:
        self.now, plan = at, StepPlan()
        self.clock.note(plan, step)
        return plan


def test_a_step_on_the_device_lasts_until_the_next_one_begins_there() -> None:
    world = World()
    first, second = world.read(OnDevice(10, 12)), world.read(OnDevice(15, 16))
    assert world.noted == [(first, 5)]
    world.read(OnDevice(16, 19))
    assert world.noted == [(first, 5), (second, 1)]


def test_when_the_host_looked_does_not_count() -> None:
    world = World()
    first = world.read(OnDevice(10, 12), at=100)
    world.read(OnDevice(12, 30), at=100.1)
    assert world.noted == [(first, 2)]


def test_what_is_done_between_steps_counts_with_none_of_them() -> None:
    world = World()
    first = world.read(OnDevice(10, 12))
    world.clock.interrupt()
    assert world.noted == [(first, 2)]
    second = world.read(OnDevice(50, 51))
    world.read(OnDevice(52, 53))
    assert world.noted == [(first, 2), (second, 2)]


def test_where_the_device_tells_nothing_a_step_lasts_from_the_end_of_the_last_one() -> None:
    world = World()
    world.read(ByTheHost(), at=3)
    second, third = world.read(None, at=5), world.read(ByTheHost(), at=6)
    assert world.noted == [(second, 2), (third, 1)]
    world.clock.interrupt()
    world.read(None, at=9)
    assert len(world.noted) == 2


def test_a_step_before_one_that_was_executed_lasts_to_its_own_end() -> None:
    world = World()
    first, second = world.read(OnDevice(10, 12), at=1), world.read(None, at=4)
    assert world.noted == [(first, 2), (second, 3)]


def test_a_step_that_was_in_flight_when_something_else_was_done_lasts_to_its_own_end() -> None:
    world = World()
    flying = OnDevice(10, 12)
    world.clock.start(flying)
    world.clock.interrupt()
    first = world.read(flying)
    assert world.noted == [(first, 2)]
    world.read(OnDevice(200, 201))
    assert world.noted == [(first, 2)]

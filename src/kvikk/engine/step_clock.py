"""What each step takes: on the device where it can tell, else from one end to the next as the host sees them."""

from __future__ import annotations

from collections.abc import Callable

from kvikk.engine.step import PendingStep, StepPlan


class StepClock:
    """Times the steps of an engine one after the other, each as it has been read.

    A step that was started ahead lasts until the device begins the next one. So, with a step that the host must read
    before it can plan further, as one that verifies, it counts how long the device waits for that; and nothing counts
    that keeps the host from looking, as launching a step kernel by kernel does while the device computes another one.

    Args:
        clock: seconds, monotonic.
        note: is told of each step that could be timed, and how many seconds it took.
    """

    def __init__(self, clock: Callable[[], float], note: Callable[[StepPlan, float], None]) -> None:
        self._clock = clock
        self._note = note
        self._read_s: float | None = None
        """When the last step had been read; None: something else was done since, or nothing."""
        self._newest: PendingStep | None = None
        """The last step that was started."""
        self._alone: PendingStep | None = None
        """A step that was in flight when something else was done, which the next one waited for."""
        self._last: tuple[StepPlan, PendingStep] | None = None
        """The last step that was read, where the device can tell when it was done."""

    def start(self, step: PendingStep) -> None:
        """A step has been started, and can be in flight when the next one is planned."""
        self._newest = step

    def note(self, plan: StepPlan, step: PendingStep | None) -> None:
        """A step has been read.

        Args:
            plan: what was asked for.
            step: what was started; None where it was executed.
        """
        self._end_last(step)
        now, since = self._clock(), self._read_s
        self._read_s = now
        if step is not None and step.seconds() is not None:
            self._last = plan, step
            if step is self._alone:
                self._end_last(None)
                self._alone = None  # and its rows can go
            if step is self._newest:
                self._newest = None
        elif since is not None and now > since:
            self._note(plan, now - since)

    def interrupt(self) -> None:
        """Something other than steps is done next, or nothing."""
        self._end_last(None)
        self._alone = self._newest
        self._read_s = None

    def _end_last(self, later: PendingStep | None) -> None:
        if self._last is not None:
            plan, step = self._last
            self._last = None
            seconds = step.seconds(later)
            if seconds is not None and seconds > 0:
                self._note(plan, seconds)

"""How quickly prompts are computed, as the engine goes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Final

from kvikk.engine.step import StepPlan

MEASURED_TOKENS: Final = 256
"""Steps of fewer tokens say nothing about how quickly prompts are computed."""


class PromptSpeed:
    """How long the engine takes to compute prompts, from its own steps.

    A step begins when it is planned, or when the one before it has been computed, whichever is later.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._planned: deque[tuple[StepPlan, float]] = deque(maxlen=4)
        self._computed_s = 0.0
        self._token_s: deque[float] = deque(maxlen=15)

    def note_planned(self, plan: StepPlan) -> None:
        """A step begins."""
        self._planned.append((plan, self._clock()))

    def note_computed(self, plan: StepPlan) -> None:
        """A step has been computed. Those that were planned before it and are not known by now have failed."""
        now = self._clock()
        while self._planned:
            planned, planned_s = self._planned.popleft()
            if planned is plan and plan.tokens >= MEASURED_TOKENS:
                self._token_s.append((now - max(planned_s, self._computed_s)) / plan.tokens)
            if planned is plan:
                break
        self._computed_s = now

    def bound(self, timeout_s: float, tokens: int) -> float:
        """A time, or what computing so many tokens takes where that is less, as far as known."""
        return min(timeout_s, median(self._token_s) * tokens) if self._token_s else timeout_s

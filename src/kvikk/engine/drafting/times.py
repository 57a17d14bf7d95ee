"""What steps take: running estimates from the steps that were measured."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvikk.engine.drafting.length import RoundCosts

HALF_LIFE_STEPS: Final = 256
"""A measurement counts half when so many steps, of any kind, were measured after it: rows grow, and get slower."""

LEAST_SEEN: Final = 3
"""Steps of a kind that must have been measured: the first one often compiles something."""

SPREAD: Final = 0.002
"""A slope is believed when the squares of what it goes with deviate by more than this from their mean, relatively."""


class StepKind(StrEnum):
    """What a step is for."""

    DRAFT = "draft"
    VERIFY = "verify"
    PLAIN = "plain"


class StepTimes:
    """What steps take, by their kind, affine in their rows and in the tokens that they compute beyond one a row."""

    def __init__(self) -> None:
        self._kinds = {kind: _AffineTime() for kind in StepKind}
        self._steps = 0

    def record(self, kind: StepKind, *, rows: int, tokens: int, seconds: float) -> None:
        """A step has been measured.

        Args:
            kind: what it was for.
            rows: that took part.
            tokens: computed, all rows together.
            seconds: the step took, on the device where there is one.

        Raises:
            ValueError: the figures cannot be of a step.
        """
        if not (1 <= rows <= tokens and 0 < seconds < math.inf):
            raise ValueError(f"no step of {rows} rows computes {tokens} tokens in {seconds} seconds")
        self._steps += 1
        self._kinds[kind].record(self._steps, rows, tokens - rows, seconds)

    def costs(self, rows: int, *, drafts_are_free: bool = False) -> RoundCosts | None:
        """What a round of so many rows takes; None while too little was measured.

        Args:
            rows: of the batch.
            drafts_are_free: drafts come without a model, as by prompt look-up.
        """
        draft, verify, plain = (self._kinds[kind].coefficients() for kind in StepKind)
        if verify is None or (draft is None and not drafts_are_free):
            return None
        draft_step_s, draft_row_s, _ = (0.0, 0.0, 0.0) if draft is None or drafts_are_free else draft
        verify_s = verify[0] + verify[1] * rows
        # A verify step without drafts gives what a plain step gives. That the less of the two counts also mends what
        # was measured long ago, when rows were longer: nothing else would, while no plain step runs.
        plain_s = verify_s if plain is None else min(verify_s, plain[0] + plain[1] * rows)
        if plain_s <= 0:  # all that was measured went into what a drafted token takes
            return None
        return RoundCosts(
            draft_step_s=draft_step_s,
            draft_row_s=draft_row_s,
            verify_s=verify_s,
            verify_token_s=verify[2],
            plain_s=plain_s,
        )

    def of(self, kind: StepKind) -> tuple[float, float, float] | None:
        """What a step of a kind takes at all, for each row, and for each token beyond one a row; None: not known."""
        return self._kinds[kind].coefficients()


class _AffineTime:
    """Seconds = fixed + per_row * rows + per_extra * extra, none of them negative, by least squares that forget.

    What is squared is the estimate's error relative to the *measured* time. So short steps count as much as long ones,
    and a step that took a thousand times too long is off by 1 and has no pull, whatever is estimated for it.
    """

    def __init__(self) -> None:
        self._products: NDArray[np.float64] = np.zeros((3, 3))
        self._sums: NDArray[np.float64] = np.zeros(3)
        self._seen = 0
        self._last = 0
        self._fitted: tuple[float, float, float] | None = None

    def record(self, step: int, rows: int, extra: int, seconds: float) -> None:
        """Steps are numbered; those that were not of this kind make the others older too."""
        relative = np.array([1.0, rows, extra]) / seconds
        kept = 0.5 ** ((step - self._last) / HALF_LIFE_STEPS)
        self._products = self._products * kept + np.outer(relative, relative)
        self._sums = self._sums * kept + relative
        self._seen += 1
        self._last = step
        self._fitted = None

    def coefficients(self) -> tuple[float, float, float] | None:
        """Fixed, per row, per extra token; None while too little was measured."""
        if self._fitted is None and self._seen >= LEAST_SEEN:
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> tuple[float, float, float]:
        """Slopes are held back as far as what they go with did not vary: then all is fixed.

        So it is where extra tokens alone would account for all: no step takes no time without them.
        """
        scale = self._products[0] / self._products[0, 0]  # the means of 1, rows, extra
        held = np.diag([0.0, SPREAD, SPREAD] * scale**2) * self._products[0, 0]
        active = np.flatnonzero(scale)
        while True:
            chosen = np.ix_(active, active)
            fitted = np.linalg.solve((self._products + held)[chosen], self._sums[active])
            parts = fitted * scale[active]  # of the seconds of a mean step
            if parts.min() >= 0:
                break
            active = np.delete(active, parts.argmin())
            if active.tolist() == [2]:
                active = np.array([0])
        seconds = [0.0, 0.0, 0.0]
        for index, value in zip(active, fitted, strict=True):
            seconds[index] = float(value)
        return seconds[0], seconds[1], seconds[2]

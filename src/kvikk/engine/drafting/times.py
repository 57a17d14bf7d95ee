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

LEAST_WEIGHT: Final = 1e-4
"""What the steps of a kind count beside those of others, however long ago they were."""


class StepKind(StrEnum):
    """What a step is for."""

    DRAFT = "draft"
    VERIFY = "verify"
    PLAIN = "plain"


class StepTimes:
    """What steps take, by their kind, affine in their rows and in the tokens that they compute beyond one a row.

    What a row that drafts takes, and one that decodes plainly, is the same in all kinds of steps, so that those teach
    it in which rows of several kinds are computed. What a step takes at all goes by what is most in it: verifying, then
    decoding plainly.

    Least squares that forget, no part negative. What is squared is the estimate's error relative to the *measured*
    time. So short steps count as much as long ones, and a step that took a thousand times too long is off by 1 and has
    no pull, whatever is estimated for it.
    """

    def __init__(self) -> None:
        self._sums = {kind: _Sums() for kind in StepKind}
        self._steps = 0
        self._drafting_seen = 0
        """Steps in which rows drafted, of any kind."""
        self._fitted: NDArray[np.float64] | None = None

    def record(
        self, kind: StepKind, *, rows: int, tokens: int, seconds: float, drafting: int = 0, plain: int = 0
    ) -> None:
        """A step has been measured.

        Args:
            kind: what it was for.
            rows: that took part.
            tokens: computed, all rows together.
            seconds: the step took, on the device where there is one.
            drafting: of the rows of another kind of step, those that drafted.
            plain: of the rows of a step that verified, those that decoded plainly.

        Raises:
            ValueError: the figures cannot be of a step.
        """
        if not (1 <= rows <= tokens and 0 < seconds < math.inf and drafting + plain <= rows):
            raise ValueError(f"no step of {rows} rows computes {tokens} tokens in {seconds} seconds")
        self._steps += 1
        features = np.zeros(_FEATURES)
        features[_FIXED[kind]] = 1
        features[_ROW[StepKind.DRAFT]] += drafting
        features[_ROW[StepKind.PLAIN]] += plain
        features[_ROW[kind]] += rows - drafting - plain
        features[_EXTRA] = tokens - rows
        self._sums[kind].record(self._steps, features / seconds)
        self._drafting_seen += bool(drafting) or kind is StepKind.DRAFT
        self._fitted = None

    def costs(self, rows: int, *, drafts_are_free: bool = False) -> RoundCosts | None:
        """What a round of so many rows takes; None while too little was measured.

        Args:
            rows: of the batch.
            drafts_are_free: drafts come without a model, as by prompt look-up.
        """
        draft, verify, plain = (self.of(kind) for kind in StepKind)
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
        base = kind
        if self._sums[kind].seen < LEAST_SEEN:
            if kind is not StepKind.DRAFT or self._drafting_seen < LEAST_SEEN:
                return None
            others = (StepKind.PLAIN, StepKind.VERIFY)  # rows have drafted beside others only
            base = next((each for each in others if self._sums[each].seen >= LEAST_SEEN), kind)
            if base is kind:
                return None
        if self._fitted is None:
            self._fitted = self._fit()
        fixed, row, extra = (float(self._fitted[place]) for place in (_FIXED[base], _ROW[kind], _EXTRA))
        return fixed, row, extra if kind is StepKind.VERIFY else 0.0

    def _fit(self) -> NDArray[np.float64]:
        """Slopes are held back as far as what they go with did not vary: then all is fixed.

        So it is where extra tokens alone would account for all: no step takes no time without them.
        """
        products, sums, held = np.zeros((_FEATURES, _FEATURES)), np.zeros(_FEATURES), np.zeros(_FEATURES)
        for kind, of_kind in self._sums.items():
            if of_kind.seen < LEAST_SEEN:
                continue
            weight = max(LEAST_WEIGHT, 0.5 ** ((self._steps - of_kind.last) / HALF_LIFE_STEPS))
            products += weight * of_kind.products
            sums += weight * of_kind.sums
            slopes = of_kind.products[_FIXED[kind]].copy()
            slopes[_FIXED[kind]] = 0
            held += weight * SPREAD * slopes**2 / of_kind.products[_FIXED[kind], _FIXED[kind]]
        active = np.flatnonzero(products.diagonal())
        unit = np.sqrt(products.diagonal())
        fitted = np.zeros(_FEATURES)
        while True:
            chosen = np.ix_(active, active)
            scaled = (products + np.diag(held))[chosen] / np.outer(unit[active], unit[active])
            found = np.linalg.solve(scaled, sums[active] / unit[active])
            if found.min() >= 0:
                break
            active = np.delete(active, found.argmin())
        fitted[active] = found / unit[active]
        for kind, of_kind in self._sums.items():
            at = _FIXED[kind]
            if of_kind.seen >= LEAST_SEEN and not fitted[at] and not fitted[_ROW[kind]]:
                fitted[at] = of_kind.sums[at] / of_kind.products[at, at]
        return fitted


_FIXED: Final = {kind: place for place, kind in enumerate(StepKind)}
_ROW: Final = {kind: place + len(StepKind) for place, kind in enumerate(StepKind)}
_EXTRA: Final = 2 * len(StepKind)
_FEATURES: Final = _EXTRA + 1


class _Sums:
    """Of the steps of one kind, as of the last: products of all that they had, and these themselves, over seconds."""

    def __init__(self) -> None:
        self.products: NDArray[np.float64] = np.zeros((_FEATURES, _FEATURES))
        self.sums: NDArray[np.float64] = np.zeros(_FEATURES)
        self.seen = 0
        self.last = 0

    def record(self, step: int, relative: NDArray[np.float64]) -> None:
        """Steps are numbered; those that were not of this kind make the others older too."""
        kept = 0.5 ** ((step - self.last) / HALF_LIFE_STEPS)
        self.products = self.products * kept + np.outer(relative, relative)
        self.sums = self.sums * kept + relative
        self.seen += 1
        self.last = step

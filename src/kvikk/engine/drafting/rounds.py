"""The next round of a batch: what each row drafts, and when one that decodes plainly is tried again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvikk.engine.drafting.acceptance import Acceptance
from kvikk.engine.drafting.length import BestLengths, Fallback, RoundCosts, best_lengths, fallbacks

DEFAULT_LENGTH: Final = 4
"""Tokens to draft while nothing has been measured."""

PROBE_LENGTH: Final = 2
"""Tokens that a row drafts to be tried again: all of a batch may have to wait for them."""

DUE_ROWS: Final = 4
"""One in so many rows of a plain batch must be due: among many, some are bound to be lucky."""

SHORTEST_PATIENCE, LONGEST_PATIENCE = 32, 512
"""Tokens that a row commits plainly before it is tried again, at first and at the most."""


@dataclass(slots=True, eq=False)
class RowDrafts:
    """What one row has shown with one drafter."""

    acceptance: Acceptance
    fallback: Fallback | None = None
    """Why it decodes plainly; None: it drafts, or may from the next round on."""
    idle_tokens: int = 0
    """Committed since it last drafted."""
    patience: int = SHORTEST_PATIENCE
    """So many `idle_tokens` make it due for a probe."""
    is_probing: bool = False
    is_untried: bool = True
    """Whether nothing that it drafted was verified yet."""

    @property
    def is_due(self) -> bool:
        """Whether it is time to try it again."""
        return self.idle_tokens >= self.patience

    def draft(self) -> None:
        """Its drafts pay."""
        self.fallback, self.is_probing, self.patience = None, False, SHORTEST_PATIENCE

    def probe(self) -> None:
        """It drafts to see whether it should again."""
        self.is_probing = True
        if self.fallback is Fallback.MISSES:
            self.acceptance.doubt()

    def note_round(self, drafted: int, accepted: int) -> None:
        """A round, or a plain step, has ended for the row.

        Args:
            drafted: tokens that were verified; 0 in a plain step.
            accepted: of them, before the first miss.
        """
        if drafted == 0:
            self.idle_tokens += 1
            return
        self.acceptance.observe(drafted, accepted)
        self.idle_tokens, self.is_untried = 0, False
        if self.is_probing and accepted == drafted and self.fallback is Fallback.MISSES:
            self.patience = SHORTEST_PATIENCE
        elif self.is_probing:  # the probe has shown nothing new
            self.patience = min(2 * self.patience, LONGEST_PATIENCE)
        self.is_probing = False


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """What the rows do next.

    Args:
        lengths: tokens that each row drafts; all 0 for a plain step.
        fell_back: places of the rows that begin to decode plainly with this round, with the reason, to log and count.
        best: what the model says; None while nothing was measured. A probe drafts more than this.
    """

    lengths: list[int]
    fell_back: list[tuple[int, Fallback]]
    best: BestLengths | None


def plan_round(rows: Sequence[RowDrafts], most: Sequence[int], costs: RoundCosts | None) -> RoundPlan:
    """Plan the next round of a batch, and note in its rows how they stand.

    A row whose drafts do not pay decodes plainly, and what is known of it grows old, so it is tried again at times: as
    soon as it is due while others draft anyway, and no longer than they. In a batch where none does all wait for a
    probe, which takes about as long for one row as for many: there all rows are tried, and when enough are due.

    Args:
        rows: of the batch, at least one.
        most: tokens that each may draft; 0 where there is no room, or nothing to propose. This is no fallback.
        costs: of a round of these rows; None while nothing was measured.
    """
    if costs is None:
        return RoundPlan([min(DEFAULT_LENGTH, limit) for limit in most], [], None)
    acceptances = [row.acceptance.probability for row in rows]
    best = best_lengths(acceptances, most, costs)
    idle = [index for index, length in enumerate(best.lengths) if length == 0 and most[index] > 0]
    for row, length in zip(rows, best.lengths, strict=True):
        if length:
            row.draft()
    longest = max(best.lengths)
    due = [index for index in idle if rows[index].is_due]
    if longest == 0:
        due = idle if len(due) >= len(idle) / DUE_ROWS else []
    fell_back = []
    if due or any(rows[index].fallback is None for index in idle):
        reasons = [Fallback.MISSES] * len(rows) if longest else fallbacks(acceptances, max(most), costs)
        fell_back = [(index, reasons[index]) for index in idle if rows[index].fallback is None]
        for index in idle:
            rows[index].fallback = reasons[index]
    lengths = list(best.lengths)
    for index in due:
        rows[index].probe()
        lengths[index] = min(PROBE_LENGTH, longest or PROBE_LENGTH, most[index])
    return RoundPlan(lengths, fell_back, best)

"""Whether it pays that rows part with their whole KV: a model of a device on which some rows are whole and others not.

Whole rows draft and are verified in rounds, as `length` has it. Parted rows draft beside them, in the same steps, and
are verified one after the other, as fast as the link brings what they are verified on. So parting costs two things: the
link's time, which bounds what all parted rows together can commit, and the part of each step that they take from the
whole ones. What it brings is the rows that have no room otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvikk.engine.drafting.length import RoundCosts, best_lengths
from kvikk.engine.drafting.times import StepKind, StepTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCosts:
    """What steps and the link take, in seconds.

    Args:
        draft_step_s: of each draft step, however few rows take part.
        draft_row_s: more, for each row.
        verify_step_s: of a verify step, however few rows and drafts take part.
        verify_row_s: more, for each row.
        verify_token_s: more, for each drafted token.
        plain_step_s: of a plain step.
        plain_row_s: more, for each row.
        load_row_s: of the link, to bring back what a row has parted with.
    """

    draft_step_s: float
    draft_row_s: float
    verify_step_s: float
    verify_row_s: float
    verify_token_s: float
    plain_step_s: float
    plain_row_s: float
    load_row_s: float

    @classmethod
    def of(cls, times: StepTimes, load_row_s: float) -> HostCosts | None:
        """From what was measured; None while that is too little. `load_row_s` is 0 as long as it is not known."""
        draft, verify, plain = (times.of(kind) for kind in (StepKind.DRAFT, StepKind.VERIFY, StepKind.PLAIN))
        if draft is None or verify is None or not load_row_s:
            return None
        plain = plain or verify
        return cls(
            draft_step_s=draft[0],
            draft_row_s=draft[1],
            verify_step_s=verify[0],
            verify_row_s=verify[1],
            verify_token_s=verify[2],
            plain_step_s=plain[0],
            plain_row_s=plain[1],
            load_row_s=load_row_s,
        )

    def of_round(self, rows: int) -> RoundCosts:
        """What a round of so many whole rows takes."""
        verify_s = self.verify_step_s + rows * self.verify_row_s
        return RoundCosts(
            draft_step_s=self.draft_step_s,
            draft_row_s=self.draft_row_s,
            verify_s=verify_s,
            verify_token_s=self.verify_token_s,
            plain_s=min(verify_s, self.plain_step_s + rows * self.plain_row_s),
        )


def tokens_per_s(whole: int, parted: int, acceptance: float, most: int, costs: HostCosts) -> float:
    """What a device commits at best with so many rows of either kind.

    Args:
        whole: rows whose whole KV is on the device.
        parted: rows whose whole KV is on the host.
        acceptance: the probability that a drafted token is accepted, of all rows.
        most: tokens that a row may draft.
        costs: of steps and link.
    """
    rate, step_s = 0.0, costs.draft_step_s
    if whole:
        round_costs = costs.of_round(whole)
        best = best_lengths([acceptance] * whole, [most] * whole, round_costs)
        rate, drafted = best.tokens_per_s, best.lengths[0]
        step_s = whole * (1 + _accepted(acceptance, drafted)) / rate / (drafted + 1)
    if not parted:
        return rate
    if not whole:  # no verify step is made for others
        costs = replace(costs, verify_row_s=costs.verify_row_s + max(0.0, costs.verify_step_s - costs.draft_step_s))
    return max(_with_parted(parted, rate, step_s, acceptance, drafted, costs) for drafted in range(1, most + 1))


def _with_parted(parted: int, rate: float, step_s: float, acceptance: float, drafted: int, costs: HostCosts) -> float:
    """The same where each parted row drafts so many tokens before it is verified.

    Args:
        parted: how many there are.
        rate: of the whole rows while they have the device for themselves.
        step_s: a step of theirs.
        acceptance: of all rows.
        drafted: by a parted row.
        costs: of steps and link.
    """
    work_s = parted * (drafted * (costs.draft_row_s + costs.verify_token_s) + costs.verify_row_s)
    cycle_s = max((drafted + 1) * step_s + work_s, parted * costs.load_row_s)
    return rate * (1 - work_s / cycle_s) + parted * (1 + _accepted(acceptance, drafted)) / cycle_s


def _accepted(acceptance: float, drafted: int) -> float:
    """Tokens of a draft that are accepted, on average."""
    if acceptance >= 1:
        return drafted
    return acceptance * (1 - acceptance**drafted) / (1 - acceptance)

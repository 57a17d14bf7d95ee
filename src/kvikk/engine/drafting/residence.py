"""Which rows draft, and which part with their whole KV: a model of a device whose memory many rows want.

Whole rows draft and are verified in rounds, as `length` has it. Parted rows draft beside them, in the same steps, and
are verified one after the other, as fast as the link brings what they are verified on. So parting costs two things: the
link's time, which bounds what all parted rows together can commit, and the part of each step that they take from the
whole ones. What it brings is the rows that have no room otherwise. A small cache takes the room of a part of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvikk.engine.drafting.length import FloatArray, RoundCosts, best_lengths
from kvikk.engine.drafting.times import StepKind, StepTimes

LOADS_AT_ONCE: Final = 2
"""Rows that get their blocks back at a time: one is copied while the other is verified."""

LAG_STEPS: Final = 2.5
"""From the end of a copy to the start of the next one into the same room: a step that is in flight, and the one that
verifies, read before anything else is planned."""

MOST_STAGING: Final = 0.25
"""Of all blocks, what is kept free for rows that come back, at the most; but for one there is always room."""

WHOLES: Final = 8
"""Numbers of whole rows that are looked at."""


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
        load_row_s: of the link, to bring back what a row has parted with; infinite: there is none.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What there is memory for.

    Args:
        rows: that run or wait.
        blocks: for them.
        row_blocks: of a row's whole KV.
        cache_blocks: more, of its small cache.
        tail_blocks: of what a parted row keeps besides its small cache.
        host_rows: rows whose whole KV the host can hold.
    """

    rows: int
    blocks: int
    row_blocks: float
    cache_blocks: float
    tail_blocks: float
    host_rows: int = 0

    @property
    def plain(self) -> int:
        """Rows that fit without small caches."""
        return max(1, min(self.rows, int(self.blocks / self.row_blocks)))

    @property
    def whole(self) -> int:
        """Rows that fit with small caches, all of them whole."""
        return min(self.rows, int(self.blocks / (self.row_blocks + self.cache_blocks)))

    @property
    def loads(self) -> int:
        """Rows that can get their blocks back at a time."""
        return loads_at_once(self.row_blocks, self.blocks)

    def parted(self, whole: int) -> int:
        """Rows that fit beside so many whole ones when they part."""
        left = self.blocks - whole * (self.row_blocks + self.cache_blocks) - self.loads * self.row_blocks
        return max(0, min(self.rows - whole, self.host_rows, int(left / (self.cache_blocks + self.tail_blocks))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """What rows should do, and what it promises.

    Args:
        whole: rows that are whole.
        parted: rows that have parted; 0 where none should.
        length: tokens that a parted row drafts before it is verified.
        step_s: of a step while they do.
        tokens_per_s: that all commit.
        plain_tokens_per_s: that all commit where every row decodes plainly.
    """

    whole: int
    parted: int
    length: int
    step_s: float
    tokens_per_s: float
    plain_tokens_per_s: float

    @property
    def gain(self) -> float:
        """How much faster than plainly they are."""
        return self.tokens_per_s / self.plain_tokens_per_s


def loads_at_once(row_blocks: float, blocks: int) -> int:
    """Rows that get their blocks back at a time, each so many, of as many as there are in all."""
    return LOADS_AT_ONCE if LOADS_AT_ONCE * row_blocks <= MOST_STAGING * blocks else 1


def best_mix(room: Room, acceptance: float, most: int, most_parted: int, costs: HostCosts) -> Mix:
    """The rows with small caches that commit most, of those that there is room for.

    Args:
        room: for rows.
        acceptance: the probability that a drafted token is accepted, of all rows.
        most: tokens that a whole row may draft.
        most_parted: tokens that a parted row may draft.
        costs: of steps and link.

    Returns:
        The best with small caches; where that is no gain nothing should be drafted.
    """
    plain = room.plain / costs.of_round(room.plain).plain_s
    fitting = room.whole
    can_part = 0 < fitting < room.rows and room.host_rows > 0 and costs.load_row_s < math.inf
    wholes = {max(1, round(fitting * part / WHOLES)) for part in range(WHOLES + 1)} if can_part else {fitting}
    found = Mix(whole=0, parted=0, length=0, step_s=0.0, tokens_per_s=0.0, plain_tokens_per_s=plain)
    for whole in sorted(wholes):
        rate, step_s = _of_whole(whole, acceptance, most, costs)
        if rate > found.tokens_per_s:
            found = replace(found, whole=whole, parted=0, length=0, step_s=step_s, tokens_per_s=rate)
        parted = room.parted(whole) if can_part else 0
        for some in {parted, parted * 3 // 4, parted // 2} - {0}:
            rates, steps_s = _with_parted(some, whole, rate, step_s, acceptance, most_parted, costs, room.loads)
            best = int(rates.argmax())
            if rates[best] > found.tokens_per_s:
                found = replace(
                    found, whole=whole, parted=some, length=best + 1, step_s=float(steps_s[best]),
                    tokens_per_s=float(rates[best]),
                )  # fmt: skip
    return found


def tokens_per_s(whole: int, parted: int, acceptance: float, most: int, most_parted: int, costs: HostCosts) -> float:
    """What a device commits at best with so many rows of either kind.

    Args:
        whole: rows whose whole KV is on the device.
        parted: rows whose whole KV is on the host.
        acceptance: the probability that a drafted token is accepted, of all rows.
        most: tokens that a whole row may draft.
        most_parted: tokens that a parted row may draft.
        costs: of steps and link.
    """
    rate, step_s = _of_whole(whole, acceptance, most, costs)
    if not parted:
        return rate
    return float(_with_parted(parted, whole, rate, step_s, acceptance, most_parted, costs)[0].max())


def _of_whole(whole: int, acceptance: float, most: int, costs: HostCosts) -> tuple[float, float]:
    """What so many whole rows commit in a second by themselves, and how long a step of theirs takes."""
    if not whole:
        return 0.0, costs.draft_step_s
    best = best_lengths([acceptance] * whole, [most] * whole, costs.of_round(whole))
    drafted = best.lengths[0]
    committed = 1 + (float(_accepted(acceptance, drafted)[-1]) if drafted else 0.0)
    return best.tokens_per_s, whole * committed / best.tokens_per_s / (drafted + 1)


def _with_parted(
    parted: int,
    whole: int,
    rate: float,
    step_s: float,
    acceptance: float,
    most: int,
    costs: HostCosts,
    loads: int = LOADS_AT_ONCE,
) -> tuple[FloatArray, FloatArray]:
    """What all rows commit in a second, and what a step takes, where each parted row drafts 1, 2, ... `most` tokens.

    Args:
        parted: how many there are.
        whole: how many of the others.
        rate: of the whole rows while they have the device for themselves.
        step_s: a step of theirs.
        acceptance: of all rows.
        most: tokens that a parted row drafts.
        costs: of steps and link.
        loads: rows that get their blocks back at a time.
    """
    drafted = np.arange(1, most + 1)
    verify_s = costs.verify_row_s + max(0.0, costs.verify_step_s - costs.draft_step_s)
    work_s = parted * (drafted * (costs.draft_row_s + costs.verify_token_s) + verify_s)
    steps_s = (drafted + 1) * step_s + work_s
    load_s = np.maximum(costs.load_row_s, (costs.load_row_s + LAG_STEPS * steps_s / (drafted + 1)) / loads)
    cycle_s = np.maximum(steps_s, parted * load_s)
    rates = parted * (1 + _accepted(acceptance, most)) / cycle_s
    if whole:
        rates += rate * (1 - work_s / cycle_s)
    return rates, steps_s / (drafted + 1)


def _accepted(acceptance: float, most: int) -> FloatArray:
    """Tokens of a draft of 1, 2, ... `most` that are accepted, on average."""
    return np.full(most, acceptance).cumprod().cumsum()

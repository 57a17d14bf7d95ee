"""How many tokens each row of a batch should draft: the most committed tokens per second, by a model of a round.

All rows of a batch work in lock-step: they draft token by token until the longest draft is done, rows with shorter ones
idle in the meantime, and one step verifies them all. A draft of x tokens, each accepted with probability a while none
before it was missed, commits a + a^2 + .. + a^x = a (1 - a^x) / (1 - a) tokens, and one more that verifying gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCosts:
    """What a round of one batch takes, in seconds; all parts are affine in what the rows draft.

    Args:
        draft_step_s: of each draft step, however few rows take part. 0 where drafts come without a model.
        draft_row_s: more, for each row that takes part.
        verify_s: of the verify step, as far as it does not depend on the drafts.
        verify_token_s: more, for each drafted token.
        plain_s: of a plain step, which gives each row a token; no longer than `verify_s`.
    """

    draft_step_s: float
    draft_row_s: float
    verify_s: float
    verify_token_s: float
    plain_s: float

    @property
    def token_s(self) -> float:
        """What a row that drafts one token more costs in a round that lasts as long without it."""
        return self.draft_row_s + self.verify_token_s


@dataclass(frozen=True, slots=True)
class BestLengths:
    """The answer, and what it promises.

    Args:
        lengths: tokens that each row should draft; all 0 for a plain step.
        tokens_per_s: that the batch commits with them.
        plain_tokens_per_s: that it commits without drafting.
    """

    lengths: list[int]
    tokens_per_s: float
    plain_tokens_per_s: float


def fitting(lengths: Sequence[int], room: int) -> list[int]:
    """Drafts cut to so many tokens in all: the longest are cut, to one length.

    Args:
        lengths: tokens of each row's draft.
        room: for all of them; below 0 there is none.
    """
    left, cap = room, 0
    ascending = sorted(lengths)
    for index, length in enumerate(ascending):
        rows = len(ascending) - index
        if (length - cap) * rows > left:
            cap += max(0, left) // rows
            break
        left -= (length - cap) * rows
        cap = length
    return [min(length, cap) for length in lengths]


class Fallback(StrEnum):
    """Why a row decodes plainly."""

    MISSES = "misses"
    """Too few of its drafted tokens are accepted."""
    MATES = "mates"
    """Its drafts would pay, but too few of the other rows' would, and all wait for the longest draft."""
    COST = "cost"
    """Drafting takes so long, next to a plain step, that it would not pay if every token were accepted."""


def best_lengths(acceptances: Sequence[float], most: Sequence[int], costs: RoundCosts) -> BestLengths:
    """The lengths that give the most tokens per second for the whole batch.

    Exact under the model, in O(rows * longest) for each of a few passes: whether any round beats a given rate is
    decided draft step by draft step and row by row, as what the j-th token of a row is worth falls with j. The best
    round for the rate so far gives the next rate, until there is none better (Dinkelbach 1967).

    Args:
        acceptances: of each row, the probability that a drafted token is accepted. At least one row.
        most: tokens that each row may draft.
        costs: of a round of these rows.
    """
    rows = len(acceptances)
    worth = _worth(np.asarray(acceptances), max(most))
    if min(most) < worth.shape[1]:
        worth[np.arange(worth.shape[1]) >= np.asarray(most)[:, None]] = 0
    plain = rate = rows / costs.plain_s
    lengths = [0] * rows
    while True:
        price = rate * costs.token_s  # in tokens, as what is worth less takes longer than committing others would
        gains = np.maximum(worth - price, 0)
        steps = int(np.count_nonzero(gains.sum(0) > rate * costs.draft_step_s))  # each step gains less than the last
        gains, worth = gains[:, :steps], worth[:, :steps]  # at a higher rate there are no more of them
        drafted = int(np.count_nonzero(gains))
        committed = rows + float(gains.sum()) + drafted * price
        better = committed / (costs.verify_s + steps * costs.draft_step_s + drafted * costs.token_s)
        if steps == 0 or better <= rate:
            return BestLengths(lengths, rate, plain)
        rate, lengths = better, np.count_nonzero(gains, axis=1).tolist()


def fallbacks(acceptances: Sequence[float], most: int, costs: RoundCosts) -> list[Fallback]:
    """Why rows of a batch that takes a plain step do not draft.

    Args:
        acceptances: of each row, as for `best_lengths`.
        most: tokens that a row may draft, 1 or more.
        costs: of a round of these rows.
    """
    rows = len(acceptances)
    alike = np.append(np.asarray(acceptances), 1.0)  # what if all rows were like this one, or never missed
    steps = np.arange(1, most + 1)
    committed = rows * (1 + _worth(alike, most).cumsum(1))
    seconds = costs.verify_s + steps * (costs.draft_step_s + rows * costs.token_s)
    pays = (committed / seconds > rows / costs.plain_s).any(1)
    if not pays[-1]:
        return [Fallback.COST] * rows
    return [Fallback.MATES if it_does else Fallback.MISSES for it_does in pays[:-1]]


def _worth(acceptances: FloatArray, most: int) -> FloatArray:
    """The probability that the j-th drafted token of a row is committed: [rows, most], from j = 1 on."""
    return np.repeat(acceptances[:, None], most, 1).cumprod(1)

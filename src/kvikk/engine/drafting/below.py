"""Prompt look-up as a level below a small cache: what it proposes the small cache verifies, several tokens a step."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Final

from kvikk.engine.drafting.acceptance import NGRAM, Acceptance, tokens_until
from kvikk.engine.drafting.ngram import PromptLookup

EVEN: Final = 0.5
"""So likely a proposal is right as a whole, at the least."""
HOPELESS: Final = 0.25
"""Below this acceptance nothing is proposed: a step that verifies has to wait until the one before it is known."""
PATIENCE_STEPS: Final = 32
"""Draft steps until a look-up that has been hopeless is tried again."""


class LookupBelow:
    """Proposes to a row's small cache what that would draft next.

    Args:
        prompt: the row's tokens known now.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._lookup = PromptLookup(prompt)
        self._acceptance = Acceptance(NGRAM)
        self._idle_steps = 0

    @property
    def is_hopeful(self) -> bool:
        """Whether the next draft step should have a proposal, if there is one."""
        return self._acceptance.probability >= HOPELESS or self._idle_steps >= PATIENCE_STEPS

    def propose(self, committed: Sequence[int], drafted: Sequence[int], most: int) -> list[int]:
        """What might follow, as long as that is likely enough.

        Args:
            committed: all tokens of the row; those of the last call and more.
            drafted: behind them.
            most: tokens to propose.
        """
        self._lookup.extend(committed[len(self._lookup) :])
        most = min(most, tokens_until(EVEN, self._acceptance.probability))
        return self._lookup.propose(most, then=drafted) if most > 0 and self.is_hopeful else []

    def note_step(self, proposed: int, accepted: int) -> None:
        """The small cache has drafted, and found so many of the proposed tokens right."""
        if proposed:
            self._acceptance.observe(proposed, accepted)
            self._idle_steps = 0
        else:
            self._idle_steps += 1

    def copy(self) -> LookupBelow:
        """The same, for a row that forks."""
        copied = copy(self)
        copied._lookup, copied._acceptance = self._lookup.copy(), copy(self._acceptance)
        return copied

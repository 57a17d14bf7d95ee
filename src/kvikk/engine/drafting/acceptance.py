"""How likely a drafted token is to be accepted, as far as a row has shown."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Final

from kvikk.errors import ConfigError

MEMORY_TOKENS: Final = 64
"""A token counts 1/e of a fresh one when so many were tried after it: at .95 the estimate then wavers by some .02."""

DOUBT_TOKENS: Final = 4.0
"""What all that was seen counts as when it may be out of date."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prior:
    """What is taken to hold of a row that has shown nothing, as a Beta distribution.

    Args:
        mean: the probability that a drafted token is accepted.
        weight: how many tokens tried this is worth.

    Raises:
        ConfigError: the mean is not between 0 and 1, or the weight not above 0.
    """

    mean: float
    weight: float

    def __post_init__(self) -> None:
        if not 0 < self.mean < 1:
            raise ConfigError(f"a prior acceptance of {self.mean} is none: it must lie between 0 and 1, both excluded")
        if not self.weight > 0:
            raise ConfigError(f"a prior worth {self.weight} tokens says nothing: its weight must be above 0")


SMALL_CACHE: Final = Prior(mean=0.95, weight=8)
"""Of the same model on a quarter of the cache. Few misses in a row are believed at once, one alone is not."""

NGRAM: Final = Prior(mean=0.5, weight=4)
"""Of prompt look-up: text is either copied or not, and which of them shows soon."""


def tokens_until(chance: float, acceptance: float, most: int = 2**31) -> int:
    """Tokens to draft until all are right with no more than this chance; one at the least, `most` at the most."""
    if acceptance <= 0:
        return 1
    return most if acceptance >= 1 else max(1, min(most, int(log(chance) / log(acceptance))))


class Acceptance:
    """The running estimate of one row with one drafter: a Beta distribution that forgets.

    Args:
        prior: what holds while nothing was seen.
        memory_tokens: a token counts 1/e of a fresh one when so many were tried after it.
    """

    def __init__(self, prior: Prior, memory_tokens: int = MEMORY_TOKENS) -> None:
        self._kept = 1 - 1 / memory_tokens
        self._hits = prior.mean * prior.weight
        self._misses = prior.weight - self._hits

    @property
    def probability(self) -> float:
        """That the next drafted token is accepted, given that all before it in its round were."""
        return self._hits / (self._hits + self._misses)

    def observe(self, drafted: int, accepted: int) -> None:
        """A round has ended. What was drafted after the first miss was drafted on a wrong text and shows nothing.

        Raises:
            ValueError: more tokens were accepted than drafted, or less than none.
        """
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{accepted} of {drafted} drafted tokens cannot have been accepted")
        missed = accepted < drafted
        kept = self._kept ** (accepted + missed)
        self._hits = self._hits * kept + accepted
        self._misses = self._misses * kept + missed

    def doubt(self) -> None:
        """What was seen may no longer hold: the estimate stays, but little new evidence will move it."""
        kept = min(1.0, DOUBT_TOKENS / (self._hits + self._misses))
        self._hits *= kept
        self._misses *= kept

"""A grammar without a parser, for the simulated vocabulary: what may come is a function of the tokens so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvikk.grammar import StructuredOutputsParams


class FakeGrammar:
    """Behaves as `kvikk.grammar.Grammar`: texts go on, become complete or get stuck; those named `endless` go on."""

    def __init__(self, name: str, vocabulary: int, eos: frozenset[int], text: tuple[int, ...] = ()) -> None:
        self.name, self.vocabulary, self.eos, self.text = name, vocabulary, eos, text
        self.is_broken = False
        """A token came that the mask forbade: as a draft may, and never in a text."""

    def _state(self) -> int:
        return hash((self.name == "strict", self.text)) % 97

    @property
    def _is_satisfied(self) -> bool:
        return bool(self.text) and (self.text[-1] in self.eos or self._state() % 3 == 0)

    def _text(self) -> NDArray[np.bool_]:
        allowed = np.zeros(self.vocabulary, dtype=np.bool_)
        goes_on = self.name == "endless" or self._state() >= 12
        if not self.text or (self.text[-1] not in self.eos and goes_on):
            allowed[self._state() % 5 :: 5] = True
            allowed[list(self.eos)] = False
        return allowed

    def mask(self) -> NDArray[np.bool_]:
        allowed = self._text()
        allowed[list(self.eos)] = self._is_satisfied and self.text[-1] not in self.eos
        return allowed & (not self.is_broken)

    def advance(self, token: int) -> None:
        self.is_broken = not self.mask()[token]
        self.text += (token,)

    def copy(self) -> FakeGrammar:
        copied = FakeGrammar(self.name, self.vocabulary, self.eos, self.text)
        copied.is_broken = self.is_broken
        return copied

    @property
    def is_complete(self) -> bool:
        return self._is_satisfied and not self._text().any()

    @property
    def failure(self) -> str | None:
        return None if self._is_satisfied or self._text().any() else "the fake grammar is stuck"


class FakeCompiler:
    def __init__(self, vocabulary: int, eos: frozenset[int]) -> None:
        self.vocabulary, self.eos = vocabulary, eos

    def compile(self, params: StructuredOutputsParams, *, may_end_early: bool = True) -> FakeGrammar:
        return FakeGrammar(str(params.regex), self.vocabulary, self.eos if may_end_early else frozenset())

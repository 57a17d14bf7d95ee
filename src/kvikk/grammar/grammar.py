"""One text's way through its grammar: what may come next, given what has come."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray


class Grammar:
    """The state of a grammar after some tokens. It moves by `advance` and `rollback` only.

    The matcher knows the tokens that make text. End tokens are dealt with here: they may come where the text satisfies
    the grammar, and nothing comes after them.

    Args:
        matcher: of a tokenizer that may have more tokens than the model, and whose end token the model does not have.
        vocabulary: how many tokens the model has.
        eos_token_ids: the tokens that may end the text before it is complete.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, eos_token_ids: Iterable[int] = ()) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos = frozenset(eos_token_ids)
        self._has_ended = False
        self._text_mask: NDArray[np.bool_] | None = None

    def mask(self) -> NDArray[np.bool_]:
        """Which tokens may come next: `[vocabulary]`, the caller's own. None at all is a `failure`."""
        allowed = self._text().copy()
        allowed[list(self._eos)] = self._is_satisfied and not self._has_ended
        return allowed

    def advance(self, token: int) -> None:
        """The text has gained a token. After one that the mask forbids, no other may come."""
        if token in self._eos:
            self._has_ended = True
        else:
            self._matcher.consume_token(token)
        self._text_mask = None

    def rollback(self, tokens: int) -> None:
        """The text has lost its last `tokens` tokens. Not after one that was forbidden."""
        if self._has_ended and tokens:
            self._has_ended = False
            tokens -= 1
        if tokens:
            self._matcher.rollback(tokens)
        self._text_mask = None

    def copy(self) -> Grammar:
        """The same state, from which another text can go on."""
        copied = Grammar(self._matcher.deep_copy(), self._vocabulary, self._eos)
        copied._has_ended = self._has_ended
        return copied

    @property
    def is_complete(self) -> bool:
        """Whether the text satisfies the grammar and no more text can follow."""
        return self._is_satisfied and not self._text().any()

    @property
    def failure(self) -> str | None:
        """Why no token may come although the text is not complete; None where one may, or it is."""
        if self._text().any() or self._is_satisfied:
            return None
        return reason_of(self._matcher.get_error()) or "no token of the model can follow"

    @property
    def _is_satisfied(self) -> bool:
        return self._has_ended or (self._matcher.is_accepting() and not self._matcher.is_error())

    def _text(self) -> NDArray[np.bool_]:
        """Which tokens may add text: `[vocabulary]`. Found once for each state."""
        if self._text_mask is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._text_mask = np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)
            self._text_mask[list(self._eos)] = False
            if self._has_ended or self._matcher.is_error():
                self._text_mask[:] = False
        return self._text_mask


def reason_of(error: str) -> str:
    """llguidance's reason on one line."""
    return " ".join(error.removesuffix("<non-verbose/>").split())

"""Which tokens a row holds: what penalties go by."""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class TokenHistory:
    """The distinct tokens of a row, and how often its text holds each; grows with the row.

    As penalties change the logits of these tokens only, they cost what a text is long, not what a vocabulary is large.

    Args:
        prompt: its tokens are held, with a count of 0.
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt))}
        self.tokens = array("q", self._slots)
        """Each token once."""
        self.counts = array("q", [0]) * len(self.tokens)
        """How often the text, without the prompt, holds each of them."""

    def append(self, token: int) -> None:
        """The text has gained a token."""
        slot = self._slots.setdefault(token, len(self.tokens))
        if slot == len(self.tokens):
            self.tokens.append(token)
            self.counts.append(0)
        self.counts[slot] += 1

    def copy(self) -> TokenHistory:
        """The same history, for a row that forks."""
        copied = TokenHistory()
        copied._slots = dict(self._slots)
        copied.tokens, copied.counts = self.tokens[:], self.counts[:]
        return copied

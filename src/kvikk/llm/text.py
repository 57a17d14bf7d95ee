"""From text to token ids, and back as they come: whole characters only, and never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvikk.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 6
_LONGEST_WINDOW = 64
"""Tokens that may pass without any text (skipped special ones) before the window moves on."""


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool = True, param: str = "prompt"
) -> list[int]:
    """The tokens of a text.

    Args:
        tokenizer: of the model.
        text: any.
        add_special_tokens: begin and end it as the tokenizer does.
        param: what the text is, for the error.

    Raises:
        InvalidRequest: it is not valid Unicode.
    """
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids
    except (TypeError, UnicodeError) as error:  # lone surrogates are no text
        raise InvalidRequest(f"{param} is not valid Unicode text: {error}", param=param) from error
    return ids


class Detokenizer:
    """Turns token ids into text one by one; the pieces joined are the text of all ids together.

    A token's text depends on its neighbours: bytes of one character may be spread over tokens, and some tokenizers
    write a space between words only. So a window of tokens is decoded, and what it adds to the window's start is the
    new text; nothing is given out while it ends within a character.

    Args:
        tokenizer: of the model.
        prompt_token_ids: what comes before; its last tokens are context.
        skip_special_tokens: leave special tokens out.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._given = len(self._window)
        self._known = self._decode(self._window)

    def push(self, token_id: int) -> str:
        """The text that a token completes; empty while a character is unfinished."""
        self._window.append(token_id)
        text = self._decode(self._window)
        is_waiting = text.endswith(REPLACEMENT) or text == self._known
        if is_waiting and len(self._window) < _LONGEST_WINDOW:
            return ""
        return self._give(text)

    def finish(self) -> str:
        """What is left when no token follows: an unfinished character shows as U+FFFD."""
        return self._give(self._decode(self._window))

    def _give(self, text: str) -> str:
        # Where the prompt ends within a character, the tokens that complete it change what was known: it is theirs.
        known = self._known if text.startswith(self._known) else self._known.rstrip(REPLACEMENT)
        new = text[len(known) :]
        self._window = self._window[self._given :]
        self._given = len(self._window)
        self._known = self._decode(self._window)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)


class StopMatcher:
    """Finds stop strings across token borders, and holds back what may become one.

    Args:
        stops: the strings that end the text.
        include: whether the stop string stays in the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is safe to give out. After a match, `matched` is set and nothing more comes.

        Without `may_stop`, a stop string that ends here does not count; one that ends in a later push does.
        """
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found and may_stop:
            at, self.matched = min(found, key=lambda match: (match[0], -len(match[1])))
            end = at + len(self.matched) if self._include else at
            return self._release(end)
        longest = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        return self._release(len(self._held) - longest)

    def finish(self) -> str:
        """What was held back: no stop string can complete it any more."""
        return self._release(len(self._held))

    def _release(self, end: int) -> str:
        text, self._held = self._held[:end], "" if self.matched else self._held[end:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` starts with, short of all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

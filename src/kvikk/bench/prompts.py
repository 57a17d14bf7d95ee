"""Texts of an exact number of tokens, made of random ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvikk.bench.match import token_ids
from kvikk.errors import ConfigError

TRIES = 100
UNDECODABLE = "\N{REPLACEMENT CHARACTER}"


class PromptWriter:
    """Writes texts of random tokens that a tokenizer reads back as so many tokens.

    Random tokens, decoded and read again, are others: pieces join, and halves of characters fall away. What is read
    back is therefore cut or filled up, and decoded again, until both agree.

    Args:
        tokenizer: the model's transformers tokenizer.
        seed: of the texts; one seed, one series of texts.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = np.random.default_rng(seed)
        special = set(tokenizer.all_special_ids)
        self._vocabulary = np.array([token for token in range(tokenizer.vocab_size) if token not in special])

    def write(self, tokens: int, after: Sequence[int] = ()) -> tuple[str, list[int]]:
        """A text and its tokens, special ones not counted.

        Args:
            tokens: how many are new.
            after: tokens that the text begins with, as they came from an earlier text.

        Raises:
            ConfigError: this tokenizer reads no text back as it should.
        """
        start, total = list(after), len(after) + tokens
        ids = start + self._draw(tokens)
        for _ in range(TRIES):
            text = self._decode(ids)
            found = self.encode(text)
            if len(found) == total and found[: len(start)] == start:
                return text, found
            kept = found[len(start) : total] if found[: len(start)] == start else []
            ids = start + kept + self._draw(total - len(start) - len(kept))
        raise ConfigError(
            f"{type(self._tokenizer).__name__} reads no random text back as {total} tokens: name another --tokenizer"
        )

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without the special ones that the model wants around them."""
        return token_ids(self._tokenizer, text)

    @property
    def added_tokens(self) -> int:
        """Special tokens that a server puts around a prompt."""
        return int(self._tokenizer.num_special_tokens_to_add())

    def token_ids(self, rows: int, tokens: int) -> list[list[int]]:
        """Rows of random token ids that need not be anybody's text."""
        return [self._draw(tokens) for _ in range(rows)]

    def _draw(self, tokens: int) -> list[int]:
        drawn: list[int] = self._random.choice(self._vocabulary, size=tokens).tolist()
        return drawn

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text.replace(UNDECODABLE, "")

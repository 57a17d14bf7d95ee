"""Real text as token ids: the sources of Python's standard library, no text used twice."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEPARATE = "\n\nQuestion: what is the following part of the library for, and who calls it?\n\n"


class TextSupply:
    """Hands out exact numbers of tokens, each from a module of its own.

    Args:
        tokenizer: the model's transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._sources = _library_sources()

    def take(self, tokens: int) -> list[int]:
        """The first `tokens` tokens of the next module that has as many.

        Raises:
            ValueError: the standard library has no long module left.
        """
        for text in self._sources:
            # A token is at least one character: a shorter text cannot do, and the end of a long one is not needed.
            if len(text) < tokens:
                continue
            ids = self._tokenizer(text[: 8 * tokens], add_special_tokens=False).input_ids
            if len(ids) >= tokens:
                return ids[:tokens]
        raise ValueError(f"no module of the standard library is left with {tokens} tokens")

    def questions(self, count: int, tokens: int) -> list[list[int]]:
        """Endings of `tokens` tokens each: the same opening, then text of a module of its own."""
        opening = self._tokenizer(SEPARATE, add_special_tokens=False).input_ids
        return [opening + self.take(tokens - len(opening)) for _ in range(count)]


def _library_sources() -> Iterator[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        if not path.name.startswith("_"):
            yield text

"""Prompt look-up: a row's own text as its drafter (Saxena, https://github.com/apoorvumang/prompt-lookup-decoding)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvikk.errors import ConfigError

FACTOR: Final = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: a multiplier whose products' upper bits depend on all bits below them."""

WORD: Final = 2**64 - 1


class PromptLookup:
    """Proposes what followed the last tokens of a row where they stood before.

    The prompt is indexed once, at 24 bytes a token or fewer and some 0.1 us; the text in a dictionary, as it grows.

    Args:
        prompt: the tokens known now.
        longest: tokens of the longest suffix that is looked up.
        least: of the shortest.

    Raises:
        ConfigError: the lengths are no range of whole numbers from 1 on.
    """

    def __init__(self, prompt: Iterable[int], *, longest: int = 4, least: int = 2) -> None:
        if not 1 <= least <= longest:
            raise ConfigError(
                f"n-grams of {least} to {longest} tokens cannot be looked up: "
                "the least length must be 1 or more, and the longest no less than that"
            )
        self._sizes = range(least, longest + 1)
        self._tokens = array("i", prompt)
        self._prompt = _PromptGrams(self._tokens, self._sizes)
        self._text: dict[bytes, int] = {}
        """Where each n-gram that ends in the text ends last, its end excluded, by the bytes of its tokens. The text's
        own end has no successor."""

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens have been committed. They are never taken back."""
        known, sizes, text = self._tokens, self._sizes, self._text
        first, width = len(known), known.itemsize
        start = max(0, first - sizes[-1])
        known.extend(tokens)
        grams = known[start:].tobytes()
        for stop in range(first, len(known)):  # of the n-grams that have a successor from now on
            for size in sizes:
                if size <= stop:
                    text[grams[(stop - size - start) * width : (stop - start) * width]] = stop

    def propose(self, most: int, then: Sequence[int] = ()) -> list[int]:
        """The `most` tokens after the latest earlier place of the longest suffix that has one; none where none has.

        Where that place is less than `most` tokens back, the proposal goes on from itself, so that a text that has
        begun to repeat is taken to go on repeating.

        Args:
            most: tokens to propose.
            then: tokens that may follow those committed; the suffix ends with them, and no place among them is found.
        """
        committed = len(self._tokens)
        self._tokens.extend(then)  # for the while: a copy of a long text would take longer than all the rest
        try:
            return self._propose(most)
        finally:
            del self._tokens[committed:]

    def _propose(self, most: int) -> list[int]:
        tokens, found = self._tokens, 0
        for size in self._sizes:  # upwards: most suffixes are new, and one look at a short one tells it of the longer
            if size >= len(tokens):
                break
            suffix = tokens[-size:]
            stop = self._text.get(suffix.tobytes()) or self._prompt.find(suffix)
            if not stop or tokens[stop - size : stop] != suffix:
                break
            found = stop
        if not found:
            return []
        times = -(-most // (len(tokens) - found))
        return (tokens[found : found + most] * times)[:most].tolist()

    def copy(self) -> PromptLookup:
        """The same, for a row that forks. The index of the prompt is shared."""
        copied = copy(self)
        copied._tokens, copied._text = self._tokens[:], dict(self._text)
        return copied


class _PromptGrams:
    """Where each n-gram of a prompt ends last, its end excluded; those that end with the prompt have no successor.

    For each n one sorted array of words that hold a hash in their upper bits and a place in the lower ones, so that
    one plain sort both groups equal n-grams and orders their places. Two n-grams can have one hash (of 47 bits for
    100,000 tokens): the later one hides the other then, and is found in its place.

    Args:
        tokens: the prompt.
        sizes: every n, ascending without gaps.
    """

    def __init__(self, tokens: array[int], sizes: range) -> None:
        words = np.asarray(tokens).astype(np.uint64)
        hashes = words
        self._place_bits = len(tokens).bit_length()
        self._ends: dict[int, NDArray[np.uint64]] = {}
        for size in range(1, min(sizes.stop, len(tokens))):
            if size > 1:
                hashes = hashes[1:] * np.uint64(FACTOR) + words[: len(hashes) - 1]
            if size in sizes:
                self._ends[size] = self._latest(hashes[:-1], size)

    def _latest(self, hashes: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
        """The words of the last n-gram of each hash, ascending; `hashes` are in the order of their places."""
        shift = np.uint64(self._place_bits)
        ends = (hashes * np.uint64(FACTOR)) >> shift << shift
        ends |= np.arange(size, size + len(hashes), dtype=np.uint64)
        ends.sort()
        groups = ends >> shift
        latest: NDArray[np.uint64] = ends[np.append(groups[1:] != groups[:-1], True)]
        return latest

    def find(self, gram: array[int]) -> int | None:
        """Where it ends last, or None. Compare what is there with what was asked for."""
        ends = self._ends.get(len(gram))
        if ends is None:
            return None
        hashed = 0
        for token in reversed(gram):
            hashed = (hashed * FACTOR + token) & WORD
        group = (hashed * FACTOR & WORD) >> self._place_bits
        index = ends.searchsorted(np.uint64(group << self._place_bits))
        if index == len(ends):
            return None
        word = int(ends[index])
        return word & ((1 << self._place_bits) - 1) if word >> self._place_bits == group else None

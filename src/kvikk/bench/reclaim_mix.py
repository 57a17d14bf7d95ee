"""The requests of `kvikk bench reclaim`: how long they are, and what stands in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvikk.bench.texts import Encode, pieces

CHAT_MEDIANS: Final = (220, 180)
"""Tokens of a prompt and of an answer in ShareGPT's first turns, of which half are shorter."""
CHAT_SPREAD: Final = 1.0
"""Of their logarithms: the longest tenth has 3.6 times the median and more."""
MIXES: Final = ("chat", "documents")

Prompts = Callable[[Sequence[int]], Iterable[list[int]]]
"""Token ids of prompts of these lengths."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request of a mix."""

    prompt: list[int]
    output_tokens: int

    def blocks(self, page_size: int) -> int:
        """What it takes in the end when nothing of it is dropped."""
        return -(-(len(self.prompt) + self.output_tokens) // page_size)


def random_prompts(vocabulary: int, seed: int) -> Prompts:
    """Prompts of random tokens: what a policy drops of them frees as much as of a text."""
    rng = np.random.default_rng([seed, 1])
    return lambda lengths: (rng.integers(0, vocabulary, length).tolist() for length in lengths)


def real_prompts(source: str, encode: Encode) -> Prompts:
    """Prompts cut from real text, none of which begins where another does.

    Args:
        source: see `texts.pieces`.
        encode: of the model's tokenizer.
    """
    return lambda lengths: pieces(source, lengths, encode)


def lengths_of(mix: str, requests: int, *, longest: int, output_len: int, seed: int) -> list[tuple[int, int]]:
    """Tokens of the prompt and of the answer of each request of a mix."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(requests):
        if mix == "chat":
            prompt, output = (int(median * np.exp(rng.normal() * CHAT_SPREAD)) for median in CHAT_MEDIANS)
        else:
            prompt = int(rng.integers(longest // 4, longest + 1))
            output = int(rng.integers(max(1, output_len // 4), output_len + 1))
        made.append((min(max(prompt, 16), longest), min(max(output, 4), output_len)))
    return made


def jobs(lengths: Sequence[tuple[int, int]], prompts: Prompts) -> list[Job]:
    """Requests of these lengths."""
    texts = prompts([prompt for prompt, _ in lengths])
    return [Job(text, output) for text, (_, output) in zip(texts, lengths, strict=True)]

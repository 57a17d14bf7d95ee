"""What is measured, and how a worker's seconds become tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from peers.prompts import TextSupply

LONG, SHORT = 65, 1
"""Tokens of the two runs whose difference is the decoding of 64 tokens a row."""
DOCUMENT, QUESTION, ASKERS = 2048, 50, 8

WORKS = (
    "prefill_1024",
    "prefill_3500",
    "decode_1x1024",
    "decode_1x3500",
    "decode_8x1024",
    "cold_prefix",
    "warm_prefix",
)

Tokens = list[list[int]]


class Generator(Protocol):
    """An engine as the works see it: a worker process, or anything that answers alike."""

    has_prefix_cache: bool

    def generate(self, prompts: Tokens, tokens: int) -> tuple[float, Tokens]: ...

    def reset(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Work:
    """One row of the table.

    Args:
        name: one of `WORKS`.
        kind: `prefill` is cold, `warm` is the same with every prompt cached, `decode` leaves the prompt out.
        prompts: token ids.
    """

    name: str
    kind: Literal["prefill", "warm", "decode"]
    prompts: Tokens

    @property
    def answer_tokens(self) -> int:
        """Tokens of an answer that are compared with the reference."""
        return LONG if self.kind == "decode" else SHORT

    @property
    def counted_tokens(self) -> int:
        """Tokens that the measured seconds are for."""
        if self.kind == "decode":
            return (LONG - SHORT) * len(self.prompts)
        return sum(len(prompt) for prompt in self.prompts)

    def measure(self, engine: Generator) -> tuple[float, Tokens]:
        """The seconds of this work, and the tokens that came out.

        A decode is the difference of two runs on the same prompts; an engine with a prefix cache has them cached
        before, so that the noise of two prefills is not in it.
        """
        if self.kind == "prefill":
            engine.reset()
        elif engine.has_prefix_cache:
            engine.generate(self.prompts, SHORT)
        short, tokens = engine.generate(self.prompts, SHORT)
        if self.kind != "decode":
            return short, tokens
        long, tokens = engine.generate(self.prompts, LONG)
        return long - short, tokens


def make_works(supply: TextSupply, names: Sequence[str] = WORKS) -> list[Work]:
    """All works with their prompts, in the order of `WORKS`; the prompts of one do not depend on which others run."""
    document = supply.take(DOCUMENT)
    shared = [document + question for question in supply.questions(ASKERS, QUESTION)]
    made = [
        Work(name="prefill_1024", kind="prefill", prompts=[supply.take(1024)]),
        Work(name="prefill_3500", kind="prefill", prompts=[supply.take(3500)]),
        Work(name="decode_1x1024", kind="decode", prompts=[supply.take(1024)]),
        Work(name="decode_1x3500", kind="decode", prompts=[supply.take(3500)]),
        Work(name="decode_8x1024", kind="decode", prompts=[supply.take(1024) for _ in range(8)]),
        Work(name="cold_prefix", kind="prefill", prompts=shared),
        Work(name="warm_prefix", kind="warm", prompts=shared),
    ]
    return [work for work in made if work.name in names]


def token_match(answers: Tokens, reference: Tokens) -> float:
    """Share of positions at which the tokens are equal."""
    pairs = [pair for row, right in zip(answers, reference, strict=True) for pair in zip(row, right, strict=True)]
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs)

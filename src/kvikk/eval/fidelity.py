"""How far what the model would say next is from what it would say with the full cache, on real text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from kvikk.bench.texts import Document
from kvikk.eval.grid import FULL_CELL, Cell, GridConfig
from kvikk.eval.subject import Exam, Outcome, Subject
from kvikk.eval.suite import Row, held_figures
from kvikk.eval.teacher import Observer

UNMEASURED: Final = 1
"""Of the forced tokens, so many come before the first trigger: the model said them with the full cache."""


@dataclass(frozen=True)
class Distance:
    """What was seen at the forced positions of some documents, each figure a number for each position.

    Args:
        kl: nats, of the full cache's distribution from the other.
        agrees: whether both have the same likeliest token.
        nll: of the true next token, in nats.
        full_nll: the same with the full cache.
    """

    kl: list[float] = field(default_factory=list)
    agrees: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    full_nll: list[float] = field(default_factory=list)

    def add(self, full: Tensor, other: Tensor, token: int) -> None:
        """A position: `[vocabulary]` log-probabilities twice, and the token that came."""
        self.kl.append(float(kl_divergence(full, other)))
        self.agrees.append(bool(full.argmax() == other.argmax()))
        self.nll.append(-float(other[token]))
        self.full_nll.append(-float(full[token]))

    def figures(self) -> dict[str, float | int]:
        """As a row of results has them."""
        return {
            "samples": len(self.kl),
            "kl_mean": fmean(self.kl),
            "kl_median": float(np.median(self.kl)),
            "kl_p95": float(np.percentile(self.kl, 95)),
            "top1": fmean(self.agrees),
            "perplexity": math.exp(fmean(self.nll)),
            "full_perplexity": math.exp(fmean(self.full_nll)),
        }


def kl_divergence(full: Tensor, other: Tensor) -> Tensor:
    """KL(full || other) in nats, of log-probabilities over the last dimension; a token of probability 0 adds nothing.

    Rounding can make the sum of two nearly equal ones a little negative: it is 0 then.
    """
    full, other = full.double(), other.double()
    terms = torch.where(full.isneginf(), 0.0, full.exp() * (full - other))
    return terms.sum(-1).clamp(min=0)


class Fidelity:
    """Documents are prompts up to a position, and from there on they are forced, token by token.

    Args:
        subject: what is measured.
        reference: whose full cache it is compared with; the subject itself unless that stores K and V otherwise.
        documents: each of so many tokens as the prompt has, and the forced ones.
        forced: tokens that are forced, those that are not measured among them.
        speed_tokens: tokens that are generated to measure the speed; 0 measures none.
        grid: says how a cell is asked for.
    """

    name = "fidelity"

    def __init__(
        self,
        subject: Subject,
        reference: Subject,
        documents: Sequence[Document],
        *,
        forced: int,
        speed_tokens: int,
        grid: GridConfig,
    ) -> None:
        self._subject = subject
        self._reference = reference
        self._documents = documents
        self._forced = forced
        self._speed_tokens = speed_tokens
        self._grid = grid

    def rows(self, cell: Cell) -> list[Row]:
        """A row for each kind of text."""
        asked = self._grid.kv_cache(cell)
        reference, full_outcomes = self._full
        distances = {document.kind: Distance() for document in self._documents}
        outcomes = self._force(
            self._subject,
            [self._compare(distances, *each) for each in zip(self._documents, reference, strict=True)],
            asked,
        )
        speeds = self._speeds(asked)
        found = []
        for kind, distance in distances.items():
            of_kind = [index for index, document in enumerate(self._documents) if document.kind == kind]
            held = held_figures(
                [outcomes[index] for index in of_kind],
                [full_outcomes[index] for index in of_kind],
                is_same_format=self._subject is self._reference,
            )
            length = len(self._documents[of_kind[0]].tokens) - self._forced
            found.append({"task": kind, "length": length} | distance.figures() | held | speeds)
        return found

    @cached_property
    def _full(self) -> tuple[list[Tensor], list[Outcome]]:
        """The full cache's log-probabilities, `[forced, vocabulary]` of each document, and what it held."""
        seen: list[list[Tensor]] = [[] for _ in self._documents]

        def keep(index: int) -> Observer:
            return lambda _, logprobs: seen[index].append(logprobs.cpu())

        full = self._grid.kv_cache(FULL_CELL)
        outcomes = self._force(self._reference, [keep(index) for index in range(len(self._documents))], full)
        return [torch.stack(logprobs) for logprobs in seen], outcomes

    def _compare(self, distances: Mapping[str, Distance], document: Document, reference: Tensor) -> Observer:
        """Adds each measured position of a document to the distance of its kind."""
        continuation = document.tokens[-self._forced :]

        def observe(index: int, logprobs: Tensor) -> None:
            if index >= UNMEASURED:
                distances[document.kind].add(reference[index], logprobs.cpu(), continuation[index])

        return observe

    def _force(self, subject: Subject, observers: Sequence[Observer], asked: Mapping[str, Any]) -> list[Outcome]:
        exams = [
            Exam(prompt=document.tokens[: -self._forced], forced=document.tokens[-self._forced :], observe=observe)
            for document, observe in zip(self._documents, observers, strict=True)
        ]
        return subject.sit(exams, asked)

    def _speeds(self, asked: Mapping[str, Any]) -> dict[str, float | None]:
        """Of this way and of the full cache, one right after the other, so that what slows a machine slows both."""
        prompts = [document.tokens[: -self._forced] for document in self._documents]
        if not self._speed_tokens:
            return {}
        return {
            "tokens_per_s": self._subject.decode_rate(prompts, self._speed_tokens, asked),
            "full_tokens_per_s": self._reference.decode_rate(
                prompts, self._speed_tokens, self._grid.kv_cache(FULL_CELL)
            ),
        }

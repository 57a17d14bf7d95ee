"""The step descriptor: everything irregular about a step, packed by the host into one buffer that is copied once.

Layout, in int32 words: a header; `singles` records for rows with one query; `runs` records for rows with several; the
`outputs` whose next token is wanted; the token ids of the runs; then, as many as there are, commands to seats and
table writes. Captured graphs read it at fixed places; what comes last is found through the header.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HEADER: Final = 8
"""Words: table writes, where they begin, sampling commands, where they begin, runs."""
SINGLE: Final = 4
"""Words of a single: seat, flags, token, position."""
RUN: Final = 4
"""Words of a run: seat, first position, tokens, first token (negated and less one: K and V are not stored)."""
OUTPUT: Final = 2
"""Words of an output: token of the step, seat (-1: there is no such output)."""
COMMAND: Final = 11
"""Words of a command to a seat: seat, temperature, top-k, top-p, min-p, seed (two words), choice, where its tail
begins, first position whose query is kept, and the one after the last."""
WRITE: Final = 2
"""Words of a table write: place in the flattened tables, block."""

IS_ROW: Final = 1
FROM_DEVICE: Final = 2
"""Token and position are those that the device holds for the seat."""
IS_STORED: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """How much a step can hold; a graph is captured for each.

    Args:
        singles: rows with one query.
        runs: rows with several.
        tokens: queries of these runs.
        outputs: tokens whose successor is sampled.
        short_runs: queries of the longest run, where all runs verify a few drafts; 0: they are of any length.
        ragged: rows may have bodies, which take a plan for each layer.
        watched: queries may be kept.
    """

    singles: int
    runs: int
    tokens: int
    outputs: int
    short_runs: int = 0
    ragged: bool = False
    watched: bool = False

    @property
    def all_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return self.singles + self.tokens

    @property
    def runs_at(self) -> int:
        """Where the runs' records begin."""
        return HEADER + SINGLE * self.singles

    @property
    def outputs_at(self) -> int:
        """Where the outputs begin."""
        return self.runs_at + RUN * self.runs

    @property
    def tokens_at(self) -> int:
        """Where the runs' token ids begin."""
        return self.outputs_at + OUTPUT * self.outputs

    @property
    def fixed_words(self) -> int:
        """Words that every step of this shape has."""
        return self.tokens_at + self.tokens


@dataclass(slots=True)
class StepContent:
    """What the host says in one step, as plain numbers.

    Args:
        singles: flat, `SINGLE` numbers each.
        runs: flat, `RUN` numbers each.
        outputs: flat, `OUTPUT` numbers each.
        tokens: of the runs.
        commands: flat, `COMMAND` numbers each.
        writes: flat, `WRITE` numbers each.
        longest_run: queries of the longest run.
        only_verifies: no run is of a prompt.
        ragged: whether a row has a body.
        watched: whether queries of a row are kept.
    """

    singles: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    tokens: array[int] = field(default_factory=lambda: array("i"))
    commands: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    longest_run: int = 0
    only_verifies: bool = True
    ragged: bool = False
    watched: bool = False

    def going_on(self) -> StepContent:
        """The same step again, of rows with one query, which go on from the tokens that the device has sampled."""
        singles = self.singles.copy()
        singles[1::SINGLE] = [flags | FROM_DEVICE for flags in singles[1::SINGLE]]
        return StepContent(singles=singles, outputs=self.outputs, ragged=self.ragged, watched=self.watched)

    def words(self, shape: StepShape) -> int:
        """How long the packed descriptor is."""
        return shape.fixed_words + len(self.commands) + len(self.writes)


class DescriptorBuffer:
    """Pinned words on the host and their copy on the device, each filled anew for every step.

    Two host buffers take turns, so that a step can be packed while the copy of the one before it is on its way.

    Args:
        words: of each buffer.
        device: of the copy.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.device_words: Tensor = torch.zeros(words, dtype=torch.int32, device=device)
        self._host = [torch.zeros(words, dtype=torch.int32, pin_memory=is_cuda) for _ in range(2)]
        self._words: list[NDArray[np.int32]] = [host.numpy() for host in self._host]
        self._copied = [torch.cuda.Event() if is_cuda else None for _ in range(2)]
        self._turn = 0

    def send(self, content: StepContent, shape: StepShape) -> None:
        """Pack a step and start its copy to the device: the only one of the step."""
        self._turn ^= 1
        host, event = self._host[self._turn], self._copied[self._turn]
        if event is not None:
            event.synchronize()
        used = _pack(self._words[self._turn], content, shape)
        self.device_words[:used].copy_(host[:used], non_blocking=True)
        if event is not None:
            event.record()


def _pack(words: NDArray[np.int32], content: StepContent, shape: StepShape) -> int:
    """Write a step's words; returns how many."""
    commands_at = shape.fixed_words
    writes_at = commands_at + len(content.commands)
    end = writes_at + len(content.writes)
    runs = len(content.runs) // RUN
    words[:HEADER] = 0
    words[:5] = (len(content.writes) // WRITE, writes_at, len(content.commands) // COMMAND, commands_at, runs)
    for at, stop, numbers, spare in (
        (HEADER, shape.runs_at, content.singles, 0),
        (shape.runs_at, shape.outputs_at, content.runs, 0),
        (shape.outputs_at, shape.tokens_at, content.outputs, -1),
        (shape.tokens_at, commands_at, content.tokens, 0),
        (commands_at, writes_at, content.commands, 0),
        (writes_at, end, content.writes, 0),
    ):
        filled = at + len(numbers)
        words[at:filled] = numbers
        if filled < stop:
            words[filled:stop] = spare
    return end

"""A request and its rows: what is known, what is computed, what is still to compute."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from kvikk.attention.plan import QueryRun
from kvikk.engine.history import TokenHistory
from kvikk.engine.logprobs import Logprob
from kvikk.engine.sampling_params import SamplingParams
from kvikk.grammar import Grammar
from kvikk.prefix import extend_keys
from kvikk.types import BlockId, BlockKey, Position

UNKNOWN: Final = -1
"""Stands for a token that is on the device only."""


NONE_SCORED: Final = range(0)


class FinishReason(StrEnum):
    """Why a row ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Segment(NamedTuple):
    """Positions `start..stop-1` of a row that are known and not computed yet."""

    start: int
    stop: int


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and the rows that answer it. `number` counts requests in the order of their arrival."""

    id: str
    number: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    arrival_s: float
    queued_s: float | None = None
    """Seconds from arrival until it was first scheduled."""
    rows: list[Row] = field(default_factory=list)
    aborted_choices: set[int] = field(default_factory=set)
    """Texts that were given up before the row forked."""
    prompt_logprobs: list[tuple[Logprob, ...] | None] | None = None
    """One for each token of the prompt, as far as known; None for the first. None altogether when not asked for."""
    is_plain: bool = True
    """Nothing shapes its tokens but temperature, top-k, top-p and min-p, and nothing is told of them."""
    cached_tokens: int = 0
    held_blocks: int = 0
    peak_blocks: int = 0

    def unscored(self, stop: int) -> range:
        """Positions below `stop` that are computed to tell the log-probability of the prompt token after them."""
        if self.prompt_logprobs is None:
            return NONE_SCORED
        return range(len(self.prompt_logprobs) - 1, min(stop, len(self.prompt_token_ids) - 1))

    def note_block(self) -> None:
        """One of the rows took a fresh block."""
        self.held_blocks += 1
        self.peak_blocks = max(self.peak_blocks, self.held_blocks)

    def recount_blocks(self) -> None:
        """The rows' blocks changed otherwise: count the distinct ones."""
        self.held_blocks = len({block for row in self.rows for block in row.blocks})
        self.peak_blocks = max(self.peak_blocks, self.held_blocks)


@dataclass(slots=True, eq=False)
class Row:
    """One sequence of a request. Its progress is the list of segments still to compute, never a count.

    A decoding row has one segment of one position, its last token. A row is waiting while it has no blocks.
    """

    request: Request
    choice: int
    tokens: list[int]
    keys: list[BlockKey]
    """Parent of all, then the keys of the full blocks, as far as they have been needed."""
    blocks: list[BlockId] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    is_query_only: bool = False
    """The last segment is the last token alone, whose block was cached: its K and V are there already."""
    indexed_blocks: int = 0
    unforked: int = 1
    """Texts that this row stands for: `n` until the first token is sampled."""
    preemptions: int = 0
    computed_once: int = 0
    """Positions below this had been computed when the row was last preempted."""
    history: TokenHistory | None = None
    """Kept for penalties alone."""
    grammar: Grammar | None = None
    """The state after all tokens of the text."""
    pending: int = 0
    """Tokens at the end of `tokens` that are sampled on the device and not known here yet."""
    waits_for: BlockKey | None = None
    is_running: bool = False
    finish_reason: FinishReason | None = None

    @property
    def id(self) -> str:
        """For logs: request and choice."""
        return f"{self.request.id}/{self.choice}"

    @property
    def front(self) -> int:
        """First position not computed: everything before it is in the blocks."""
        return self.segments[0].start if self.segments else len(self.tokens)

    @property
    def missing_tokens(self) -> int:
        """Positions still to compute."""
        if len(self.segments) == 1:
            start, stop = self.segments[0]
            return stop - start
        return sum(stop - start for start, stop in self.segments)

    @property
    def known(self) -> int:
        """Tokens whose values are known."""
        return len(self.tokens) - self.pending

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt whose values are known."""
        return self.tokens[len(self.request.prompt_token_ids) : self.known]

    def expect(self, *, is_last: bool) -> None:
        """A token is being sampled: a place is kept for it. Unless it is the last, it is what the next step computes.

        The device knows its value before the host does.
        """
        self.tokens.append(UNKNOWN)
        self.pending += 1
        self.segments = [] if is_last else [Segment(len(self.tokens) - 1, len(self.tokens))]

    def append(self, token: int) -> None:
        """A sampled token: it takes the first place that was kept, or is what the next step computes."""
        if self.pending:
            self.tokens[self.known] = token
            self.pending -= 1
        else:
            self.tokens.append(token)
            self.segments = [Segment(len(self.tokens) - 1, len(self.tokens))]
        if self.history is not None:
            self.history.append(token)

    def settle(self) -> None:
        """The row ends here: places that were kept stay empty."""
        del self.tokens[self.known :]
        self.pending = 0

    def fork(self, choice: int) -> Row:
        """Another text from here on; it holds no blocks yet."""
        return Row(
            request=self.request,
            choice=choice,
            tokens=list(self.tokens),
            keys=list(self.keys),
            history=None if self.history is None else self.history.copy(),
            grammar=None if self.grammar is None else self.grammar.copy(),
        )

    def take(self, budget: int) -> list[QueryRun]:
        """Take up to `budget` positions off the front of the segments, as runs to compute now."""
        if len(self.segments) == 1 and self.segments[0].stop - self.segments[0].start <= budget:  # as in decoding
            ((start, stop),) = self.segments
            runs = [QueryRun(self.blocks, Position(start), stop - start, not self.is_query_only)]
            self.segments, self.is_query_only = [], False
            return runs
        runs = []
        while self.segments and budget:
            start, stop = self.segments.pop(0)
            cut = min(stop, start + budget)
            budget -= cut - start
            if cut < stop:
                self.segments.insert(0, Segment(cut, stop))
            write = not (self.is_query_only and not self.segments)
            runs.append(QueryRun(self.blocks, Position(start), cut - start, write))
        if not self.segments:
            self.is_query_only = False
        return runs

    def full_block_keys(self, page_size: int) -> list[BlockKey]:
        """The keys of all full blocks of the tokens known now."""
        full = extend_keys(self.keys, self.tokens, page_size, known=self.known)
        return self.keys[1 : full + 1]

    def reusable_keys(self, page_size: int) -> list[BlockKey]:
        """Those of blocks that need not be computed if they are cached: positions still to be scored must be."""
        keys = self.full_block_keys(page_size)
        unscored = self.request.unscored(len(self.tokens))
        return keys[: unscored.start // page_size] if unscored else keys

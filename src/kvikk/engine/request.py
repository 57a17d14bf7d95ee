"""A request and its rows: what is known, what is computed, what is still to compute."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

from kvikk.attention.plan import QueryRun
from kvikk.compress import KVCacheParams
from kvikk.engine.drafting import NGRAM, SMALL_CACHE, Acceptance, LookupBelow, PromptLookup, RowDrafts
from kvikk.engine.history import TokenHistory
from kvikk.engine.logprobs import Logprob
from kvikk.engine.queries import WatchedQueries
from kvikk.engine.sampling_params import SamplingParams
from kvikk.grammar import Grammar
from kvikk.memory import Body
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
    """Positions `start..stop-1` of a row that are known and still to compute.

    `write` is False where their K and V are cached already: they are computed for the sake of their queries.
    """

    start: int
    stop: int
    write: bool = True


class Copying(Protocol):
    """Blocks that are being copied beside the steps: `memory.Copying`, or a simulation of it."""

    @property
    def is_done(self) -> bool:
        """Whether all has been copied."""
        ...

    @property
    def seconds(self) -> float:
        """How long it took. It is done."""
        ...

    def wait(self) -> None:
        """Until it is done."""
        ...

    def settle(self) -> None:
        """Whatever is asked of the device from now on happens after it."""
        ...


@dataclass(frozen=True, slots=True)
class Saved:
    """A compressed row's bytes while it has no memory: it cannot be computed again.

    Args:
        bytes: as `KVBytes.save` gave them.
        frames: of the body.
        blocks: of the tail.
    """

    bytes: Any
    frames: int
    blocks: int


@dataclass(slots=True)
class KVCacheUsage:
    """What compression did for a request, all its rows together.

    Args:
        policy: its name.
        lossless: whether all is kept, and what is said of tokens and bytes is of the small caches to draft with.
        compactions: how often a row was compacted.
        tokens: logical tokens of the row that was compacted last, at that time.
        kept_tokens: of them, those it kept, in the mean over lanes.
        kept_bytes: of these, over all lanes.
        frames_freed: given back to the pool, less those taken to copy to.
        blocks_freed: what those amount to.
        rounds: verifications of drafts.
        drafted: tokens that were verified.
        accepted: of these, the ones that the whole cache would have said too.
        moved_bytes: of its KV that went to the host's memory and came back from it, to be verified on.
    """

    policy: str
    lossless: bool = False
    compactions: int = 0
    tokens: int = 0
    kept_tokens: float = 0.0
    kept_bytes: int = 0
    frames_freed: int = 0
    blocks_freed: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    moved_bytes: int = 0


@dataclass(slots=True, eq=False)
class Rest:
    """What the host's memory holds of a lossless row: its first blocks, for as long as it runs.

    The row is *whole* while the device has these blocks too, and *parted* while the host alone does: its own blocks
    begin behind them then. It is *leased* where it got them back to be verified, and will part with them again.

    Args:
        slots: where they lie, in order.
        stop: the first position behind them.
        saving: the copying of the last of them to the host.
        is_parted: whether the host alone has them.
        arriving: of a parted row, blocks that are being filled with them; none: it has not been its turn.
        loading: the copying of those that were not cached; None: all were.
        loading_blocks: how many those are.
        is_leased: of a whole row, whether it is so for one verification.
        is_verified: of a leased row, whether that has been planned.
        is_leaving: of a whole row, whether it parts as soon as no step computes it: none is planned with it until then.
    """

    slots: list[int]
    stop: Position
    saving: Copying
    is_parted: bool = False
    arriving: list[BlockId] = field(default_factory=list)
    loading: Copying | None = None
    loading_blocks: int = 0
    is_leased: bool = False
    is_verified: bool = False
    is_leaving: bool = False


@dataclass(slots=True, eq=False)
class Drafting:
    """What a lossless row drafts with, and how far it is in its round.

    Args:
        cache: its small cache, as a row of its own: the body is a copy of what the policy keeps, the blocks are those
            of the row's tail, and its tokens run ahead of the row's. None: there is none.
        lookup: where it looks its drafts up instead; None: it does not.
        below: what the small cache has its own drafts proposed by; None: it drafts token by token.
        record: what came of its drafts so far.
        length: tokens to draft in this round; 0: none has begun.
        base: tokens of the row when its last round began: those that its small cache has too.
        is_over: whether the small cache has nothing more to say in this round: it came to an end token, or to no token.
        refusals: how often there was no room for a small cache, or its room was needed, since there last was one.
    """

    record: RowDrafts
    cache: Row | None = None
    lookup: PromptLookup | None = None
    below: LookupBelow | None = None
    length: int = 0
    base: int = 0
    is_over: bool = False
    refusals: int = 0

    @classmethod
    def of(cls, params: KVCacheParams | None, tokens: Sequence[int]) -> Drafting | None:
        """What a new row drafts with; None when it is not lossless."""
        if params is None or not params.lossless:
            return None
        if params.drafts_by_lookup:
            return cls(RowDrafts(Acceptance(NGRAM)), lookup=PromptLookup(tokens))
        return cls(RowDrafts(Acceptance(SMALL_CACHE)), below=LookupBelow(tokens) if params.looks_up_below else None)

    def fork(self) -> Drafting:
        """What a text that begins here drafts with: no small cache yet, and the same index of the prompt."""
        if self.lookup is None:
            below = None if self.below is None else self.below.copy()
            return Drafting(RowDrafts(Acceptance(SMALL_CACHE)), below=below)
        return Drafting(RowDrafts(Acceptance(NGRAM)), lookup=self.lookup.copy())

    @property
    def missing(self) -> int:
        """Tokens of the round that are still to be drafted."""
        return self.length - self.drafted

    @property
    def drafted(self) -> int:
        """How many tokens have been drafted in this round."""
        return 0 if self.cache is None or not self.length else len(self.cache.tokens) - self.base

    @property
    def tokens(self) -> array[int]:
        """What has been drafted in this round; the last ones may not be known yet."""
        return array("i") if self.cache is None or not self.length else self.cache.tokens[self.base :]

    def begin(self, row: Row, length: int, page_size: int) -> None:
        """Let the small cache go on from where its row is; all blocks that it will write to are the row's own."""
        cache = self.cache
        assert cache is not None
        cache.pending = 0
        cache.tokens[self.base :] = row.tokens[self.base :]
        self.base, self.length, self.is_over = len(row.tokens), length, False
        cache.blocks = row.blocks[(cache.tail_start - row.tail_start) // page_size :]
        cache.segments = [Segment(self.base - 1, self.base)]
        cache.history = None if row.history is None else row.history.copy()
        cache.grammar = None if row.grammar is None else row.grammar.copy()

    def go_on(self, row: Row, length: int, page_size: int) -> None:
        """Let the small cache draft some tokens more in the round that it is in, as many in all."""
        cache = self.cache
        assert cache is not None
        self.length = length
        cache.blocks += row.blocks[(cache.tail_start - row.tail_start) // page_size + len(cache.blocks) :]


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and the rows that answer it. `number` counts requests in the order of their arrival."""

    id: str
    number: int
    prompt_token_ids: array[int]
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
    plain_from: int = 0
    """Of a sequence of so many tokens that holds of the next one: end tokens are barred before `min_tokens`."""
    max_length: int = 2**31
    """Tokens of a sequence, the prompt's included: it ends with the last of them."""
    cached_tokens: int = 0
    kv_cache: KVCacheParams | None = None
    """How its rows are compressed; None: never."""
    kv_usage: KVCacheUsage | None = None
    """What came of that."""
    held_blocks: int = 0
    peak_blocks: int = 0

    def unscored(self, stop: int) -> range:
        """Positions below `stop` that are computed to tell the log-probability of the prompt token after them."""
        if self.prompt_logprobs is None:
            return NONE_SCORED
        return range(len(self.prompt_logprobs) - 1, min(stop, len(self.prompt_token_ids) - 1))

    def note_blocks(self, number: int = 1) -> None:
        """One of the rows took fresh blocks."""
        self.held_blocks += number
        self.peak_blocks = max(self.peak_blocks, self.held_blocks)

    def recount_blocks(self) -> None:
        """The rows' blocks changed otherwise: count the distinct ones, and what the frames of bodies amount to."""
        arriving = [row.rest.arriving for row in self.rows if row.rest is not None]
        self.held_blocks = len(
            {block for blocks in (*(row.blocks for row in self.rows), *arriving) for block in blocks}
        )
        self.held_blocks += sum(row.body_blocks for row in self.rows)
        drafting = [row.drafting.cache for row in self.rows if row.drafting is not None]
        self.held_blocks += sum(cache.body_blocks for cache in drafting if cache is not None)
        self.peak_blocks = max(self.peak_blocks, self.held_blocks)


@dataclass(slots=True, eq=False)
class Row:
    """One sequence of a request. Its progress is the list of segments still to compute, never a count.

    A decoding row has one segment of one position, its last token. A row is waiting while it has no blocks. One that
    was compacted has a body, and its blocks are those of its tail.
    """

    request: Request
    choice: int
    tokens: array[int]
    """Grows in place, so that nobody may keep a view of its buffer."""
    keys: list[BlockKey]
    """Parent of all, then the keys of the full blocks, as far as they have been needed."""
    blocks: list[BlockId] = field(default_factory=list)
    body: Body | None = None
    body_blocks: int = 0
    """What the frames of the body amount to, rounded up."""
    saved: Saved | None = None
    """Of a compressed row that was preempted: its body has no frames then."""
    compress_at: int | None = None
    """The next trigger: when all positions below it are computed the row is compacted, before it computes more."""
    watched: range = range(0)
    """Positions below the trigger whose queries will be looked at."""
    queries: WatchedQueries | None = None
    """Those of `watched`, as far as computed."""
    check_choice: Callable[[], None] | None = None
    """`Choice.check` of its last trigger, until a step that came after it has been read."""
    segments: list[Segment] = field(default_factory=list)
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
    drafting: Drafting | None = None
    """Of a lossless row: its KV is whole, and what it drafts with is beside it."""
    rest: Rest | None = None
    """Of a lossless row of which the host's memory has a part, or all but the tail."""
    draft_of: Row | None = None
    """Of the small cache of a lossless row: that row. Nothing that it says is told to anyone."""
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
    def tail_start(self) -> int:
        """The first position that lies in `blocks`."""
        if self.body is not None:
            return self.body.stop
        return self.rest.stop if self.rest is not None and self.rest.is_parted else 0

    @property
    def is_due(self) -> bool:
        """Whether the row has reached its trigger."""
        return self.is_running and self.compress_at is not None and self.front >= self.compress_at

    @property
    def missing_tokens(self) -> int:
        """Positions still to compute."""
        if len(self.segments) == 1:
            segment = self.segments[0]
            return segment.stop - segment.start
        return sum(segment.stop - segment.start for segment in self.segments)

    @property
    def has_begun(self) -> bool:
        """Whether its text has begun: what is missing of a prompt can be a single token, too."""
        return len(self.tokens) > len(self.request.prompt_token_ids)

    @property
    def known(self) -> int:
        """Tokens whose values are known."""
        return len(self.tokens) - self.pending

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt whose values are known."""
        return self.tokens[len(self.request.prompt_token_ids) : self.known].tolist()

    def set_trigger(self, compress_at: int | None, watched: range) -> None:
        """Have the row compacted when it reaches a position. Queries that were seen already are seen still."""
        if self.queries is not None:
            overlaps = watched.start < self.watched.stop and len(watched) > 0
            self.queries = self.queries.moved_to(watched) if overlaps else None
        self.compress_at, self.watched = compress_at, watched

    def expect(self, count: int = 1) -> None:
        """Tokens are being sampled: places are kept for them. The last of them is what the next step computes, if the
        text goes on behind it.

        The device knows their values before the host does.
        """
        tokens = self.tokens
        for _ in range(count):
            tokens.append(UNKNOWN)
        self.pending += count
        length = len(tokens)
        is_last = self.draft_of is None and length >= self.request.max_length
        self.segments = [] if is_last else [Segment(length - 1, length)]

    def append(self, token: int) -> None:
        """A sampled token: it takes the first place that was kept, or is what the next step computes."""
        if self.pending:
            self.tokens[-self.pending] = token
            self.pending -= 1
        else:
            self.tokens.append(token)
            self.segments = [Segment(len(self.tokens) - 1, len(self.tokens))]
        if self.history is not None:
            self.history.append(token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Sampled tokens, at least one, of a row that keeps no history and has no token on its way."""
        self.tokens.extend(tokens)
        self.segments = [Segment(len(self.tokens) - 1, len(self.tokens))]

    def settle(self) -> None:
        """The row ends here: places that were kept stay empty."""
        del self.tokens[self.known :]
        self.pending = 0

    def fork(self, choice: int) -> Row:
        """Another text from here on; it holds no blocks yet. Rows that were compacted do not fork."""
        return Row(
            request=self.request,
            choice=choice,
            tokens=self.tokens[:],
            keys=list(self.keys),
            compress_at=self.compress_at,
            watched=self.watched,
            queries=None if self.queries is None else self.queries.own(),
            history=None if self.history is None else self.history.copy(),
            grammar=None if self.grammar is None else self.grammar.copy(),
            drafting=None if self.drafting is None else self.drafting.fork(),
        )

    def take(self, budget: int) -> list[QueryRun]:
        """Take up to `budget` positions off the front of the segments, as runs to compute now.

        None beyond the next trigger: what comes after it reads what the row keeps then.
        """
        if len(self.segments) == 1:  # as in decoding
            start, stop, write = self.segments[0]
            if stop - start <= budget and (self.compress_at is None or stop <= self.compress_at):
                self.segments = []
                return [QueryRun(self.blocks, Position(start), stop - start, write, None, self.body)]
        limit = len(self.tokens) if self.compress_at is None else self.compress_at
        runs = []
        while self.segments and budget and self.segments[0].start < limit:
            start, stop, write = self.segments.pop(0)
            cut = min(stop, start + budget, limit)
            budget -= cut - start
            if cut < stop:
                self.segments.insert(0, Segment(cut, stop, write))
            runs.append(QueryRun(self.blocks, Position(start), cut - start, write, None, self.body))
        return runs

    def give_back(self, runs: Sequence[QueryRun]) -> None:
        """Runs that were taken will not be computed after all."""
        self.segments = [Segment(run.start, run.stop, run.write) for run in runs] + self.segments

    def full_block_keys(self, page_size: int, then: Sequence[int] = ()) -> list[BlockKey]:
        """The keys of all full blocks of the tokens known now, and of those that will come `then`."""
        known = self.known
        self.tokens.extend(then)  # for the while: a copy of a long row's tokens would take longer than all the rest
        full = extend_keys(self.keys, self.tokens, page_size, known=known + len(then))
        del self.tokens[len(self.tokens) - len(then) :]
        return self.keys[1 : full + 1]

    def reusable_keys(self, page_size: int) -> list[BlockKey]:
        """Those of blocks that need not be computed if they are cached: positions still to be scored must be."""
        keys = self.full_block_keys(page_size)
        unscored = self.request.unscored(len(self.tokens))
        return keys[: unscored.start // page_size] if unscored else keys


def drafting_of(row: Row) -> Drafting:
    """What a lossless row drafts with."""
    assert row.drafting is not None
    return row.drafting


def kv_cache_of(row: Row) -> KVCacheParams:
    """How a row is compressed that is."""
    assert row.request.kv_cache is not None
    return row.request.kv_cache

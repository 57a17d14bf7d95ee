"""A step: what its rows ask for, and what they get."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from kvikk.attention.plan import QueryRun
from kvikk.engine.logprobs import Logprob
from kvikk.engine.request import NONE_SCORED, UNKNOWN, Row
from kvikk.engine.sampler import SampledToken
from kvikk.types import Position


class ScheduledRow(NamedTuple):
    """A row's part of a step.

    Args:
        row: the row.
        runs: what it computes.
        samples: how many tokens are sampled after them; 0: none.
        scores: positions of the prompt among them of which the log-probability of the next token is wanted.
        front: the row's first position that is not computed after them.
        drafts: tokens that are tried behind the row's own: the last run ends with them, and a token is sampled after
            each of its queries. The last ones may be `UNKNOWN`: its small cache is still computing them.
    """

    row: Row
    runs: list[QueryRun]
    samples: int
    scores: range
    front: int
    drafts: Sequence[int] = ()

    def token_ids(self, run: QueryRun) -> array[int]:
        """What a run computes."""
        tokens = self.row.tokens[run.start : run.stop]
        tokens.extend(self.drafts)
        return tokens

    @property
    def known_drafts(self) -> Sequence[int]:
        """The drafts, now that all steps before this one have been read.

        These are fewer than were to be tried where the small cache came to an end token, or to no token.
        """
        if not self.drafts or self.drafts[-1] != UNKNOWN:
            return self.drafts
        assert self.row.drafting is not None
        return self.row.drafting.tokens[: len(self.drafts)]

    def known(self) -> ScheduledRow:
        """The same with `known_drafts`."""
        drafts = self.known_drafts
        if drafts is self.drafts:
            return self
        (run,) = self.runs
        length = 1 + len(drafts)
        return self._replace(runs=[run._replace(length=length)], samples=length, drafts=drafts)

    @property
    def is_watched(self) -> bool:
        """Whether the queries of some of its positions are wanted."""
        watched = self.row.watched
        return bool(watched) and any(run.stop > watched.start for run in self.runs)


@dataclass(slots=True)
class StepPlan:
    """One step: all rows' runs."""

    rows: list[ScheduledRow] = field(default_factory=list)
    tokens: int = 0
    preempted: int = 0
    has_lossless: bool = False
    """Whether some of the rows decode losslessly, or are their small caches."""
    repeats: int = 1
    """How often it is computed, each time going on from the tokens that the time before has sampled: small caches alone
    are drafted with so. All figures of the rows are those of the first time, but each gets as many tokens."""
    is_cold: bool = False
    """Whether the runner made something for the step that later ones find made: what it took tells nothing of them."""

    @property
    def tries_drafts(self) -> bool:
        """Whether it is not known before it has been read how many tokens some of its rows gain."""
        return self.has_lossless and any(scheduled.drafts for scheduled in self.rows)

    def add(self, row: Row, budget: int) -> None:
        """Let a row compute up to `budget` tokens; it samples when nothing is missing then."""
        runs = row.take(budget)
        self.tokens += runs[0].length if len(runs) == 1 else sum(run.length for run in runs)
        scores = NONE_SCORED if row.request.prompt_logprobs is None else row.request.unscored(runs[-1].stop)
        self.rows.append(ScheduledRow(row, runs, 0 if row.segments else row.unforked, scores, row.front))

    def add_verification(self, row: Row, drafts: Sequence[int]) -> None:
        """Let a decoding row, or a small cache, compute its last token and drafts behind it, and sample after each."""
        (segment,) = row.segments
        row.segments = []
        length = 1 + len(drafts)
        run = QueryRun(row.blocks, Position(segment.start), length, segment.write, None, row.body)
        self.tokens += length
        self.rows.append(ScheduledRow(row, [run], length, NONE_SCORED, row.front, drafts))


class RowResult(NamedTuple):
    """What a step gave one row.

    Args:
        tokens: as many as its `samples`, times the plan's `repeats`; none, where its logits were not finite or its
            grammar allowed no token. Where drafts were tried, and of repeats: those before the first such place.
        prompt_logprobs: of the tokens that follow its `scores`.
        leads: where drafts were tried and the likeliest token is the one: by how much its logit leads the next one's,
            for each of the tokens.
    """

    tokens: Sequence[SampledToken]
    prompt_logprobs: Sequence[tuple[Logprob, ...]] = ()
    leads: Sequence[float] = ()


class PendingStep(Protocol):
    """A step that has been started."""

    def results(self) -> list[RowResult]:
        """Wait for it, and give what `Runner.execute` gives."""
        ...

    def seconds(self, until: PendingStep | None = None) -> float | None:
        """How long the device took, of a step that has been read.

        Args:
            until: the step that was started next, read too: it took until that began; None: until its own end.

        Returns:
            None where the device cannot tell.
        """
        ...


class Runner(Protocol):
    """Computes a step: the model and its memory, or a simulation of them."""

    def execute(self, plan: StepPlan) -> list[RowResult]:
        """Compute all runs, sample.

        Returns:
            What each row of the plan asked for, in order.

        Raises:
            Exception: the step failed as a whole; nothing of it counts.
        """
        ...


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """A runner that can start a step before the results of the one before it are known to the host."""

    def launch(self, plan: StepPlan) -> PendingStep | None:
        """Start a step and return; tokens that are not known yet are taken from where the last step left them.

        Steps run one after another, in the order in which they were started.

        Returns:
            None when the host has a say in the step's tokens, so that it must be executed: nothing was done.
        """
        ...

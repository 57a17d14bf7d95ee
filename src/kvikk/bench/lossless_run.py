"""Requests answered at once, and what is to be told of it: how fast, in which gaps, with how many rows side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from kvikk.bench.device import synchronize
from kvikk.bench.step import NotMeasured, checked_step
from kvikk.engine import Engine, EngineOutput, KVCacheUsage, Request, SamplingParams
from kvikk.engine.drafting import StepTimes


@dataclass
class DraftTally:
    """What came of drafted tokens, by their places in the drafts: how many were right of those that were reached.

    A token behind the first wrong one of its draft was not reached: it stood on a wrong text, and shows nothing.
    """

    tried: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def note(self, drafted: int, accepted: int) -> None:
        """The first `accepted` tokens of a draft were right."""
        reached = min(drafted, accepted + 1)
        for counts, number in ((self.tried, reached), (self.right, accepted)):
            counts += [0] * (reached - len(counts))
            for place in range(number):
                counts[place] += 1

    @property
    def acceptance(self) -> float | None:
        """The probability that a token is right that was reached; None: none was tried."""
        return sum(self.right) / sum(self.tried) if self.tried else None

    def survival(self, most: int) -> list[float]:
        """The probability that the first 1, 2, ... `most` tokens of a draft are right (Kaplan and Meier 1958).

        Places that no draft has come to are taken to be like the others.
        """
        found, alive = [], 1.0
        for place in range(most):
            is_known = place < len(self.tried)
            alive *= self.right[place] / self.tried[place] if is_known else self.acceptance or 0.0
            found.append(alive)
        return found


class Step(NamedTuple):
    """A step of the engine.

    Args:
        ended_s: when it had been read.
        tokens: that requests gained in it.
        rows: that ran in it.
        drafting: of them, those that have a small cache after it.
        parted: of them, those whose whole KV the host alone has after it.
        is_decoding: whether no prompt was under way before it nor after it.
        starts: whether all texts have two tokens with it, for the first time.
        ends: whether a text ended with it.
    """

    ended_s: float
    tokens: int
    rows: int
    drafting: int
    parted: int
    is_decoding: bool
    starts: bool
    ends: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """Texts, and how fast they were written.

    Args:
        texts: token ids of each request.
        steps: those that are counted; the first gives their beginning only.
        gaps_ms: between the moments in which a request gains tokens, within these steps.
        first_tokens_ms: of each request, from the start of all.
        usage: what came of compressing and drafting, by request.
        drafts: what came of drafted tokens, of the whole run.
        drafts_of_rows: the same of each request that drafted.
        times: what steps took, as the engine thought when the last step that is counted had been read.
        preemptions: of rows, in the whole run.
        partings, refused: the same of `RestCounters`; 0 where the host has no part of the KV.
    """

    texts: list[list[int]]
    steps: list[Step]
    gaps_ms: list[float]
    first_tokens_ms: list[float]
    usage: list[KVCacheUsage | None]
    drafts: DraftTally
    drafts_of_rows: list[DraftTally]
    times: StepTimes
    preemptions: int
    partings: int
    refused: int

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together, over all that is counted."""
        return _rate(list(pairwise(self.steps)))

    @property
    def decode_tokens_per_s(self) -> float:
        """The same over those steps only in which no prompt is under way; over all where there are none."""
        return _rate(self._decoding)

    def acceptances(self, rows: int) -> list[float]:
        """The probability that a drafted token is right, for each of so many rows that are such as those that drafted.

        A row is taken for what it showed, as if it had been right half a time more, and wrong (Jeffreys 1946).
        """
        shown = [(sum(each.right) + 0.5) / (sum(each.tried) + 1) for each in self.drafts_of_rows]
        spread: list[float] = np.quantile(shown, (np.arange(rows) + 0.5) / rows).tolist()
        return spread

    @property
    def rows(self) -> float:
        """That run side by side, on average over time."""
        return self._mean(lambda step: step.rows)

    @property
    def drafting(self) -> float:
        """Of them, those that have a small cache to draft with."""
        return self._mean(lambda step: step.drafting)

    @property
    def parted(self) -> float:
        """Of them, those whose whole KV the host alone has."""
        return self._mean(lambda step: step.parted)

    @property
    def side_by_side(self) -> dict[tuple[int, int], float]:
        """Seconds of decoding with so many rows, so many of them parted."""
        seconds: dict[tuple[int, int], float] = {}
        for before, step in self._decoding:
            case = step.rows, step.parted
            seconds[case] = seconds.get(case, 0.0) + step.ended_s - before.ended_s
        return seconds

    @property
    def _decoding(self) -> list[tuple[Step, Step]]:
        pairs = list(pairwise(self.steps))
        return [pair for pair in pairs if pair[1].is_decoding] or pairs

    def _mean(self, of: Callable[[Step], int]) -> float:
        seconds = self.steps[-1].ended_s - self.steps[0].ended_s
        return sum(of(step) * (step.ended_s - before.ended_s) for before, step in pairwise(self.steps)) / seconds


def _rate(pairs: Sequence[tuple[Step, Step]]) -> float:
    """Tokens a second of steps, each with the one before it."""
    return sum(step.tokens for _, step in pairs) / sum(step.ended_s - before.ended_s for before, step in pairs)


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    kv_cache: dict[str, Any] | None,
    *,
    device: torch.device,
    is_whole: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Answer all prompts greedily, asked at once.

    Args:
        engine: without work.
        prompts: token ids.
        tokens: of each answer.
        kv_cache: how they are compressed.
        device: of the engine.
        is_whole: count from the start to the end; else from where all rows decode to where the first one ends.
        clock: seconds.

    Raises:
        NotMeasured: a request failed, or they did not all decode at one time although they are to.
    """
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, kv_cache=kv_cache)
    preemptions, partings, refused = _counted(engine)
    synchronize(device)
    start_s = clock()
    record = _Record([engine.add(prompt, params) for prompt in prompts], start_s)
    while engine.has_work:
        outputs = checked_step(engine)
        record.note(engine, outputs, clock())
    steps, times = record.steps, engine.scheduler.rounds.times
    if not is_whole:
        first = next((index for index, step in enumerate(steps) if step.starts), len(steps))
        last = next((index for index, step in enumerate(steps) if step.ends), 0)
        if last <= first:
            raise NotMeasured(
                f"{len(prompts)} rows never decoded all at one time: give fewer, more --kv-memory, a longer "
                "--output-len, or --whole-run"
            )
        steps = steps[first : last + 1]
        assert record.times_at_first_end is not None
        times = record.times_at_first_end  # few rows are left behind it, whose steps tell little of those with all
    since_s, until_s = steps[0].ended_s, steps[-1].ended_s
    now = _counted(engine)
    return Run(
        texts=list(record.texts.values()),
        steps=steps,
        gaps_ms=[gap * 1e3 for at, gap in record.gaps if since_s < at <= until_s],
        first_tokens_ms=[(at - start_s) * 1e3 for at in record.firsts],
        usage=[request.kv_usage for request in record.requests],
        drafts=record.drafts,
        drafts_of_rows=list(record.drafts_of_rows.values()),
        times=times,
        preemptions=now[0] - preemptions,
        partings=now[1] - partings,
        refused=now[2] - refused,
    )


class _Record:
    """What happens to requests, step by step."""

    def __init__(self, requests: list[Request], start_s: float) -> None:
        self.requests = requests
        self.texts: dict[str, list[int]] = {request.id: [] for request in requests}
        self.steps = [Step(start_s, 0, 0, 0, 0, False, False, False)]
        self.gaps: list[tuple[float, float]] = []
        """When a request gained tokens, and for how long it had gained none."""
        self.firsts: list[float] = []
        self.drafts = DraftTally()
        self.drafts_of_rows: dict[str, DraftTally] = {}
        self.times_at_first_end: StepTimes | None = None
        self._last: dict[str, float] = {}
        self._told: dict[str, tuple[int, int, int]] = {}
        self._short = len(requests)
        """Texts that do not have two tokens yet."""
        self._had_prompts = True

    def note(self, engine: Engine, outputs: list[EngineOutput], now_s: float) -> None:
        """A step has been read."""
        was_short = self._short
        gained: dict[str, Request] = {}
        for out in outputs:
            assert out.token is not None
            text = self.texts[out.request.id]
            text.append(out.token.token_id)
            self._short -= len(text) == 2
            gained[out.request.id] = out.request
        for request in gained.values():
            self._note_gain(request, now_s)
        running, rests = engine.scheduler.running, engine.kv.rests
        ended = sum(out.finish_reason is not None for out in outputs)
        if ended and self.times_at_first_end is None:
            self.times_at_first_end = deepcopy(engine.scheduler.rounds.times)
        has_prompts = any(not row.has_begun for row in running)
        self.steps.append(
            Step(
                ended_s=now_s,
                tokens=len(outputs),
                rows=len(running) + ended,
                drafting=len(engine.kv.drafting),
                parted=0 if rests is None else rests.parted,
                is_decoding=not (has_prompts or self._had_prompts),
                starts=was_short > self._short == 0,
                ends=ended > 0,
            )
        )
        self._had_prompts = has_prompts

    def _note_gain(self, request: Request, now_s: float) -> None:
        last, usage = self._last.get(request.id), request.kv_usage
        if last is None:
            self.firsts.append(now_s)
        else:
            self.gaps.append((now_s, now_s - last))
        self._last[request.id] = now_s
        if usage is not None:
            rounds, drafted, accepted = self._told.get(request.id, (0, 0, 0))
            if usage.rounds > rounds:
                for tally in (self.drafts, self.drafts_of_rows.setdefault(request.id, DraftTally())):
                    tally.note(usage.drafted - drafted, usage.accepted - accepted)
            self._told[request.id] = usage.rounds, usage.drafted, usage.accepted


def _counted(engine: Engine) -> tuple[int, int, int]:
    rests = engine.kv.rests
    of_rests = (0, 0) if rests is None else (rests.counters.partings, rests.counters.refused)
    return engine.scheduler.preemptions, *of_rests

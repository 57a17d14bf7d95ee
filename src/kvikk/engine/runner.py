"""Computes steps with a real model: one flattened batch, its attention plan, its samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kvikk.attention import AttentionBackend
from kvikk.attention.plan import QueryRun
from kvikk.engine.history import TokenHistory
from kvikk.engine.logprobs import ROWS_AT_ONCE, Logprob, token_logprobs
from kvikk.engine.padding import padded_size, spare_run
from kvikk.engine.queries import QueryRecorder, WatchedQueries
from kvikk.engine.request import Row
from kvikk.engine.sampler import SampledToken, SamplingTask, leads, sample
from kvikk.engine.step import RowResult, ScheduledRow, StepPlan
from kvikk.grammar import Grammar
from kvikk.memory import KVStore
from kvikk.models import CausalLM
from kvikk.models.protocol import AttentionStep


class ModelRunner:
    """Turns a plan into tensors, runs the model over the paged KV and samples.

    Args:
        model: on the store's device.
        store: the pool's bytes.
        backend: attention over that store.
    """

    def __init__(self, model: CausalLM, store: KVStore, backend: AttentionBackend) -> None:
        self.model = model
        self.store = store
        self.backend = backend

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[RowResult]:
        """See `engine.step.Runner`."""
        batch = _flatten(plan.rows)
        runs = [run for scheduled in plan.rows for run in scheduled.runs]
        if spare := self._spare(len(batch.token_ids)):
            runs.append(spare_run(spare, self.store.geometry.page_size))
        wanted_at = batch.sampled_at + batch.scored_at
        device = self.store.device
        step: AttentionStep = self.backend.begin(self.backend.plan(runs))
        recorder = None
        if batch.watched_at:
            watched = torch.tensor(batch.watched_at, device=device)
            step = recorder = QueryRecorder(step, watched, self.store.geometry.layers)
        hidden = self.model.forward(
            torch.tensor(batch.token_ids + [0] * spare, device=device),
            torch.tensor(batch.positions + [0] * spare, device=device),
            step,
            torch.tensor(wanted_at + [0] * self._spare(len(wanted_at)), dtype=torch.int64, device=device),
        )
        if recorder is not None:
            _hand_out(plan.rows, recorder)
        samples = len(batch.sampled_at)
        logits = self._logits(hidden[:samples]) if samples else hidden[:0]
        sampled = iter(self._sample(plan.rows, logits) if samples else [])
        scored = iter(self._score(plan.rows, hidden[samples : len(wanted_at)]))
        found_leads = self._leads(plan.rows, logits)
        return [
            RowResult(
                tokens=usable_tokens(scheduled, [next(sampled) for _ in range(scheduled.samples)]),
                prompt_logprobs=[next(scored) for _ in scheduled.scores],
                leads=found_leads.get(index, ()),
            )
            for index, scheduled in enumerate(plan.rows)
        ]

    def _spare(self, rows: int) -> int:
        """Rows to add to `rows`: a CPU computes steps of few sizes, see `padding`."""
        return padded_size(rows) - rows if self.store.device.type == "cpu" else 0

    def _logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, vocabulary]`."""
        rows = len(hidden)
        spare = self._spare(rows)
        return self.model.head(F.pad(hidden, (0, 0, 0, spare)))[:rows] if spare else self.model.head(hidden)

    def _leads(self, rows: list[ScheduledRow], logits: Tensor) -> dict[int, list[float]]:
        """See `RowResult.leads`, by the place of the row."""
        found, at = {}, 0
        for index, scheduled in enumerate(rows):
            if scheduled.drafts and is_led(scheduled):
                found[index] = leads(logits[at : at + scheduled.samples]).tolist()
            at += len(_samples_of_queries(scheduled)) if scheduled.samples else 0
        return found

    def _sample(self, rows: list[ScheduledRow], logits: Tensor) -> list[SampledToken | None]:
        """A token for each that the rows want, in order; None where there can be none."""
        sampling = [scheduled for scheduled in rows if scheduled.samples]
        tasks = [task for scheduled in sampling for task in sampling_tasks(scheduled)]
        if len(tasks) != len(logits):  # a prompt that forks: its choices share one row of logits
            counts = [count for scheduled in sampling for count in _samples_of_queries(scheduled)]
            logits = logits.repeat_interleave(torch.tensor(counts, device=logits.device), dim=0)
        return sample(logits, tasks)

    def _score(self, rows: list[ScheduledRow], hidden: Tensor) -> list[tuple[Logprob, ...]]:
        """Log-probabilities of the prompt tokens that follow the scored positions, a slice of them at a time."""
        wanted = [
            (scheduled.row.tokens[position + 1], scheduled.row.request.params.prompt_logprobs or 0)
            for scheduled in rows
            for position in scheduled.scores
        ]
        found: list[tuple[Logprob, ...]] = []
        for start in range(0, len(wanted), ROWS_AT_ONCE):
            tokens, counts = zip(*wanted[start : start + ROWS_AT_ONCE], strict=True)
            found += token_logprobs(self._logits(hidden[start : start + ROWS_AT_ONCE]), tokens, counts)
        return found


class _Batch(NamedTuple):
    """A step's tokens in one line, and the places in it that give tokens and scores, and whose queries are kept."""

    token_ids: list[int]
    positions: list[int]
    sampled_at: list[int]
    scored_at: list[int]
    watched_at: list[int]


def _flatten(rows: list[ScheduledRow]) -> _Batch:
    batch = _Batch([], [], [], [], [])
    for scheduled in rows:
        for run in scheduled.runs:
            shift = len(batch.token_ids) - run.start
            batch.token_ids.extend(scheduled.token_ids(run))
            batch.positions.extend(range(run.start, run.stop))
            scored = range(max(run.start, scheduled.scores.start), min(run.stop, scheduled.scores.stop))
            batch.scored_at.extend(position + shift for position in scored)
            if scheduled.row.watched:
                batch.watched_at.extend(position + shift for position in _watched(scheduled.row, run))
        end = len(batch.token_ids)
        if scheduled.drafts:
            batch.sampled_at.extend(range(end - scheduled.samples, end))
        elif scheduled.samples:
            batch.sampled_at.append(end - 1)
    return batch


def _watched(row: Row, run: QueryRun) -> range:
    """Positions of a run whose queries are kept."""
    return range(max(run.start, row.watched.start), min(run.stop, row.watched.stop))


def _hand_out(rows: list[ScheduledRow], recorder: QueryRecorder) -> None:
    """Give each row its queries of a step."""
    queries = torch.stack(recorder.layers)  # [layers, watched, q_heads, head_dim]
    at = 0
    for scheduled in rows:
        row = scheduled.row
        for run in scheduled.runs if row.watched else ():
            positions = _watched(row, run)
            if not positions:
                continue
            if row.queries is None:
                empty = queries.new_zeros((len(queries), len(row.watched), *queries.shape[2:]))
                row.queries = WatchedQueries(row.watched, empty, recorder.scales)
            place = positions.start - row.watched.start
            row.queries.rotated[:, place : place + len(positions)] = queries[:, at : at + len(positions)]
            at += len(positions)


def _samples_of_queries(scheduled: ScheduledRow) -> list[int]:
    """How many tokens are sampled after each of the queries after which any is."""
    return [1] * scheduled.samples if scheduled.drafts else [scheduled.samples]


def is_led(scheduled: ScheduledRow) -> bool:
    """Whether a row's tokens are the likeliest ones of its logits as they are."""
    request = scheduled.row.request
    return request.is_plain and request.params.is_greedy


def usable_tokens(scheduled: ScheduledRow, drawn: Sequence[SampledToken | None]) -> list[SampledToken]:
    """What a row gets of what was drawn for it; see `RowResult`."""
    tokens = [token for token in takewhile(lambda token: token is not None, drawn) if token is not None]
    is_of_drafts = bool(scheduled.drafts) or scheduled.row.draft_of is not None
    return tokens if is_of_drafts or len(tokens) == len(drawn) else []


def sampling_tasks(scheduled: ScheduledRow) -> list[SamplingTask]:
    """One task for each token that a row samples in this step."""
    row = scheduled.row
    if not scheduled.drafts:
        return [_task(row, len(row.tokens), row.choice + i, row.history, row.grammar) for i in range(scheduled.samples)]
    tasks = [_task(row, len(row.tokens), row.choice, row.history, row.grammar)]
    history, grammar = row.history, row.grammar
    for position, draft in enumerate(scheduled.drafts, len(row.tokens) + 1):
        if history is not None:
            history = history.copy()
            history.append(draft)
        if grammar is not None:
            grammar = grammar.copy()
            grammar.advance(draft)  # a draft that it does not allow is not what will be sampled before it
        tasks.append(_task(row, position, row.choice, history, grammar))
    return tasks


def _task(row: Row, position: int, choice: int, history: TokenHistory | None, grammar: Grammar | None) -> SamplingTask:
    """How the token at a position is sampled, after a history and in a state of its grammar."""
    request = row.request
    generated = position - len(request.prompt_token_ids)
    barred = request.stop_ids if generated < request.params.min_tokens else frozenset()
    allowed = None
    if grammar is not None:
        allowed, barred = _without(grammar.mask(), barred), frozenset()
    return SamplingTask(request.params, request.seed, position, choice, barred, history, allowed)


def _without(allowed: NDArray[np.bool_], barred: frozenset[int]) -> NDArray[np.bool_]:
    """The tokens of a mask that are not barred, or all of them where nothing else would be left."""
    if not barred:
        return allowed
    left = allowed.copy()
    left[list(barred)] = False
    return left if left.any() else allowed

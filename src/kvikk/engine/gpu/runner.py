"""Computes steps on a GPU: packs the descriptor, launches the graph of the step's shape, reads the tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor
from tqdm import tqdm

from kvikk.attention import AttentionBackend
from kvikk.attention.gpu.worklist import short_run_sizes
from kvikk.compress.config import MAX_DRAFT_TOKENS
from kvikk.engine.gpu.bodies import BodyArena
from kvikk.engine.gpu.descriptor import (
    COMMAND,
    FROM_DEVICE,
    IS_ROW,
    IS_STORED,
    OUTPUT,
    RUN,
    SINGLE,
    DescriptorBuffer,
    StepContent,
    StepShape,
)
from kvikk.engine.gpu.program import Machine, StepProgram, Workspace
from kvikk.engine.gpu.seats import Mirror, SeatMap, seat_command
from kvikk.engine.gpu.state import SeatState, said_by
from kvikk.engine.queries import WatchedQueries
from kvikk.engine.request import UNKNOWN
from kvikk.engine.rounds import MOST_REPEATS
from kvikk.engine.runner import ModelRunner, is_led, sampling_tasks, usable_tokens
from kvikk.engine.sampler import SampledToken, sample
from kvikk.engine.step import PendingStep, RowResult, ScheduledRow, StepPlan
from kvikk.memory import KVStore
from kvikk.models import CausalLM
from kvikk.types import Numerics

log = logging.getLogger(__name__)

TABLE_WRITES: Final = 2**16
"""Table entries that a descriptor can carry; a step that admits rows with more writes the rest directly."""
KEPT_SHAPES: Final = 12
"""Shapes of uncaptured steps whose buffers are kept."""
GRAPH_TOKENS: Final = (64, 128, 256, 512)
"""Tokens of prompts of the steps that are captured; longer ones keep the GPU busy while they are launched."""
VERIFICATION_TOKENS: Final = (*GRAPH_TOKENS, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
"""Tokens of the steps that are captured of those that verify drafts: the host has more to do before and after them."""
ROOMY: Final = 4
"""Times its tokens that a verification may be padded to: a capture takes as long as dozens of steps."""

NO_TOKEN: Final = RowResult([])


def decode_sizes(rows: int) -> list[int]:
    """Numbers of rows that graphs are captured for, smallest first; the last is `rows`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(320, 1025, 64)]
    return [*(size for size in sizes if size < rows), rows]


class GpuRunner:
    """A `Runner` whose steps are captured graphs where their shape is one of a few, and the same kernels else.

    Args:
        model: of kvikk's own family module, on the store's device.
        store: the pool's bytes.
        backend: attention over that store, for steps that score prompts.
        max_rows: rows of a step.
        max_tokens: computed tokens of a step.
        max_model_len: tokens of the longest sequence.
        numerics: of attention; the model is made for the same.
        enforce_eager: capture nothing.
        ragged: capture also, at the start, what serves compressed rows; else that waits for the first of them.
        lossless: capture also, at the start, what verifies drafts; else that waits for the first of them.
        watch_window: queries that are kept of each row while captured steps run; steps that would have to keep more run
            uncaptured.
    """

    def __init__(
        self,
        model: CausalLM,
        store: KVStore,
        backend: AttentionBackend,
        *,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        numerics: Numerics = "fast",
        enforce_eager: bool = False,
        ragged: bool = False,
        lossless: bool = False,
        watch_window: int = 0,
    ) -> None:
        is_cuda = store.device.type == "cuda"
        page = store.geometry.page_size
        max_blocks = -(-max_model_len // page)
        seats = 2 * max_rows  # a row that is not in a step may come back in the next
        all_seats = 2 * seats  # as many for small caches of lossless rows
        most_outputs = max(seats, max_tokens)
        self._plain = ModelRunner(model, store, backend)
        self._store = store
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._sizes = decode_sizes(max_rows)
        group = model.spec.q_heads // max(store.geometry.kv_heads)
        self._short_runs = short_run_sizes(group) if numerics == "fast" else []
        """Queries of the longest run, of those verifications that have tiles of their own."""
        self._usual_outputs = min(64, max_rows)
        """Of a step with prompts."""
        self._sizes_beside_prompts = [0, *(size for size in (16, 64) if size < max_rows), max_rows]
        self._sizes_beside_many_drafts = [*(size for size in (16,) if size < max_rows), max_rows]
        """Never none: so one graph serves large verifications with some other rows and without."""
        self._seats = SeatMap(seats, max_blocks, self._detach, cache_seats=all_seats - seats)
        largest = StepShape(singles=max_rows, runs=max_tokens, tokens=2 * max_tokens, outputs=2 * most_outputs)
        fixed_words = max(shape.fixed_words for shape in (largest, *self._verification_shapes()))
        words = fixed_words + COMMAND * max_rows + 2 * TABLE_WRITES
        self._descriptor = DescriptorBuffer(words, store.device)
        self._arena = BodyArena(all_seats, store.lanes, len(store.frames), page, store.device)
        self._ragged = ragged
        self._lossless = lossless
        geometry, spec = store.geometry, model.spec
        queries = None
        if watch_window:
            places = (seats + 1) * watch_window
            queries = torch.zeros(
                (geometry.layers, places, spec.q_heads, geometry.head_dim), dtype=spec.dtype, device=store.device
            )
        self._machine = Machine(
            model=model,
            store=store,
            state=SeatState(all_seats, max_blocks, store.device),
            bodies=self._arena.bodies,
            watch_window=watch_window,
            queries=queries,
            scales=[1.0] * geometry.layers,
            words=self._descriptor.device_words,
            numerics=numerics,
            workspace=Workspace(),
        )
        self._captured: dict[StepShape, StepProgram] = {}
        """By the shapes that they serve: their own, and smaller ones."""
        self._eager: dict[StepShape, StepProgram] = {}
        self._captures = is_cuda and not enforce_eager
        most_tokens = max(most_outputs, MOST_REPEATS * max_rows)
        self._returns = [StepReturn(most_tokens, most_outputs, is_cuda=is_cuda) for _ in range(3)]
        """One step is read while the next is in flight, and the one before may not have been timed."""
        self._turn = 0
        self._said = PlainResults()
        self.copies = 0
        """Host to device copies of descriptors so far, and of tables beside them."""

    def graph_shapes(self) -> list[StepShape]:
        """What graphs are captured for, the largest first."""
        shapes = [_decode_shape(size) for size in self._sizes]
        shapes += [
            self._mixed_shape(singles, tokens) for singles in self._sizes_beside_prompts for tokens in GRAPH_TOKENS
        ]
        if self._ragged:
            shapes += [replace(shape, ragged=True, watched=self._machine.watch_window > 0) for shape in shapes]
        if self._lossless:
            shapes += self._verification_shapes()
        return sorted(shapes, key=lambda shape: (shape.runs > 0, shape.all_tokens), reverse=True)

    def _verification_shapes(self) -> list[StepShape]:
        """Of verifications of all rows, with runs of all lengths, and of some rows beside others that draft nothing."""
        shapes = []
        serve_others = {0, *self._short_runs[-1:]}  # what serves longer runs serves shorter ones, too
        for short in (*self._short_runs, 0):
            most = _verification_tokens(min((short or 1 + MAX_DRAFT_TOKENS) * self._max_rows, self._max_tokens))
            for tokens in (size for size in VERIFICATION_TOKENS if size <= most):
                if tokens > GRAPH_TOKENS[-1]:
                    singles = self._sizes_beside_many_drafts
                else:
                    singles = self._sizes_beside_prompts if short in serve_others else [0]
                shapes += [_verification_shape(each, tokens, short) for each in singles]
        return shapes

    def warm_up(self, *, progress: bool = True) -> None:
        """Capture the graphs, largest first, so that the smaller ones share its memory."""
        if not self._captures:
            return
        for shape in tqdm(self.graph_shapes(), desc="capturing graphs", disable=not progress, leave=False):
            self._capture(shape).is_new = False

    def _capture(self, shape: StepShape) -> StepProgram:
        self._descriptor.send(StepContent(), shape)
        program = StepProgram(self._machine, shape)
        program.capture()
        self._captured[shape] = program
        return program

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[RowResult]:
        """See `engine.step.Runner`."""
        if self._needs_plain(plan):
            self._seats.forget_positions(scheduled.row for scheduled in plan.rows)
            return self._plain.execute(plan)
        return self._start(plan, shaped_rows(plan)).results()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StartedStep | None:
        """See `engine.step.AheadRunner`."""
        if self._needs_plain(plan) or shaped_rows(plan):
            return None
        return self._start(plan, frozenset())

    def _start(self, plan: StepPlan, shaped: frozenset[int]) -> StartedStep:
        try:
            content, wanted = self._describe(plan, shaped)
            outputs = len(content.outputs) // OUTPUT
            program = self._program(content, outputs)
            plan.is_cold, program.is_new = program.is_new, False
            turn = (self._turn + 1) % len(self._returns)
            back = self._returns[turn]
            back.begin()
            tokens = back.tokens[: plan.repeats * outputs].view(plan.repeats, outputs)
            for repeat, found in enumerate(tokens):
                if repeat < 2:
                    self._send(content if repeat == 0 else content.going_on(), program.shape)
                program.launch()
                found.copy_(program.result[:outputs], non_blocking=True)
            found_leads = None
            if plan.tries_drafts and self._machine.numerics == "fast":
                found_leads = back.leads[:outputs]
                found_leads.copy_(program.leads[:outputs], non_blocking=True)
            back.end()
        except BaseException:  # what was said of these rows may not have reached the device
            self._seats.forget(scheduled.row for scheduled in plan.rows)
            raise
        self._turn = turn
        return StartedStep(plan, program, wanted, tokens, back, self._said, found_leads)

    def _describe(self, plan: StepPlan, shaped: frozenset[int]) -> tuple[StepContent, StepOutputs]:
        """The step in numbers, and what its outputs are."""
        content = StepContent()
        wanted = StepOutputs(shaped=shaped)
        singles, commands, writes = content.singles, content.commands, content.writes
        of_runs: list[tuple[Mirror, int, int]] = []
        for index, scheduled in enumerate(plan.rows):
            row, runs, samples, _, _, drafts = scheduled
            mirror = self._seats.mirror(row, commands)
            self._seats.write_table(mirror, writes)
            if row.request.kv_cache is not None:
                self._tell_body(mirror, content)
                if row.watched:
                    self._tell_watch(mirror, scheduled, content)
            seat, run = mirror.seat, runs[0]
            if run.length == 1 and len(runs) == 1:
                flags = (IS_ROW | IS_STORED) if run.write else IS_ROW
                if mirror.position == run.start:
                    flags |= FROM_DEVICE
                if samples:
                    content.outputs += (len(singles) // SINGLE, seat)
                    wanted.singles.append(index)
                    mirror.position = -1 if index in shaped else len(row.tokens) + plan.repeats - 1
                singles += (seat, flags, row.tokens[run.start], run.start)
                continue
            for run in runs:
                offset = len(content.tokens)
                content.runs += (seat, run.start, run.length, offset if run.write else -1 - offset)
                content.longest_run = max(content.longest_run, run.length)
                content.tokens.extend(scheduled.token_ids(run))
            if drafts and drafts[-1] == UNKNOWN:
                self._name_drafts(scheduled, content)
            content.only_verifies = content.only_verifies and bool(drafts)
            if samples:
                count = samples if drafts else 1
                of_runs.append((mirror, len(content.tokens) - count, count))
                wanted.runs.append((index, count))
                # Where drafts were tried the host will say which of the tokens the row goes on from.
                mirror.position = -1 if drafts or index in shaped else len(row.tokens) + plan.repeats - 1
        before_runs = self._singles_size(content) if of_runs else 0
        for mirror, first, count in of_runs:
            for token in range(before_runs + first, before_runs + first + count):
                content.outputs += (token, mirror.seat)
        return content, wanted

    def _name_drafts(self, scheduled: ScheduledRow, content: StepContent) -> None:
        """The row's tokens are the last ones: those that are still being drafted are where its small cache leaves them.

        Where it was given up since, any token will do: the host tries none of them.
        """
        drafting, (run,), tokens = scheduled.row.drafting, scheduled.runs, content.tokens
        assert drafting is not None
        seat = None if drafting.cache is None else self._seats.mirror(drafting.cache, content.commands).seat
        for position in range(run.start, run.stop):
            at = len(tokens) - (run.stop - position)
            if tokens[at] == UNKNOWN:
                tokens[at] = 0 if seat is None else said_by(seat, position)

    def _tell_body(self, mirror: Mirror, content: StepContent) -> None:
        """Lay a row's body down on the device, where that has none of it or an older one."""
        body = mirror.row.body
        if body is None:
            self._arena.clear(mirror.seat)  # it was computed again
            return
        content.ragged = True
        if body.frames is not mirror.frames or mirror.seat not in self._arena:
            self._arena.put(mirror.seat, mirror.row)
            mirror.frames = body.frames
            content.commands += seat_command(mirror)

    def _tell_watch(self, mirror: Mirror, scheduled: ScheduledRow, content: StepContent) -> None:
        """Have the device keep the queries of a row that its policy will look at."""
        row = mirror.row
        if not scheduled.is_watched:
            return
        content.watched = True
        if mirror.watched != row.watched:
            mirror.watched = row.watched
            content.commands += seat_command(mirror)
        if row.queries is None or not row.queries.is_borrowed:
            kept = self._kept_queries(mirror)
            if row.queries is not None:  # seen by steps that ran elsewhere, or before the last trigger
                kept.rotated.copy_(row.queries.rotated)
            row.queries = kept

    def _kept_queries(self, mirror: Mirror) -> WatchedQueries:
        """A row's queries where the device keeps them."""
        machine = self._machine
        assert machine.queries is not None
        first = mirror.seat * machine.watch_window
        return WatchedQueries(
            mirror.watched, machine.queries[:, first : first + len(mirror.watched)], machine.scales, is_borrowed=True
        )

    def _detach(self, mirror: Mirror) -> None:
        """A row loses its seat: queries that were kept there become its own, and its body is none of the next row's."""
        self._arena.clear(mirror.seat)
        queries = mirror.row.queries
        if queries is not None and queries.is_borrowed and mirror.row.finish_reason is None:
            mirror.row.queries = queries.own()

    def _needs_plain(self, plan: StepPlan) -> bool:
        """Whether no captured step serves a row: its prompt is scored, or there is no place for its queries."""
        window = self._machine.watch_window
        return any(
            scheduled.scores or (len(scheduled.row.watched) > window and scheduled.is_watched)
            for scheduled in plan.rows
        )

    def _singles_size(self, content: StepContent) -> int:
        """Rows with one query that the step's shape has room for."""
        count = len(content.singles) // SINGLE
        if not content.tokens:
            sizes = self._sizes
        elif content.only_verifies and len(content.tokens) > GRAPH_TOKENS[-1]:
            sizes = self._sizes_beside_many_drafts
        else:
            sizes = self._sizes_beside_prompts
        return next(size for size in sizes if size >= count)

    def _mixed_shape(self, singles: int, tokens: int, runs: int = 0, outputs: int = 0) -> StepShape:
        """The smallest shape with prompts that holds so much."""
        tokens = max(GRAPH_TOKENS[0], _power_of_two(tokens))
        usual = self._usual_outputs
        return StepShape(
            singles=singles,
            runs=max(size_runs(tokens), _power_of_two(runs)),
            tokens=tokens,
            outputs=usual if outputs <= usual else _power_of_two(outputs),
        )

    def _program(self, content: StepContent, outputs: int) -> StepProgram:
        """The program of the smallest shape that holds the step."""
        singles = self._singles_size(content)
        runs = len(content.runs) // RUN
        if not content.tokens:
            shape = _decode_shape(singles)
        elif content.only_verifies:
            short = next((size for size in self._short_runs if size >= content.longest_run), 0)
            shape = _verification_shape(singles, _verification_tokens(len(content.tokens)), short, runs)
        else:
            shape = self._mixed_shape(singles, len(content.tokens), runs, outputs)
        watches = content.watched or (content.ragged and self._machine.watch_window > 0)
        shape = replace(shape, ragged=content.ragged, watched=watches)
        if shape in self._captured:
            return self._captured[shape]
        is_like_a_captured_one = replace(shape, ragged=False, watched=False) in self._captured
        if content.only_verifies and 0 < shape.tokens <= VERIFICATION_TOKENS[-1]:
            if roomy := self._roomy(shape):
                self._captured[shape] = roomy
                return roomy
            is_like_a_captured_one = True
        if self._captures and is_like_a_captured_one:
            log.info("capturing a graph for compressed rows or for verifying drafts: %s", shape)
            return self._capture(shape)
        program = self._eager.pop(shape, None) or StepProgram(self._machine, shape)
        self._eager[shape] = program
        if len(self._eager) > KEPT_SHAPES:
            del self._eager[next(iter(self._eager))]
        return program

    def _roomy(self, shape: StepShape) -> StepProgram | None:
        """A captured verification that holds it and is no more than `ROOMY` times as large.

        With as many singles: outputs of runs are counted from behind them, and have been by now.
        """
        sizes = {"runs", "tokens", "outputs", "short_runs"} if shape.short_runs else {"runs", "tokens", "outputs"}
        fitting = [
            program
            for program in self._captured.values()
            if replace(program.shape, **{size: getattr(shape, size) for size in sizes}) == shape
            and all(getattr(program.shape, size) >= getattr(shape, size) for size in sizes)
            and program.shape.all_tokens <= ROOMY * shape.all_tokens
        ]
        return min(fitting, key=lambda program: (program.shape.all_tokens, program.shape.short_runs), default=None)

    def _send(self, content: StepContent, shape: StepShape) -> None:
        if len(content.writes) > 2 * TABLE_WRITES:
            writes = torch.tensor(content.writes, dtype=torch.int64).view(-1, 2).to(self._store.device)
            self._machine.state.tables.view(-1)[writes[:, 0]] = writes[:, 1].int()
            content.writes.clear()
            self.copies += 1
        self._descriptor.send(content, shape)
        self.copies += 1


class PlainResults(dict[int, RowResult]):
    """Results of one token without log-probabilities by its id, each made once: a step can give thousands."""

    def __missing__(self, token_id: int) -> RowResult:
        result = self[token_id] = RowResult([SampledToken(token_id)])
        return result


@dataclass(slots=True)
class StepOutputs:
    """Whose the outputs of a step are, by their places in the plan, in the order of the outputs.

    Args:
        singles: rows with one query, an output each.
        runs: behind them, rows with several, and how many outputs each has.
        shaped: rows of both whose tokens the host samples.
    """

    shaped: frozenset[int]
    singles: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Rows, and how many outputs each has."""
        yield from ((index, 1) for index in self.singles)
        yield from self.runs


class StepReturn:
    """Where the device leaves what a step gives, and when it began and ended.

    Args:
        tokens: of a step with all its repeats, at the most.
        outputs: of a step, at the most.
        is_cuda: whether steps run behind the host's back.
    """

    def __init__(self, tokens: int, outputs: int, *, is_cuda: bool) -> None:
        self.tokens = torch.zeros(tokens, dtype=torch.int32, pin_memory=is_cuda)
        self.leads = torch.zeros(outputs, dtype=torch.float32, pin_memory=is_cuda)
        self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) if is_cuda else None

    def begin(self) -> None:
        """A step starts."""
        if self._events is not None:
            self._events[0].record()

    def end(self) -> None:
        """All of it has been started."""
        if self._events is not None:
            self._events[1].record()

    def wait(self) -> None:
        """Until the device has come to the end."""
        if self._events is not None:
            self._events[1].synchronize()

    def seconds(self, until: StepReturn | None) -> float | None:
        """From its beginning to its end, or to the beginning of a later one; None: nothing runs behind the host."""
        if self._events is None:
            return None
        began, ended = self._events
        if until is not None and until._events is not None:
            ended = until._events[0]
        return float(began.elapsed_time(ended)) / 1e3


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step on its way.

    Args:
        plan: what was asked for.
        program: what computes it.
        outputs: whose they are.
        tokens: `[repeats, outputs]` int32 on the host, filled at the end; -1: there can be no token.
        back: waits for the end, and knows when it was.
        said: gives the results of these tokens.
        leads: `[outputs]` fp32 on the host, filled at the end, see `RowResult`; None: no drafts were tried.
    """

    plan: StepPlan
    program: StepProgram
    outputs: StepOutputs
    tokens: Tensor
    back: StepReturn
    said: PlainResults
    leads: Tensor | None = None

    def seconds(self, until: PendingStep | None = None) -> float | None:
        """See `engine.step.PendingStep`."""
        return self.back.seconds(until.back if isinstance(until, StartedStep) else None)

    def results(self) -> list[RowResult]:
        """See `engine.step.PendingStep`."""
        self.back.wait()
        rows = self.plan.rows
        results = [NO_TOKEN] * len(rows)
        drawn = self.tokens.t().flatten().tolist()  # those of an output follow one another
        said = list(map(self.said.__getitem__, drawn))
        are_there = min(drawn, default=0) >= 0
        repeats = self.plan.repeats
        if repeats == 1 and are_there and not self.outputs.runs:
            for index, result in zip(self.outputs.singles, said, strict=True):
                results[index] = result
        else:
            found_leads = [] if self.leads is None else self.leads.tolist()
            tokens = [result.tokens[0] for result in said]
            at = 0
            for index, count in self.outputs:
                usable = tokens[at * repeats : (at + count) * repeats]
                if not are_there:
                    usable = usable_tokens(rows[index], [token if token.token_id >= 0 else None for token in usable])
                is_told_leads = bool(found_leads and rows[index].drafts) and is_led(rows[index])
                results[index] = RowResult(usable, (), found_leads[at : at + count] if is_told_leads else ())
                at += count
        if self.outputs.shaped:
            self._sample_on_host(results)
        return results

    @torch.inference_mode()
    def _sample_on_host(self, results: list[RowResult]) -> None:
        """Sample what the device cannot: grammars, penalties, biases, log-probabilities, texts that fork."""
        assert self.program.logits is not None
        rows = self.plan.rows
        shaped: list[int] = []
        places: list[int] = []
        at = 0
        for index, count in self.outputs:
            if index in self.outputs.shaped:
                shaped.append(index)
                own = range(at, at + count)  # the texts of a prompt that forks share a place, drafts have one each
                places += own if rows[index].drafts else [*own] * rows[index].samples
            at += count
        tasks = [task for index in shaped for task in sampling_tasks(rows[index])]
        drawn = iter(sample(self.program.logits[places], tasks))
        for index in shaped:
            results[index] = RowResult(usable_tokens(rows[index], [next(drawn) for _ in range(rows[index].samples)]))


def size_runs(tokens: int) -> int:
    """Runs that a step of so many tokens of prompts usually has at the most."""
    return min(tokens, 64)


def _decode_shape(rows: int) -> StepShape:
    return StepShape(singles=rows, runs=0, tokens=0, outputs=rows)


def size_verifications(tokens: int) -> int:
    """Runs that a step of so many tokens to verify has at the most: each has two."""
    return tokens // 2


def _verification_shape(singles: int, tokens: int, short: int, runs: int = 0) -> StepShape:
    """Of a step whose runs all verify drafts: a token is sampled after each query."""
    runs = max(size_verifications(tokens), _power_of_two(runs))
    return StepShape(singles=singles, runs=runs, tokens=tokens, outputs=singles + tokens, short_runs=short)


def _verification_tokens(tokens: int) -> int:
    """Tokens of the smallest verification that holds so many."""
    return next((size for size in VERIFICATION_TOKENS if size >= tokens), _power_of_two(tokens))


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def shaped_rows(plan: StepPlan) -> frozenset[int]:
    """Rows of a step whose next tokens are shaped by more than the device's own sampling parameters."""
    return frozenset(
        index
        for index, (row, _, samples, _, _, drafts) in enumerate(plan.rows)
        if samples and (len(row.tokens) < row.request.plain_from or (samples > 1 and not drafts))
    )

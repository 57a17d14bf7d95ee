"""An engine without a model: KV is replaced by a shadow memory in which every slot names the prefix it stands for.

The simulated runner refuses to read a slot that does not hold exactly what the row would have computed, and samples
tokens as a function of the prefix and of what its row keeps besides (counts of tokens for penalties, the state of a
grammar). So a text that came out right was computed over the right memory, with the right state. Rows that are
compressed keep a random part of their tokens in each lane; the shadow knows which, and every read is held against it.

What the small cache of a lossless row computes is marked: no other row may read it, nor may it be found under a key. It
drafts wrong tokens at random.

`AheadShadowRunner` starts steps before the host has read the ones before them: what it samples stays on its device.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.fake_grammar import FakeCompiler, FakeGrammar
from engine.shadow_rest import ShadowRest
from engine.shadow_tier import MakeTier
from kvikk.compress import KVCacheParams
from kvikk.engine.config import EngineConfig, SchedulerConfig
from kvikk.engine.core import Engine, EngineOutput
from kvikk.engine.kv import Choice
from kvikk.engine.limits import EngineLimits
from kvikk.engine.logprobs import Logprob
from kvikk.engine.request import UNKNOWN, FinishReason, Request, Row
from kvikk.engine.runner import sampling_tasks, usable_tokens
from kvikk.engine.sampler import SampledToken
from kvikk.engine.sampling_params import SamplingParams
from kvikk.engine.step import PendingStep, RowResult, ScheduledRow, StepPlan
from kvikk.errors import PinRefused, PolicyFailed
from kvikk.grammar import StructuredOutputsParams
from kvikk.memory import BlockPool, Body, Compaction, Held, Keep, MemoryConfig, Packed
from kvikk.memory.body import IntArray
from kvikk.memory.compaction import moves
from kvikk.memory.sizing import HostUse
from kvikk.prefix import KeySpace
from kvikk.types import BlockId, BlockKey, Position

PAGE = 4
LANES = 3
VOCABULARY = 50
EOS = 7
FORM, STRICT_FORM = StructuredOutputsParams(regex="lax"), StructuredOutputsParams(regex="strict")
STEP_S, DRAFT_STEP_S = 0.01, 0.002
"""What a step takes, and one in which small caches alone are read."""
GARBAGE = -1
"""What a slot holds that no prefix stands for."""
DRAFTED = -2
"""A slot that was computed in drafting holds this less the hash of its prefix."""

T = TypeVar("T")


def prefix_hashes(tokens: list[int]) -> list[int]:
    state, hashes = 17, []
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (2**61 - 1)
        hashes.append(state)
    return hashes


def next_token(
    prefix_hash: int, request: Request, choice: int, counts: Mapping[int, int], allowed: NDArray[np.bool_] | None
) -> int | None:
    """The token that is sampled: any function of all that may have a say, None where no token is allowed."""
    number = (prefix_hash * 31 + request.seed * 7 + choice * 13 + sum(t * t * (n + 1) for t, n in counts.items())) >> 3
    if allowed is None:
        return number % VOCABULARY
    places = np.flatnonzero(allowed)
    return int(places[number % len(places)]) if len(places) else None


def expected_text(prompt: list[int], request: Request, choice: int, max_len: int) -> list[int]:
    """What a row must generate, by the rules of sampling alone. One that gets stuck generates what comes before."""
    params, tokens = request.params, list(prompt)
    grammar = None
    if params.structured_outputs is not None:
        eos = frozenset() if params.ignore_eos else frozenset({EOS})
        grammar = FakeGrammar(str(params.structured_outputs.regex), VOCABULARY, eos)
    while True:
        generated = tokens[len(prompt) :]
        counts: dict[int, int] = {}
        if params.has_penalties:
            counts = dict.fromkeys(prompt if params.repetition_penalty != 1 else (), 0) | Counter(generated)
        allowed = None if grammar is None else grammar.mask()
        if allowed is not None and len(generated) < params.min_tokens:
            others = [token for token in np.flatnonzero(allowed) if token not in request.stop_ids]
            allowed[:] = np.isin(np.arange(VOCABULARY), others) if others else allowed
        token = next_token(prefix_hashes(tokens)[-1], request, choice, counts, allowed)
        if token is None:
            return generated
        tokens.append(token)
        stops = token in request.stop_ids and len(generated) + 1 >= params.min_tokens
        if grammar is not None:
            grammar.advance(token)
            stops = stops or grammar.is_complete
        if stops or len(generated) + 1 == params.max_tokens or len(tokens) >= max_len:
            return tokens[len(prompt) :]


def score(prefix_hash: int, token: int) -> tuple[Logprob, ...]:
    """The log-probability of a prompt token."""
    return (Logprob(token, -float(prefix_hash % 1009), 1),)


def expected_scores(prompt: list[int]) -> list[tuple[Logprob, ...] | None]:
    return [None, *map(score, prefix_hashes(prompt), prompt[1:])]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ShadowMemory:
    """What each slot of each frame holds, and the engine's ways to move it."""

    lanes = LANES
    token_bytes = 12 * LANES
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.content: dict[tuple[int, int], int] = {}
        self.copied_blocks = 0
        self.copied_frames = 0
        self.moved = 0
        self.restored = 0
        self.violation: AssertionError | None = None

    def of_block(self, block: int, offset: int) -> set[int]:
        """What the lanes hold of a position: one thing, if all is well."""
        return {self.content.get((block * LANES + lane, offset), GARBAGE) for lane in range(LANES)}

    def set_block(self, block: int, offset: int, value: int) -> None:
        for lane in range(LANES):
            self.content[block * LANES + lane, offset] = value

    def copy_blocks(self, copies: list[tuple[BlockId, BlockId]]) -> None:
        for source, target in copies:
            lanes = np.arange(LANES)
            self.copy_frames(source * LANES + lanes, target * LANES + lanes)
        self.copied_blocks += len(copies)

    def copy_frames(self, sources: IntArray, targets: IntArray) -> None:
        assert not set(sources.tolist()) & set(targets.tolist())
        assert (targets >= LANES).all(), "the null block is never written"
        self.copied_frames += len(sources)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for offset in range(PAGE):
                self.content[target, offset] = self.content.get((source, offset), GARBAGE)

    def pack(self, held: Held, keep: Keep, plan: Compaction, *, wants_order: bool = False) -> Packed:
        packed, places = moves(held, keep, plan)
        try:
            self._move(places)
        except AssertionError as violation:
            self.violation = violation
            raise
        return packed

    def _move(self, places: Tensor) -> None:
        sources, targets = (list(zip(*slots.tolist(), strict=True)) for slots in (places[:2], places[2:]))
        self.moved += len(sources)
        assert len(set(targets)) == len(targets)
        values = [self.content[frame, offset] for frame, offset in sources]
        for (frame, offset), value in zip(targets, values, strict=True):
            assert frame >= LANES, "the null block is never written"
            self.content[frame, offset] = value

    def save(self, frames: IntArray, blocks: list[BlockId]) -> list[list[int]]:
        every = [*frames.tolist(), *(block * LANES + lane for block in blocks for lane in range(LANES))]
        return [[self.content.get((frame, offset), GARBAGE) for offset in range(PAGE)] for frame in every]

    def restore(self, saved: list[list[int]], frames: IntArray, blocks: list[BlockId]) -> None:
        self.restored += 1
        every = [*frames.tolist(), *(block * LANES + lane for block in blocks for lane in range(LANES))]
        for frame, values in zip(every, saved, strict=True):
            for offset, value in enumerate(values):
                self.content[frame, offset] = value


class ShadowCompressor:
    """Keeps what a hash of request, lane and position says, and remembers what that was.

    A request says how: share of what is kept, and every how many tokens, in its options of the policy `random`.
    """

    def __init__(self) -> None:
        self.kept: dict[Row, list[set[int]]] = {}
        self.bodies: dict[Row, Body | None] = {}
        self.choices: dict[Row, list[set[int]]] = {}
        """The last choice for a row, which counts once the row has another body."""
        self.fail_next = False
        self.chosen = 0
        self.violation: AssertionError | None = None

    def check(self, params: KVCacheParams) -> None:
        """Everything can be done."""

    def keeps_everything(self, row: Row) -> bool:
        return row.front <= 6

    def next_trigger(self, row: Row, after: int | None = None) -> tuple[int | None, range]:
        params = row.request.kv_cache
        assert params is not None
        at: int | None
        if after is not None:
            at = len(row.tokens) + max(after, 5)
        elif row.compress_at is None:
            at = max(len(row.request.prompt_token_ids), len(row.tokens))
        else:
            at = None if params.every is None else row.compress_at + params.every
        looks_at = 5 if row.request.seed % 3 else 0
        return at, range(0) if at is None else range(max(0, at - looks_at), at)

    def kept_by(self, row: Row) -> list[set[int]]:
        """What each lane holds below the tail."""
        if row.body is None:
            return [set(range(row.front)) for _ in range(LANES)]
        if self.bodies.get(row) is not row.body:
            self.bodies[row], self.kept[row] = row.body, self.choices[row.draft_of or row]
        return self.kept[row]

    def choose(self, row: Row, held: Held, kept_from: int) -> Choice:
        try:
            return self._choose(row, held, kept_from)
        except AssertionError as violation:  # the engine survives a policy that fails
            self.violation = violation
            raise

    def _choose(self, row: Row, held: Held, kept_from: int) -> Choice:
        self.chosen += 1
        if self.fail_next:
            self.fail_next = False
            raise PolicyFailed("injected")
        share = row.request.kv_cache.method.budget.amount  # type: ignore[union-attr]
        before = self.kept_by(row)
        kept: list[set[int]] = []
        mask: list[list[bool]] = []
        for lane in range(LANES):
            live, positions = held.live[lane].tolist(), held.positions[lane].tolist()
            held_positions = {p for p, is_live in zip(positions, live, strict=True) if is_live}
            known = {position for position in before[lane] if position < row.tail_start}
            assert held_positions == known | set(range(row.tail_start, row.front)), "what was kept is held"
            draws = {p: hash((row.request.seed, lane, p)) % 100 for p in held_positions}
            kept.append({p for p, draw in draws.items() if p >= kept_from or draw < 100 * share})
            mask.append([is_live and p in kept[lane] for p, is_live in zip(positions, live, strict=True)])
        keep = torch.tensor(mask)
        self.choices[row] = kept
        state = {"positions": held.positions.float()} if row.request.seed % 2 else {}
        if row.body is not None and "positions" in row.body.state:
            for lane in range(LANES):
                length = int(row.body.lengths[lane])
                assert torch.equal(
                    row.body.state["positions"][lane, :length], row.body.positions[lane, :length].float()
                ), "what is remembered of a slot goes where the slot goes"
        return Choice(keep, keep.sum(1).numpy(), state)

    def check_body(self, row: Row, memory: ShadowMemory, own: list[int]) -> None:
        """What a row reads below its tail is what was chosen, once each, and holds what was computed."""
        assert row.body is not None
        kept = self.kept_by(row)
        for lane in range(LANES):
            length = int(row.body.lengths[lane])
            positions = row.body.positions[lane, :length].tolist()
            assert positions == sorted(p for p in kept[lane] if p < row.body.stop)
            for slot, position in enumerate(positions):
                frame = int(row.body.frames[lane, slot // PAGE])
                held = memory.content[frame, slot % PAGE]
                assert held == own[position], f"{row.id} reads a wrong slot of lane {lane} at {position}"


class ShadowRunner:
    """Runs plans over the shadow memory, and fails when told to.

    Args:
        wrong_drafts: share of the drafted tokens that are any tokens.
    """

    def __init__(self, wrong_drafts: float = 0.15) -> None:
        self.pool: BlockPool | None = None
        self.clock = Clock()
        self.wrong_drafts = wrong_drafts
        self.rng = random.Random(11)
        self.memory = ShadowMemory()
        self.compressor = ShadowCompressor()
        self.fail_next = False
        self.nan_next = False
        self.interrupt_next = False
        self.largest_step = 0
        self.computed_tokens = 0
        self.prompt_tokens: Counter[str] = Counter()
        """Positions of the prompt that were computed for each request."""
        self.last_plan: StepPlan | None = None
        self.violation: AssertionError | None = None

    def execute(self, plan: StepPlan) -> list[RowResult]:
        """Run a plan."""
        results = self.watched(lambda: self._execute(plan))
        self.computed_tokens += token_count(plan)
        return results

    def _execute(self, plan: StepPlan) -> list[RowResult]:
        for scheduled in plan.rows:
            known = len(scheduled.row.tokens) + len(scheduled.drafts)
            assert scheduled.runs[-1].stop <= known, "all before has been read: what is computed now is known"
        return self.compute(plan)

    def watched(self, run: Callable[[], T]) -> T:
        """The engine survives a step that fails, so a violation is kept for the world to raise."""
        try:
            return run()
        except AssertionError as violation:
            self.violation = violation
            raise

    def known_tokens(self, row: Row) -> list[int]:
        """The row's tokens, as what computes them knows them."""
        return row.tokens

    def tried(self, scheduled: ScheduledRow) -> Sequence[int]:
        """The row's drafts, as what computes them knows them."""
        return scheduled.drafts

    def is_spoilt(self, row: Row) -> bool:
        """Whether all that the row reads and writes is garbage, as the host is about to learn."""
        return False

    def compute(self, plan: StepPlan) -> list[RowResult]:
        assert self.pool is not None
        self.last_plan = plan
        self.largest_step = max(self.largest_step, plan.tokens)
        is_draft = all(scheduled.row.draft_of is not None for scheduled in plan.rows)
        self.clock.now += DRAFT_STEP_S if is_draft else STEP_S
        tokens = [[*self.known_tokens(s.row), *self.tried(s)] for s in plan.rows]
        assert not any(UNKNOWN in own for own in tokens), "a token is computed that nobody knows"
        hashes = [prefix_hashes(own) for own in tokens]
        written: set[tuple[int, int]] = set()
        for scheduled, own in zip(plan.rows, hashes, strict=True):
            assert all(a.stop <= b.start for a, b in pairwise(scheduled.runs)), "runs are in ascending order"
            row = scheduled.row
            is_garbage = self.fail_next or self.is_spoilt(row)
            for run in scheduled.runs:
                trigger = (row.draft_of or row).compress_at
                for position in range(run.start, run.stop) if run.write else ():
                    assert trigger is None or position < trigger, "nothing beyond a trigger is computed"
                    block, offset = run.blocks[(position - row.tail_start) // PAGE], position % PAGE
                    assert block != 0, "the null block is never written"
                    assert self.pool.references(block) == 1, "a shared block is never written"
                    assert not self.pool.is_kept(block), "an indexed block is never written"
                    assert (block, offset) not in written, "two rows write one slot"
                    written.add((block, offset))
                    self.memory.set_block(block, offset, GARBAGE if is_garbage else content(row, own, position))
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("injected")
        if self.interrupt_next:
            self.interrupt_next = False
            raise KeyboardInterrupt
        results = []
        for scheduled, own in zip(plan.rows, hashes, strict=True):
            row = scheduled.row
            for run in scheduled.runs:
                prompt = row.request.prompt_token_ids
                self.prompt_tokens[row.request.id] += max(0, min(run.stop, len(prompt)) - run.start)
                assert run.body is row.body
                for position in range(row.tail_start, run.stop) if not self.is_spoilt(row) else ():
                    held = self.memory.of_block(run.blocks[(position - row.tail_start) // PAGE], position % PAGE)
                    assert held == {content(row, own, position)}, f"{row.id} reads a wrong slot at {position}"
            if row.body is not None:
                self.compressor.check_body(row, self.memory, own)
            if scheduled.samples:
                assert scheduled.runs[-1].stop == len(own)
                generated = len(own) - len(row.request.prompt_token_ids)
                assert generated != row.request.params.max_tokens, "no step is planned after the last token"
            computed = {position for run in scheduled.runs for position in range(run.start, run.stop)}
            assert computed.issuperset(scheduled.scores), "what is scored is computed in the same step"
            scores = [score(own[position], row.tokens[position + 1]) for position in scheduled.scores]
            results.append(RowResult(self._sample(scheduled, own), scores))
        if self.nan_next and any(result.tokens for result in results):
            self.nan_next = False
            index = next(i for i, result in enumerate(results) if result.tokens)
            good = self.rng.randrange(len(results[index].tokens)) if plan.rows[index].drafts else 0
            del results[index].tokens[good:]
            self.spoil(plan.rows[index], good)
        return results

    def spoil(self, scheduled: ScheduledRow, good: int = 0) -> None:
        """What a row computed is garbage, but for the first `good` of its queries: nobody may read it again."""
        for run in scheduled.runs:
            for position in range(run.start + good, run.stop) if run.write else ():
                index = (position - scheduled.row.tail_start) // PAGE
                self.memory.set_block(run.blocks[index], position % PAGE, GARBAGE)

    def _sample(self, scheduled: ScheduledRow, own: list[int]) -> list[SampledToken]:
        drawn: list[SampledToken | None] = []
        for task in sampling_tasks(scheduled):
            counts = {} if task.history is None else dict(zip(task.history.tokens, task.history.counts, strict=True))
            repeat = len(own) - len(scheduled.drafts) - len(scheduled.row.tokens)
            prefix_hash = own[task.position - 1 + repeat]
            if scheduled.row.draft_of is not None and self.rng.random() < self.wrong_drafts:
                prefix_hash = self.rng.getrandbits(60)
            token = next_token(prefix_hash, scheduled.row.request, task.choice, counts, task.allowed)
            drawn.append(None if token is None else SampledToken(token))
        return usable_tokens(scheduled, drawn)


def content(row: Row, own: list[int], position: int) -> int:
    """What the slot of a position holds where all is well."""
    if row.draft_of is None:
        return own[position]
    assert row.draft_of.drafting is not None
    first = row.draft_of.drafting.base - 1  # that a small cache has computed itself, on what it keeps
    return own[position] if position < first else DRAFTED - own[position]


def token_count(plan: StepPlan) -> int:
    return plan.repeats * sum(run.length for scheduled in plan.rows for run in scheduled.runs)


def host_has_a_say(scheduled: ScheduledRow) -> bool:
    """Whether a row's next token, or what is told of it, depends on what the host knows or decides."""
    row, params = scheduled.row, scheduled.row.request.params
    if scheduled.scores or scheduled.is_watched:
        return True
    if not scheduled.samples:
        return False
    generated = len(row.tokens) - len(row.request.prompt_token_ids)
    return (
        (scheduled.samples > 1 and not scheduled.drafts)
        or params.has_penalties
        or row.grammar is not None
        or bool(params.logit_bias)
        or params.logprobs is not None
        or (generated < params.min_tokens and bool(row.request.stop_ids))
    )


@dataclass(frozen=True, slots=True)
class LeftToken:
    """A token that a row's last step left on the device, for the step that computes it."""

    blocks: list[BlockId]
    position: int
    token: int


@dataclass(frozen=True, slots=True)
class Spoilt:
    """In which of the steps started a row became garbage, in these blocks: a small cache can begin anew."""

    step: int
    blocks: list[BlockId]


class ShadowStep:
    """A step that has been started. The shadow memory has changed; the host learns of it in `results` alone."""

    def __init__(self, runner: AheadShadowRunner, plan: StepPlan, found: list[RowResult], *, fails: bool) -> None:
        self.runner, self.plan, self._found, self._fails = runner, plan, found, fails
        self.number = runner.launched

    def results(self) -> list[RowResult]:
        if self.runner.interrupt_results_next:
            self.runner.interrupt_results_next = False
            raise KeyboardInterrupt
        return self.runner.watched(self._read)

    def seconds(self, until: PendingStep | None = None) -> float | None:
        return None

    def _read(self) -> list[RowResult]:
        runner = self.runner
        assert runner.unread.popleft() is self, "steps are read once, in the order in which they were started"
        for scheduled in self.plan.rows:
            row = scheduled.row
            is_past = row in runner.spoilt and runner.spoilt[row].step < self.number
            assert row.finish_reason or row.draft_of or not is_past, "a row goes on after its step has failed"
        if self._fails:
            raise RuntimeError("injected, and seen late")
        runner.computed_tokens += token_count(self.plan)
        return self._found


class AheadShadowRunner(ShadowRunner):
    """Starts steps ahead, as a GPU does: they run in the order of `launch`, whatever the host has seen by then.

    A row whose step gave garbage is spoilt: steps that were started before the host could know compute more of it.
    """

    def __init__(self, wrong_drafts: float = 0.15) -> None:
        super().__init__(wrong_drafts)
        self.fail_results_next = False
        self.interrupt_results_next = False
        self.unread: deque[ShadowStep] = deque()
        self.spoilt: dict[Row, Spoilt] = {}
        self.launched = 0
        self.launched_over_another = 0
        self.repeated = 0
        """Steps that were computed more than once."""
        self.verified_ahead = 0
        """Rows whose drafts were tried before the host knew them."""
        self._left: dict[Row, LeftToken] = {}
        self._said: dict[Row, dict[int, int]] = {}

    def launch(self, plan: StepPlan) -> ShadowStep | None:
        """See `engine.step.AheadRunner`."""
        if any(host_has_a_say(scheduled) for scheduled in plan.rows):
            return None
        return self.watched(lambda: self._launch(plan))

    def known_tokens(self, row: Row) -> list[int]:
        """A token that its last step left is taken from there, whether the host knows it by now or not."""
        left = self._left.get(row)
        if left is None or left.blocks is not row.blocks or left.position < len(row.tokens) - 1:
            return row.tokens
        said = self._said[row]
        known = [said[position] if token == UNKNOWN else token for position, token in enumerate(row.tokens)]
        assert left.position >= len(known) or known[left.position] == left.token
        return [*known, *(said[position] for position in range(len(known), left.position + 1))]

    def tried(self, scheduled: ScheduledRow) -> Sequence[int]:
        """Drafts are where the small cache left them; any token will do where it is gone, or said none."""
        if UNKNOWN not in scheduled.drafts:
            return scheduled.drafts
        drafting = scheduled.row.drafting
        assert drafting is not None
        self.verified_ahead += 1
        said = self._said.get(drafting.cache, {}) if drafting.cache else {}
        first = len(scheduled.row.tokens)
        return [
            said.get(position, 0) if draft == UNKNOWN else draft
            for position, draft in enumerate(scheduled.drafts, first)
        ]

    def is_spoilt(self, row: Row) -> bool:
        return row in self.spoilt and self.spoilt[row].blocks is row.blocks

    def spoil(self, scheduled: ScheduledRow, good: int = 0) -> None:
        super().spoil(scheduled, good)
        if not good and not self.is_spoilt(scheduled.row):
            self.spoilt[scheduled.row] = Spoilt(self.launched, scheduled.row.blocks)

    def compute(self, plan: StepPlan) -> list[RowResult]:
        if any(host_has_a_say(scheduled) for scheduled in plan.rows):
            assert not self.unread, "what the host has a say in is computed when it has read all before"
            assert not any(scheduled.row.pending for scheduled in plan.rows)
        if plan.repeats > 1:
            self.repeated += 1
            assert all(scheduled.row.draft_of is not None for scheduled in plan.rows)
            return self._compute_again_and_again(plan)
        found = super().compute(plan)
        for scheduled, result in zip(plan.rows, found, strict=True):
            row = scheduled.row
            self._left.pop(row, None)
            if scheduled.samples and not scheduled.drafts and not host_has_a_say(scheduled):
                token = result.tokens[0].token_id if result.tokens else 0
                position = scheduled.runs[-1].stop
                self._left[row] = LeftToken(row.blocks, position, token)
                self._said.setdefault(row, {})[position] = token
        return found

    def _compute_again_and_again(self, plan: StepPlan) -> list[RowResult]:
        """Each time from where the time before has left the rows. A draft ends before the first token that is bad."""
        said: list[list[SampledToken]] = [[] for _ in plan.rows]
        ended: set[int] = set()
        for repeat in range(plan.repeats):
            rows = [
                scheduled._replace(runs=[run._replace(start=Position(run.start + repeat)) for run in scheduled.runs])
                for scheduled in plan.rows
            ]
            for index, result in enumerate(self.compute(replace(plan, rows=rows, repeats=1))):
                if not result.tokens:
                    ended.add(index)
                elif index not in ended:
                    said[index] += result.tokens
        return [RowResult(tokens) for tokens in said]

    def _launch(self, plan: StepPlan) -> ShadowStep:
        assert len(self.unread) <= 1, "there is room for the tokens of two steps"
        is_awaited = any(step.plan.tries_drafts for step in self.unread)
        assert not is_awaited, "nothing is planned before it is known which drafts were right"
        found = self.compute(plan)
        fails, self.fail_results_next = self.fail_results_next, False
        for scheduled in plan.rows if fails else ():
            self.spoil(scheduled)
        step = ShadowStep(self, plan, found, fails=fails)
        self.launched += 1
        self.launched_over_another += bool(self.unread)
        self.unread.append(step)
        for row in [row for row in self._left if row.finish_reason]:
            del self._left[row], self._said[row]
        return step


class World:
    """An engine, its shadow memory, and a record of what every request should and did get."""

    def __init__(
        self,
        blocks: int,
        *,
        max_len: int = 60,
        seqs: int = 8,
        budget: int = 16,
        caching: bool = True,
        runner: ShadowRunner | None = None,
        tier: MakeTier | None = None,
        rest_blocks: int = 0,
        host_use: HostUse = "always",
    ) -> None:
        self.runner = runner or ShadowRunner()
        self.rest = ShadowRest(rest_blocks, self.runner.memory, random.Random(13)) if rest_blocks else None
        self.clock = Clock()
        self.max_len = max_len
        keyspace = KeySpace(model="toy", rope="none", kv_format="shadow", page_size=PAGE, numerics="fast")
        self.engine = Engine(
            EngineConfig(
                scheduler=SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget),
                enable_prefix_caching=caching,
                memory=MemoryConfig(kv_host_memory="1GiB", kv_host_use=host_use) if rest_blocks else MemoryConfig(),
            ),
            EngineLimits(max_model_len=max_len, vocabulary=VOCABULARY, eos_token_ids=frozenset({EOS})),
            keyspace,
            blocks,
            self.runner,
            self.runner.memory,
            compressor=self.runner.compressor,
            grammars=FakeCompiler(VOCABULARY, frozenset({EOS})),  # type: ignore[arg-type]
            clock=self.clock,
            seeds=random.Random(5),
            tier=None if tier is None else lambda kv, clock: tier(kv, clock, self.runner.memory),
            rest=self.rest,
        )
        self.runner.pool, self.runner.clock = self.engine.pool, self.clock
        self.requests: dict[str, Request] = {}
        self.texts: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], FinishReason] = {}
        self.scored: set[str] = set()
        self.given_up: set[tuple[str, int]] = set()
        self.meanings: dict[BlockKey, list[int]] = {}
        """What the slots of a block of each key hold."""
        self.completed = 0
        self.stuck = 0
        self.stalled = 0
        self.finished = 0
        self.prompts: list[list[int]] = []

    def add(self, prompt: list[int], **options: object) -> Request:
        request = self.engine.add(prompt, SamplingParams.from_dict(dict(options)))
        self.requests[request.id] = request
        self.prompts.append(request.prompt_token_ids)
        return request

    def abort(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        self.given_up |= {(request_id, choice) for choice in range(request.params.n)}
        self.engine.abort(request_id)

    def abort_choice(self, request_id: str, choice: int) -> bool:
        """Give up one text; the others must come out as if nothing had happened."""
        done = self.engine.abort(request_id, choice)
        self.given_up.add((request_id, choice))
        self._forget_ended(self.requests[request_id])
        return done

    def step(self, *, check: bool = True) -> list[EngineOutput]:
        """One step, recorded and checked."""
        before_s = self.clock.now
        if self.rest is not None:
            self.rest.pass_time()
        requests = list(self.engine.requests)
        try:
            outputs = self.engine.step()
        except KeyboardInterrupt:
            outputs = []
        if self.clock.now == before_s:  # nothing was computed
            self.clock.now += STEP_S
        for violation in (self.runner.violation, self.runner.memory.violation, self.runner.compressor.violation):
            if violation is not None:
                raise violation
        for out in outputs:
            key = (out.request.id, out.choice)
            assert key not in self.given_up, "what was given up is not heard of again"
            assert key not in self.ends, "what has ended is not heard of again"
            if out.prompt_logprobs is not None:
                assert out.request.id not in self.scored, "prompts are scored once"
                assert out.prompt_logprobs == expected_scores(out.request.prompt_token_ids)
                self.scored.add(out.request.id)
            if out.token is not None:
                scored = out.request.params.prompt_logprobs is None or out.request.id in self.scored
                assert scored, "the scores come with the first token"
                assert out.token.token_id != UNKNOWN
                self.texts.setdefault(key, []).append(out.token.token_id)
            if out.finish_reason is not None:
                self._end(out)
        if check:
            self.engine.check()
            self._check_rows(requests)
            self._check_cached_blocks(requests)
        return outputs

    def _check_rows(self, requests: list[Request]) -> None:
        """What the host does not know is on its way, and of nothing that it does not know is there a key."""
        plans = [step.plan for step in self.engine._in_flight]
        planned = [scheduled for plan in plans for scheduled in plan.rows * plan.repeats]
        flying = [scheduled.row for scheduled in planned if scheduled.samples and not scheduled.drafts]
        for request in requests:
            caches = [row.drafting.cache for row in request.rows if row.drafting and row.drafting.cache]
            in_bodies = sum(row.body_blocks for row in [*request.rows, *caches])
            tables = [row.blocks for row in request.rows]
            tables += [row.rest.arriving for row in request.rows if row.rest]
            assert request.held_blocks == len({block for table in tables for block in table}) + in_bodies
            usage = request.kv_usage
            assert usage is None or usage.accepted <= usage.drafted
            for row in request.rows:
                assert row.pending == (0 if row.finish_reason else sum(other is row for other in flying))
                assert UNKNOWN not in row.generated
                assert row.tokens.count(UNKNOWN) == row.pending
                assert len(row.keys) - 1 <= row.known // PAGE
                assert not isinstance(row.grammar, FakeGrammar) or not row.grammar.is_broken
            for cache in caches:
                assert cache.pending in (0, sum(other is cache for other in flying)), "0: its round has ended before"
                assert cache.tokens.count(UNKNOWN) == cache.pending

    def _check_cached_blocks(self, requests: list[Request]) -> None:
        """Every block that can be found holds what its key says."""
        for row in [row for request in requests for row in request.rows]:
            if row.keys[-1] not in self.meanings:
                hashes = prefix_hashes(row.tokens[: row.known])
                for index, key in enumerate(row.keys):
                    self.meanings[key] = hashes[(index - 1) * PAGE : index * PAGE] if index else []
        for block, key in self.engine.prefix._key_of.items():
            held = [self.runner.memory.of_block(block, offset) for offset in range(PAGE)]
            meant = [{value} for value in self.meanings[key]]
            assert held == meant, f"block {block} holds something else than its key says"

    def _end(self, out: EngineOutput) -> None:
        key = (out.request.id, out.choice)
        text = self.texts.pop(key, [])
        self.ends[key] = out.finish_reason  # type: ignore[assignment]
        self.finished += 1
        self.completed += out.finish_reason is FinishReason.STOP and out.token is None
        self.stuck += "stuck" in str(out.error)
        self.stalled += "no progress" in str(out.error)
        expected = expected_text(out.request.prompt_token_ids, out.request, out.choice, self.max_len)
        if out.finish_reason is FinishReason.ERROR:
            assert text == expected[: len(text)]
        else:
            assert text == expected
        rows = out.request.rows
        if out.choice < len(rows):
            assert rows[out.choice].generated == text
        if len(rows) == out.request.params.n and not any(row.preemptions for row in rows):
            computed = self.runner.prompt_tokens[out.request.id]
            is_computed_whole = out.finish_reason is not FinishReason.ERROR
            assert not is_computed_whole or computed == len(out.request.prompt_token_ids) - out.request.cached_tokens
        self._forget_ended(out.request)

    def _forget_ended(self, request: Request) -> None:
        texts = {(request.id, choice) for choice in range(request.params.n)}
        if all(text in self.ends or text in self.given_up for text in texts):
            self.requests.pop(request.id, None)

    def drain(self, limit: int = 10_000) -> None:
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < limit, f"the engine stalls: {self._why()}"
        assert not self.requests, "every request has ended"
        pinned = self.engine.prefix.pinned
        assert self.engine.pool.held == pinned, "all rows are gone: only pins hold blocks"
        assert self.rest is None or self.rest.free == self.rest.total, "and the host holds nothing for them"

    def _why(self) -> str:
        scheduler, kv = self.engine.scheduler, self.engine.kv
        rows = [
            f"{row.id}: {len(row.tokens)} tokens, front {row.front}, trigger {row.compress_at}, "
            f"{len(row.blocks)} blocks, saved {row.saved is not None}, running {row.is_running}"
            for row in [*scheduler.running, *scheduler.waiting]
        ]
        counts = (
            f"{kv.pool.free} free, {kv.pool.cached} cached, {kv.frames.split_blocks} split, {kv.frames.free} frames"
        )
        return "; ".join([*rows, counts, f"{kv.prefix.pinned} pinned of {kv.pool.total}"])


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Prompts that share prefixes often: few families, then a random tail."""
    family = rng.randrange(4)
    shared = [(family * 11 + i * i) % VOCABULARY for i in range(rng.choice([0, 3, 8, 16, 20, 33]))]
    tail = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(0, 12))]
    return (shared + tail)[:longest] or [rng.randrange(VOCABULARY)]


def random_compression(rng: random.Random) -> dict[str, object]:
    options: dict[str, object] = {
        "policy": "random",
        "budget": rng.choice([0.1, 0.3, 0.6, 0.95]),
        "trigger": rng.choice(["prefill", "every:1", "every:3", "every:8"]),
    }
    if rng.random() < 0.4:
        return options
    drafts = {"lossless": True, "draft_tokens": rng.choice([None, 0, 1, 3, 8, 8])}
    if rng.random() < 0.3:
        return drafts | {"drafter": "ngram"}
    return drafts | options | {"drafter": rng.choice(["cache", "cache", "cache+ngram"])}


def random_event(world: World, rng: random.Random, *, plain_share: float = 0.0) -> None:
    """One thing that could happen between two steps of a busy server.

    Args:
        world: it happens to.
        rng: chooses.
        plain_share: of the requests that want nothing but a text, which a step can be started ahead for.
    """
    engine = world.engine
    what = rng.random()
    if what < 0.30 and len(world.requests) < 12:
        n = rng.choice([1, 1, 1, 2, 3])
        is_plain = rng.random() < plain_share
        repeats = [prompt for prompt in world.prompts[-20:] if rng.random() < 0.03]  # whole prompts come back too
        world.add(
            repeats[0] if repeats else random_prompt(rng, world.max_len - 1),
            n=n,
            max_tokens=rng.choice([1, 2, 5, 9, 30, None]),
            min_tokens=rng.choice([0, 0, 1]),
            ignore_eos=rng.random() < 0.3,
            seed=rng.choice([None, 1, 2]),
            prompt_logprobs=None if is_plain else rng.choice([None, None, None, 0]),
            repetition_penalty=1.0 if is_plain else rng.choice([1.0, 1.0, 1.5]),
            presence_penalty=0.0 if is_plain else rng.choice([0.0, 0.0, 0.5]),
            structured_outputs=None if is_plain else rng.choice([None, None, FORM, STRICT_FORM]),
            kv_cache=random_compression(rng) if rng.random() < (0.1 if is_plain else 0.5) else None,
        )
    elif what < 0.34 and world.requests:
        world.abort(rng.choice(sorted(world.requests)))
    elif what < 0.36 and world.requests:
        world.abort_choice(rng.choice(sorted(world.requests)), rng.randrange(3))
    elif what < 0.38:
        engine.prefix.reset()
    elif what < 0.44:
        engine.prefix.discard(rng.sample(range(1, engine.pool.total + 1), k=min(5, engine.pool.total)))
    elif what < 0.46:
        world.runner.fail_next = True
    elif what < 0.47:
        world.runner.nan_next = True
    elif what < 0.475:
        world.runner.interrupt_next = True
    elif what < 0.478:
        world.runner.compressor.fail_next = True
    elif what < 0.49:
        with suppress(PinRefused):
            engine.pin(rng.choice("ab"), random_prompt(rng, world.max_len - 1))
    elif what < 0.52:
        engine.prefix.unpin(rng.choice("ab"))
    elif isinstance(world.runner, AheadShadowRunner):
        if what < 0.53:
            world.runner.fail_results_next = True
        elif what < 0.54:
            world.runner.interrupt_results_next = True
    engine.check()

"""An engine without a model: KV is replaced by a shadow memory in which every slot names the prefix it stands for.

The simulated runner refuses to read a slot that does not hold exactly what the row would have computed, and samples
tokens as a function of the prefix and of what its row keeps besides (counts of tokens for penalties, the state of a
grammar). So a text that came out right was computed over the right memory, with the right state.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine.fake_grammar import FakeCompiler, FakeGrammar
from kvikk.engine.config import EngineConfig, SchedulerConfig
from kvikk.engine.core import Engine, EngineOutput
from kvikk.engine.limits import EngineLimits
from kvikk.engine.logprobs import Logprob
from kvikk.engine.request import FinishReason, Request
from kvikk.engine.runner import sampling_tasks
from kvikk.engine.sampler import SampledToken
from kvikk.engine.sampling_params import SamplingParams
from kvikk.engine.step import RowResult, ScheduledRow, StepPlan
from kvikk.errors import PinRefused
from kvikk.grammar import StructuredOutputsParams
from kvikk.memory import BlockPool
from kvikk.prefix import KeySpace

PAGE = 4
VOCABULARY = 50
EOS = 7
FORM, STRICT_FORM = StructuredOutputsParams(regex="lax"), StructuredOutputsParams(regex="strict")


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


class ShadowRunner:
    """Runs plans over the shadow memory, and fails when told to."""

    def __init__(self) -> None:
        self.pool: BlockPool | None = None
        self.content: dict[tuple[int, int], int] = {}
        self.fail_next = False
        self.nan_next = False
        self.interrupt_next = False
        self.largest_step = 0
        self.last_plan: StepPlan | None = None
        self.violation: AssertionError | None = None

    def execute(self, plan: StepPlan) -> list[RowResult]:
        """Run a plan. The engine survives a step that fails, so a violation is kept for the world to raise."""
        try:
            return self._execute(plan)
        except AssertionError as violation:
            self.violation = violation
            raise

    def _execute(self, plan: StepPlan) -> list[RowResult]:
        assert self.pool is not None
        self.last_plan = plan
        self.largest_step = max(self.largest_step, plan.tokens)
        for source, target in plan.copies:
            assert target != 0
            for offset in range(PAGE):
                self.content[target, offset] = self.content.get((source, offset), -1)
        hashes = [prefix_hashes(s.row.tokens) for s in plan.rows]
        written: set[tuple[int, int]] = set()
        for scheduled, own in zip(plan.rows, hashes, strict=True):
            assert all(a.stop <= b.start for a, b in pairwise(scheduled.runs)), "runs are in ascending order"
            for run in scheduled.runs:
                for position in range(run.start, run.stop) if run.write else ():
                    block, offset = run.blocks[position // PAGE], position % PAGE
                    assert block != 0, "the null block is never written"
                    assert self.pool.references(block) == 1, "a shared block is never written"
                    assert not self.pool.is_kept(block), "an indexed block is never written"
                    assert (block, offset) not in written, "two rows write one slot"
                    written.add((block, offset))
                    self.content[block, offset] = -1 if self.fail_next else own[position]
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("injected")
        if self.interrupt_next:
            self.interrupt_next = False
            raise KeyboardInterrupt
        results = []
        for scheduled, own in zip(plan.rows, hashes, strict=True):
            for run in scheduled.runs:
                for position in range(run.stop):
                    held = self.content[run.blocks[position // PAGE], position % PAGE]
                    assert held == own[position], f"{scheduled.row.id} reads a wrong slot at {position}"
            if scheduled.samples:
                assert scheduled.runs[-1].stop == len(scheduled.row.tokens)
            computed = {position for run in scheduled.runs for position in range(run.start, run.stop)}
            assert computed.issuperset(scheduled.scores), "what is scored is computed in the same step"
            scores = [score(own[position], scheduled.row.tokens[position + 1]) for position in scheduled.scores]
            results.append(RowResult(self._sample(scheduled, own[-1]), scores))
        if self.nan_next and any(result.tokens for result in results):
            self.nan_next = False
            index = next(i for i, result in enumerate(results) if result.tokens)
            results[index].tokens.clear()
            for run in plan.rows[index].runs:  # what it computed is garbage: nobody may read it again
                for position in range(run.start, run.stop) if run.write else ():
                    self.content[run.blocks[position // PAGE], position % PAGE] = -1
        return results

    @staticmethod
    def _sample(scheduled: ScheduledRow, prefix_hash: int) -> list[SampledToken]:
        row = scheduled.row
        counts = {} if row.history is None else dict(zip(row.history.tokens, row.history.counts, strict=True))
        tasks = sampling_tasks(scheduled)
        tokens = [next_token(prefix_hash, row.request, task.choice, counts, task.allowed) for task in tasks]
        return [SampledToken(token) for token in tokens if token is not None]


class World:
    """An engine, its shadow memory, and a record of what every request should and did get."""

    def __init__(
        self, blocks: int, *, max_len: int = 60, seqs: int = 8, budget: int = 16, caching: bool = True
    ) -> None:
        self.runner = ShadowRunner()
        self.clock = Clock()
        self.max_len = max_len
        keyspace = KeySpace(model="toy", rope="none", kv_format="shadow", page_size=PAGE, numerics="fast")
        self.engine = Engine(
            EngineConfig(
                scheduler=SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget),
                enable_prefix_caching=caching,
            ),
            EngineLimits(max_model_len=max_len, vocabulary=VOCABULARY, eos_token_ids=frozenset({EOS})),
            keyspace,
            blocks,
            self.runner,
            grammars=FakeCompiler(VOCABULARY, frozenset({EOS})),  # type: ignore[arg-type]
            clock=self.clock,
            seeds=random.Random(5),
        )
        self.runner.pool = self.engine.pool
        self.requests: dict[str, Request] = {}
        self.texts: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], FinishReason] = {}
        self.scored: set[str] = set()
        self.completed = 0
        self.stuck = 0
        self.finished = 0
        self.prompts: list[list[int]] = []

    def add(self, prompt: list[int], **options: object) -> Request:
        request = self.engine.add(prompt, SamplingParams.from_dict(dict(options)))
        self.requests[request.id] = request
        self.prompts.append(request.prompt_token_ids)
        return request

    def abort(self, request_id: str) -> None:
        for row in self.requests[request_id].rows:
            self.texts.pop((request_id, row.choice), None)
        self.engine.abort(request_id)
        del self.requests[request_id]

    def abort_choice(self, request_id: str, choice: int) -> bool:
        """Give up one text; the others must come out as if nothing had happened."""
        done = self.engine.abort(request_id, choice)
        self.texts.pop((request_id, choice), None)
        if not self.engine.is_active(request_id):
            del self.requests[request_id]
        return done

    def step(self, *, check: bool = True) -> list[EngineOutput]:
        """One step, recorded and checked."""
        self.clock.now += 0.01
        try:
            outputs = self.engine.step()
        except KeyboardInterrupt:
            outputs = []
        if self.runner.violation is not None:
            raise self.runner.violation
        for out in outputs:
            key = (out.request.id, out.choice)
            if out.prompt_logprobs is not None:
                assert out.request.id not in self.scored, "prompts are scored once"
                assert out.prompt_logprobs == expected_scores(out.request.prompt_token_ids)
                self.scored.add(out.request.id)
            if out.token is not None:
                scored = out.request.params.prompt_logprobs is None or out.request.id in self.scored
                assert scored, "the scores come with the first token"
                self.texts.setdefault(key, []).append(out.token.token_id)
            if out.finish_reason is not None:
                self._end(out)
        if check:
            self.engine.check()
        return outputs

    def _end(self, out: EngineOutput) -> None:
        key = (out.request.id, out.choice)
        text = self.texts.pop(key, [])
        self.ends[key] = out.finish_reason  # type: ignore[assignment]
        self.finished += 1
        self.completed += out.finish_reason is FinishReason.STOP and out.token is None
        self.stuck += "stuck" in str(out.error)
        expected = expected_text(out.request.prompt_token_ids, out.request, out.choice, self.max_len)
        if out.finish_reason is FinishReason.ERROR:
            assert text == expected[: len(text)]
        else:
            assert text == expected
        if all(row.finish_reason for row in out.request.rows):
            self.requests.pop(out.request.id, None)

    def drain(self, limit: int = 10_000) -> None:
        steps = 0
        while self.engine.has_work:
            self.step()
            steps += 1
            assert steps < limit, "the engine stalls"
        pinned = self.engine.prefix.pinned
        assert self.engine.pool.held == pinned, "all rows are gone: only pins hold blocks"


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Prompts that share prefixes often: few families, then a random tail."""
    family = rng.randrange(4)
    shared = [(family * 11 + i * i) % VOCABULARY for i in range(rng.choice([0, 3, 8, 16, 20, 33]))]
    tail = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(0, 12))]
    return (shared + tail)[:longest] or [rng.randrange(VOCABULARY)]


def random_event(world: World, rng: random.Random) -> None:
    """One thing that could happen between two steps of a busy server."""
    engine = world.engine
    what = rng.random()
    if what < 0.30 and len(world.requests) < 12:
        n = rng.choice([1, 1, 1, 2, 3])
        repeats = [prompt for prompt in world.prompts[-20:] if rng.random() < 0.03]  # whole prompts come back too
        world.add(
            repeats[0] if repeats else random_prompt(rng, world.max_len - 1),
            n=n,
            max_tokens=rng.choice([1, 2, 5, 9, 30, None]),
            min_tokens=rng.choice([0, 0, 1]),
            ignore_eos=rng.random() < 0.3,
            seed=rng.choice([None, 1, 2]),
            prompt_logprobs=rng.choice([None, None, None, 0]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.5]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            structured_outputs=rng.choice([None, None, FORM, STRICT_FORM]),
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
    elif what < 0.49:
        with suppress(PinRefused):
            engine.pin(rng.choice("ab"), random_prompt(rng, world.max_len - 1))
    elif what < 0.52:
        engine.prefix.unpin(rng.choice("ab"))
    engine.check()

"""The engine: requests in, tokens out. It knows token ids only, and no clock, id or seed of its own making."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from kvikk.engine.config import EngineConfig
from kvikk.engine.request import FinishReason, Request, Row
from kvikk.engine.sampler import SampledToken
from kvikk.engine.sampling_params import SamplingParams, whole_number
from kvikk.engine.scheduler import ScheduledRow, Scheduler, StepPlan
from kvikk.errors import ConfigError, InvalidRequest, KvikkError, PromptTooLong, StepFailed
from kvikk.memory import BlockPool
from kvikk.prefix import LRU, KeySpace, PrefixCache, extend_keys

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes a step: the model and its memory, or a simulation of them."""

    def execute(self, plan: StepPlan) -> list[list[SampledToken]]:
        """Copy blocks, compute all runs, sample.

        Returns:
            For each row of the plan, in order, the `samples` tokens it asked for. A row whose logits were not finite
            gets an empty list although it asked for some.

        Raises:
            Exception: the step failed as a whole; nothing of it counts.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """What a model and a pool allow.

    Args:
        max_model_len: tokens of a sequence, prompt and generated.
        vocabulary: token ids are below it.
        eos_token_ids: end a text unless `ignore_eos`.
        length_reason: what sets `max_model_len`, for error messages, with the way out.
    """

    max_model_len: int
    vocabulary: int
    eos_token_ids: frozenset[int] = frozenset()
    length_reason: str = "the model's maximum"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOutput:
    """A token that a row gained in a step, its end, or both."""

    request: Request
    choice: int
    token: SampledToken | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: KvikkError | None = None


class Engine:
    """Continuous batching over a block pool and a prefix cache.

    `add` queues, `step` computes one batch and returns what is new, `abort` ends a request between two steps. A
    failing request never harms another; after any of these calls `check` holds.

    Args:
        config: limits and switches.
        limits: what the model and the pool allow.
        keyspace: of the prefix keys; its page size is the pool's.
        blocks: usable blocks of the pool.
        runner: computes steps.
        clock: seconds, monotonic.
        seeds: draws the seeds of requests that give none.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        keyspace: KeySpace,
        blocks: int,
        runner: Runner,
        *,
        clock: Callable[[], float] = time.monotonic,
        seeds: random.Random | None = None,
    ) -> None:
        self.limits = limits
        self.pool = BlockPool(blocks)
        longest = -(-limits.max_model_len // keyspace.page_size)
        if longest > blocks:
            raise ConfigError(f"a sequence of {limits.max_model_len} tokens takes {longest} blocks of {blocks}")
        self.prefix = PrefixCache(
            self.pool,
            LRU(),
            clock,
            pinnable_blocks=blocks - longest,
            enabled=config.enable_prefix_caching,
        )
        self.scheduler = Scheduler(config.scheduler, self.pool, self.prefix, keyspace.page_size)
        self.steps = 0
        self.computed_tokens = 0
        self._config = config
        self._keyspace = keyspace
        self._runner = runner
        self._clock = clock
        self._seeds = seeds or random.Random(config.seed)
        self._numbers = count()
        # A head can be smaller than the tokenizer thinks: an end token that cannot be sampled is none.
        self._eos = frozenset(token for token in limits.eos_token_ids if token < limits.vocabulary)
        self._requests: dict[str, Request] = {}
        self._idle_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        salt: str = "",
    ) -> Request:
        """Queue a request.

        Args:
            prompt_token_ids: at least one; with room for one more token within `max_model_len`.
            params: how to sample, and when to end.
            request_id: must not be in use; None makes one.
            salt: only requests with the same salt share cached blocks.

        Raises:
            InvalidRequest: the prompt or the parameters cannot be served; nothing was queued.
        """
        prompt = self._checked_prompt(prompt_token_ids)
        if params.n > self._config.scheduler.max_num_seqs:
            raise InvalidRequest(
                f"n is {params.n}, at most --max-num-seqs {self._config.scheduler.max_num_seqs} texts are written "
                "at once: ask for fewer, or raise it"
            )
        for token in params.stop_tokens:
            if token >= self.limits.vocabulary:
                raise InvalidRequest(
                    f"stop token id {token} is outside the model's vocabulary of {self.limits.vocabulary}: it can "
                    "never come"
                )
        number = next(self._numbers)
        if request_id is None:
            request_id = f"request-{number}"
        if request_id in self._requests:
            raise InvalidRequest(f"request id {request_id!r} is in use: choose another")
        eos = frozenset() if params.ignore_eos else self._eos
        request = Request(
            id=request_id,
            number=number,
            prompt_token_ids=prompt,
            params=params,
            seed=(self._seeds.getrandbits(64) if params.seed is None else params.seed) & (2**64 - 1),
            stop_ids=eos | frozenset(params.stop_tokens),
            arrival_s=self._clock(),
        )
        row = Row(request=request, choice=0, tokens=list(prompt), keys=[self._keyspace.root(salt)], unforked=params.n)
        request.rows.append(row)
        self._requests[request_id] = request
        self.scheduler.add(row)
        return request

    def abort(self, request_id: str, choice: int | None = None) -> bool:
        """End a request, or one of its texts, and give its blocks back. False when there was nothing to end.

        A text that is given up before its prompt has been computed ends when the others begin.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        first = request.rows[0]
        if choice is not None and first.unforked > 1 and first.finish_reason is None:
            if not 0 <= choice < first.unforked or choice in request.aborted_choices:
                return False
            request.aborted_choices.add(choice)
            if len(request.aborted_choices) == first.unforked:
                self._finish(first, FinishReason.ABORT)
            return True
        ended = [row for row in request.rows if row.finish_reason is None and choice in (None, row.choice)]
        for row in ended:
            self._finish(row, FinishReason.ABORT)
        return bool(ended)

    def is_active(self, request_id: str) -> bool:
        """Whether a request has texts that have not ended."""
        return request_id in self._requests

    def step(self) -> list[EngineOutput]:
        """Compute one batch. Returns the new tokens and ends, in the order of the batch."""
        plan = self.scheduler.schedule()
        if not plan.rows:
            return self._note_idle(plan)
        self._idle_steps = 0
        try:
            sampled = self._runner.execute(plan)
        except Exception as error:
            logger.exception("step %d failed with %d rows", self.steps, len(plan.rows))
            failure = StepFailed(f"the step failed: {error!r}")
            return [out for s in plan.rows for out in self._fail(s.row, failure)]
        except BaseException:  # interrupted: as if the step had not been planned
            self.scheduler.roll_back(plan)
            raise
        self.steps += 1
        self.computed_tokens += plan.tokens
        results = list(zip(plan.rows, sampled, strict=True))
        self.scheduler.commit(s.row for s, tokens in results if tokens or not s.samples)
        return [out for s, tokens in results for out in self._advance(s, tokens)]

    def check(self) -> None:
        """Recount all memory.

        Raises:
            PoolCorrupt: with the first disagreement found.
        """
        rows = [row.blocks for request in self._requests.values() for row in request.rows]
        self.pool.check([*rows, *self.prefix.holders()])
        self.prefix.check()

    def pin(self, name: str, token_ids: Sequence[int], *, salt: str = "") -> int:
        """Keep what is cached of a prefix until `prefix.unpin(name)`. Returns how many blocks are held.

        Raises:
            PinRefused: over the limit that leaves room for a request of the maximum length.
        """
        prompt = self._checked_prompt(token_ids)
        keys = [self._keyspace.root(salt)]
        extend_keys(keys, prompt, self._keyspace.page_size)
        return self.prefix.pin(name, keys[1:])

    def _checked_prompt(self, token_ids: Sequence[int]) -> list[int]:
        prompt = [whole_number("token id", token) for token in token_ids]
        if not prompt:
            raise InvalidRequest("the prompt is empty: give at least one token")
        for token in prompt:
            if not 0 <= token < self.limits.vocabulary:
                raise InvalidRequest(
                    f"token id {token} is outside the model's vocabulary: ids lie between 0 and "
                    f"{self.limits.vocabulary - 1}"
                )
        if len(prompt) >= self.limits.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(prompt):,} tokens, at most {self.limits.max_model_len - 1:,} leave room for an "
                f"answer ({self.limits.length_reason})"
            )
        return prompt

    def _advance(self, scheduled: ScheduledRow, tokens: list[SampledToken]) -> list[EngineOutput]:
        """Hand a row its sampled tokens: one, or `n` of them when it forks."""
        row = scheduled.row
        if not scheduled.samples:
            return []
        if not tokens:
            self.prefix.discard(row.blocks)  # whatever made the logits so may lie in them
            return self._fail(row, StepFailed("the model's logits are not finite: this request cannot go on"))
        request = row.request
        if len(tokens) > 1:
            row.unforked = 1
            choices = [
                Row(request=request, choice=i, tokens=list(row.tokens), keys=list(row.keys))
                for i in range(1, len(tokens))
            ]
            request.rows.extend(choices)
            self.scheduler.fork(row, choices)
            for given_up in request.aborted_choices:
                self._finish(request.rows[given_up], FinishReason.ABORT)
            both = zip(request.rows, tokens, strict=True)
            return [self._append(r, token) for r, token in both if r.finish_reason is None]
        return [self._append(row, tokens[0])]

    def _append(self, row: Row, token: SampledToken) -> EngineOutput:
        row.append(token.token_id)
        generated = len(row.tokens) - len(row.request.prompt_token_ids)
        reason, stop_id = None, None
        if token.token_id in row.request.stop_ids and generated >= row.request.params.min_tokens:
            reason = FinishReason.STOP
            stop_id = None if token.token_id in self._eos else token.token_id
        elif generated == row.request.params.max_tokens or len(row.tokens) >= self.limits.max_model_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(row, reason)
        return EngineOutput(
            request=row.request, choice=row.choice, token=token, finish_reason=reason, stop_token_id=stop_id
        )

    def _fail(self, row: Row, error: KvikkError) -> list[EngineOutput]:
        """End a row with an error: one output for each text that it stands for."""
        logger.error("request %s failed: %s", row.id, error)
        self._finish(row, FinishReason.ERROR)
        return [
            EngineOutput(request=row.request, choice=choice, finish_reason=FinishReason.ERROR, error=error)
            for choice in range(row.choice, row.choice + row.unforked)
            if choice not in row.request.aborted_choices
        ]

    def _finish(self, row: Row, reason: FinishReason) -> None:
        self.scheduler.remove(row, reason)
        if all(r.finish_reason for r in row.request.rows):
            del self._requests[row.request.id]

    def _note_idle(self, plan: StepPlan) -> list[EngineOutput]:
        """Nothing could be scheduled: harmless for a while, a stall when it lasts."""
        self._idle_steps = self._idle_steps + 1 if self.has_work and not plan.preempted else 0
        if self._idle_steps < self._config.scheduler.no_progress_steps:
            return []
        self._idle_steps = 0
        row = next(iter([*self.scheduler.waiting, *self.scheduler.running]))
        return self._fail(
            row,
            StepFailed(
                f"no progress in {self._config.scheduler.no_progress_steps} steps: {len(row.tokens)} tokens wait for "
                f"memory, {self.pool.free} blocks are free, {self.pool.cached} cached, {self.pool.held} held of "
                f"{self.pool.total}"
            ),
        )

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
from kvikk.engine.sampling_params import SamplingParams
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
        self._ids = count()
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
        if request_id is None:
            request_id = next(name for i in self._ids if (name := f"request-{i}") not in self._requests)
        elif request_id in self._requests:
            raise InvalidRequest(f"request id {request_id!r} is in use: choose another")
        eos = frozenset() if params.ignore_eos else self.limits.eos_token_ids
        request = Request(
            id=request_id,
            prompt_token_ids=prompt,
            params=params,
            seed=(self._seeds.getrandbits(64) if params.seed is None else params.seed) & (2**64 - 1),
            stop_ids=eos | frozenset(params.stop_token_ids),
            arrival_s=self._clock(),
        )
        row = Row(request=request, choice=0, tokens=list(prompt), keys=[self._keyspace.root(salt)], unforked=params.n)
        request.rows.append(row)
        self._requests[request_id] = request
        self.scheduler.add(row)
        return request

    def abort(self, request_id: str, choice: int | None = None) -> bool:
        """End a request, or one of its texts, and give its blocks back. False when it is not there any more."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        for row in request.rows:
            if row.finish_reason is None and choice in (None, row.choice):
                self._finish(row, FinishReason.ABORT)
        return True

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
            return [self._fail(s.row, StepFailed(f"the step failed: {error!r}")) for s in plan.rows]
        self.steps += 1
        self.computed_tokens += plan.tokens
        self.scheduler.commit(plan)
        return [out for s, tokens in zip(plan.rows, sampled, strict=True) for out in self._advance(s, tokens)]

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
        prompt = list(token_ids)
        if not prompt:
            raise InvalidRequest("the prompt is empty: give at least one token")
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidRequest(f"token id {token!r} is not a whole number")
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
            return [self._fail(row, StepFailed("the model's logits are not finite: this request cannot go on"))]
        request = row.request
        if len(tokens) > 1:
            row.unforked = 1
            choices = [
                Row(request=request, choice=i, tokens=list(row.tokens), keys=list(row.keys))
                for i in range(1, len(tokens))
            ]
            request.rows.extend(choices)
            self.scheduler.fork(row, choices)
            return [self._append(r, token) for r, token in zip([row, *choices], tokens, strict=True)]
        return [self._append(row, tokens[0])]

    def _append(self, row: Row, token: SampledToken) -> EngineOutput:
        row.append(token.token_id)
        generated = len(row.tokens) - len(row.request.prompt_token_ids)
        reason, stop_id = None, None
        if token.token_id in row.request.stop_ids and generated >= row.request.params.min_tokens:
            reason = FinishReason.STOP
            stop_id = None if token.token_id in self.limits.eos_token_ids else token.token_id
        elif generated == row.request.params.max_tokens or len(row.tokens) >= self.limits.max_model_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(row, reason)
        return EngineOutput(
            request=row.request, choice=row.choice, token=token, finish_reason=reason, stop_token_id=stop_id
        )

    def _fail(self, row: Row, error: KvikkError) -> EngineOutput:
        logger.error("request %s failed: %s", row.id, error)
        self._finish(row, FinishReason.ERROR)
        return EngineOutput(request=row.request, choice=row.choice, finish_reason=FinishReason.ERROR, error=error)

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
        row = self.scheduler.waiting[0]
        return [
            self._fail(
                row,
                StepFailed(
                    f"no progress in {self._config.scheduler.no_progress_steps} steps: {len(row.tokens)} tokens wait "
                    f"for memory, {self.pool.free} blocks are free, {self.pool.cached} cached, {self.pool.held} held "
                    f"of {self.pool.total}"
                ),
            )
        ]

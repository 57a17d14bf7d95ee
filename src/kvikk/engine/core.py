"""The engine: requests in, tokens out. It knows token ids only, and no clock, id or seed of its own making."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, NamedTuple

from kvikk.compress import KVCacheParams
from kvikk.engine.config import EngineConfig
from kvikk.engine.history import TokenHistory
from kvikk.engine.kv import Compressor, KVBytes, KVMemory
from kvikk.engine.limits import EngineLimits
from kvikk.engine.logprobs import Logprob
from kvikk.engine.request import Drafting, FinishReason, KVCacheUsage, Request, Row
from kvikk.engine.rest import RestBytes
from kvikk.engine.sampler import SampledToken
from kvikk.engine.sampling_params import SamplingParams
from kvikk.engine.scheduler import Scheduler
from kvikk.engine.step import AheadRunner, PendingStep, RowResult, Runner, ScheduledRow, StepPlan
from kvikk.engine.step_clock import StepClock
from kvikk.engine.tier import EngineTier
from kvikk.errors import ConfigError, InvalidRequest, KvikkError, StepFailed
from kvikk.grammar import Grammar, GrammarCompiler
from kvikk.prefix import LRU, KeySpace, PrefixCache, extend_keys

logger = logging.getLogger(__name__)

NEVER: Final = 2**31
"""No sequence has so many tokens."""


class EngineOutput(NamedTuple):
    """A token that a row gained in a step, its end, or both.

    A token that comes with STOP is an end token, and no text. `prompt_logprobs` comes once, with the request's first
    token: an entry for each token of the prompt, None for the first.
    """

    request: Request
    choice: int
    token: SampledToken | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: KvikkError | None = None
    prompt_logprobs: list[tuple[Logprob, ...] | None] | None = None


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was started and not read yet."""

    plan: StepPlan
    step: PendingStep


class _Verified(NamedTuple):
    """What a verification gave a row: written out and counted when it is handed out, behind the launch of a step.

    Args:
        scheduled: the row's part of the step.
        tokens: that it gained; none where that is written out already, as it may have ended with one of them.
        drafted: tokens that were verified.
        accepted: of these, the ones that are part of the row's text.
        leads: of the tokens that it gained, see `RowResult`.
    """

    scheduled: ScheduledRow
    tokens: Sequence[SampledToken]
    drafted: int
    accepted: int
    leads: Sequence[float]


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
        store: the bytes of the pool.
        compressor: chooses what compressed rows keep; without it requests for that are refused.
        grammars: makes the grammars of requests with structured outputs; without it these are refused.
        clock: seconds, monotonic.
        seeds: draws the seeds of requests that give none.
        tier: makes the prefix tier over a memory, with the clock; without it evicted blocks are lost.
        rest: the host's memory for the whole KV of lossless rows; without it the device has all of it.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: EngineLimits,
        keyspace: KeySpace,
        blocks: int,
        runner: Runner,
        store: KVBytes,
        *,
        compressor: Compressor | None = None,
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
        seeds: random.Random | None = None,
        tier: Callable[[KVMemory, Callable[[], float]], EngineTier] | None = None,
        rest: RestBytes | None = None,
    ) -> None:
        self.limits = limits
        longest = -(-limits.max_model_len // keyspace.page_size)
        if longest > blocks:
            raise ConfigError(f"a sequence of {limits.max_model_len} tokens takes {longest} blocks of {blocks}")
        self.kv = KVMemory(
            blocks,
            store,
            lambda pool: PrefixCache(
                pool, LRU(), clock, pinnable_blocks=blocks - longest, enabled=config.enable_prefix_caching
            ),
            keyspace.page_size,
            compressor,
            rest,
        )
        self.pool, self.prefix = self.kv.pool, self.kv.prefix
        self.tier = None if tier is None else tier(self.kv, clock)
        if self.kv.rests is not None:
            self.kv.rests.always = config.memory.kv_host_use == "always"
        self.scheduler = Scheduler(config.scheduler, self.kv, limits.max_model_len, self.tier)
        self.steps = 0
        self.computed_tokens = 0
        self._config = config
        self._keyspace = keyspace
        self._runner = runner
        self._grammars = grammars
        self._clock = clock
        self._seeds = seeds or random.Random(config.seed)
        self._numbers = count()
        # A head can be smaller than the tokenizer thinks: an end token that cannot be sampled is none.
        self._eos = frozenset(token for token in limits.eos_token_ids if token < limits.vocabulary)
        self._requests: dict[str, Request] = {}
        self._ahead = runner if isinstance(runner, AheadRunner) else None
        self.scheduler.rounds.runs_ahead = self._ahead is not None
        self._in_flight: deque[_InFlight] = deque()
        self._outputs: list[EngineOutput | _Verified] = []
        """Not handed out yet: kept here, so that an interrupt in the midst of a step loses none."""
        self._idle_steps = 0
        self._step_clock = StepClock(clock, self.scheduler.rounds.note_step)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or an output not handed out."""
        return bool(self._requests or self._outputs)

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
        prompt = self.limits.checked_prompt(prompt_token_ids)
        self.limits.check_params(params, self._config.scheduler.max_num_seqs)
        grammar = self._grammar(params)
        kv_cache = self._kv_cache(params)
        number = next(self._numbers)
        if request_id is None:
            request_id = f"request-{number}"
        if request_id in self._requests:
            raise InvalidRequest(f"request id {request_id!r} is in use: choose another")
        stop_ids = frozenset(params.stop_tokens) | (frozenset() if params.ignore_eos else self._eos)
        is_plain = grammar is None and not params.has_penalties and not params.logit_bias and params.logprobs is None
        plain_from = len(prompt) + params.min_tokens if params.min_tokens and stop_ids else 0
        longest = self.limits.max_model_len
        if params.max_tokens is not None:
            longest = min(longest, len(prompt) + params.max_tokens)
        request = Request(
            id=request_id,
            number=number,
            prompt_token_ids=prompt,
            params=params,
            seed=(self._seeds.getrandbits(64) if params.seed is None else params.seed) & (2**64 - 1),
            stop_ids=stop_ids,
            arrival_s=self._clock(),
            kv_cache=kv_cache,
            kv_usage=None if kv_cache is None else KVCacheUsage(kv_cache.policy, kv_cache.lossless),
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            is_plain=is_plain,
            plain_from=plain_from if is_plain else NEVER,
            max_length=longest,
        )
        row = Row(
            request=request,
            choice=0,
            tokens=prompt[:],
            keys=[self._keyspace.root(salt)],
            unforked=params.n,
            history=TokenHistory(prompt if params.repetition_penalty != 1 else ()) if params.has_penalties else None,
            grammar=grammar,
            drafting=Drafting.of(kv_cache, prompt),
        )
        self.kv.plan_trigger(row)
        request.rows.append(row)
        if not self._requests:  # no step was asked for since the last one ended
            self._step_clock.interrupt()
        self._requests[request_id] = request
        self.scheduler.add(row)
        return request

    def abort(self, request_id: str, choice: int | None = None) -> bool:
        """End a request, or one of its texts, and give its blocks back. False when there was nothing to end.

        A text that is given up before its prompt has been computed ends when the others begin.
        """
        self._outputs = [o for o in self._written() if o.request.id != request_id or choice not in (None, o.choice)]
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

    @property
    def requests(self) -> Collection[Request]:
        """All unfinished requests, in the order of their arrival."""
        return self._requests.values()

    def is_active(self, request_id: str) -> bool:
        """Whether a request has texts that have not ended."""
        return request_id in self._requests

    def step(self) -> list[EngineOutput]:
        """Compute one batch. Returns the new tokens and ends, in the order of the batch.

        Where the runner can, a step is started before the one before it has been read: what is returned is then that
        one's, and the host works while the device does. What a step gives that tried drafts is returned by the next
        call, after that has started another one.
        """
        self._collect_before_planning()
        if self.scheduler.due:
            self._step_clock.interrupt()
            self._compact()
        plan = self.scheduler.schedule()
        if plan.rows:
            self._idle_steps = 0
            self._note_start(plan)
            if self.tier is not None:
                self.tier.speed.note_planned(plan)
            try:
                self._compute(plan)
            except BaseException:  # interrupted: as if the step had not been planned
                self.scheduler.roll_back(plan)
                raise
            self._collect(down_to=1)
        elif self._in_flight:
            self._collect()
        else:
            self._step_clock.interrupt()
            self._outputs += self._note_idle(plan)
        outputs = self._written()
        self._outputs = []
        return outputs

    def _written(self) -> list[EngineOutput]:
        """The outputs that are not handed out yet, in their order: after an interrupt none is counted again."""
        at = 0
        while at < len(self._outputs):
            output = self._outputs[at]
            written = [output] if isinstance(output, EngineOutput) else self._write(output)
            self._outputs[at : at + 1] = written
            at += len(written)
        return [output for output in self._outputs if isinstance(output, EngineOutput)]

    def _compute(self, plan: StepPlan) -> None:
        """Start a step where the runner can; else read all that is in flight, compute the step and read it."""
        try:
            started = None if self._ahead is None else self._ahead.launch(plan)
        except Exception as error:
            self._collect()
            self._fail_step(plan, error)
            return
        if started is None:
            self._collect()
            self._execute(plan)
            return
        self._in_flight.append(_InFlight(plan, started))
        self._step_clock.start(started)
        for scheduled in plan.rows:
            if scheduled.samples and not scheduled.drafts:
                scheduled.row.expect(plan.repeats)

    def _execute(self, plan: StepPlan) -> None:
        """Compute a step and read it."""
        rows = [scheduled.known() for scheduled in plan.rows if _goes_on(scheduled.row)]
        if rows != plan.rows:  # some ended when the step before was read, or drafted less than they were to
            plan = replace(plan, rows=rows, tokens=sum(run.length for scheduled in rows for run in scheduled.runs))
        if not rows:
            return
        plan.repeats = 1  # what is left is planned anew
        try:
            computed = self._runner.execute(plan)
        except Exception as error:
            self._fail_step(plan, error)
        else:
            self._take(plan, computed, None)

    def _collect_before_planning(self) -> None:
        """Leave one step in flight, if its rows can go on without its results."""
        self._collect(down_to=0 if self._in_flight and self._in_flight[-1].plan.tries_drafts else 1)

    def _collect(self, *, down_to: int = 0) -> None:
        """Read the steps in flight, the oldest first, until so many are left."""
        while len(self._in_flight) > down_to:
            plan, step = self._in_flight[0].plan, self._in_flight[0].step
            try:
                computed = step.results()
            except Exception as error:
                self._in_flight.popleft()
                self._fail_step(plan, error)
            else:
                self._in_flight.popleft()
                self._take(plan, computed, step)

    def _take(self, plan: StepPlan, computed: list[RowResult], step: PendingStep | None) -> None:
        """Hand a step's results to its rows; some may have ended since it was started."""
        self.steps += plan.repeats
        self.computed_tokens += plan.tokens * plan.repeats
        self._step_clock.note(plan, step)
        if self.tier is not None:
            self.tier.speed.note_computed(plan)
        for scheduled, result in zip(plan.rows, computed, strict=True):
            row = scheduled.row
            if row.check_choice is not None:
                self._check_choice(row)
            if row.finish_reason is not None:
                continue
            if row.draft_of is not None:
                self._draft(scheduled, result, plan.repeats)
            elif scheduled.drafts:
                self._verify(scheduled, result)
            else:
                self._outputs += self._advance(scheduled, result)
            if row.compress_at is not None and (row.is_due or len(row.request.rows) > 1):
                self.scheduler.note_due(row.request.rows)

    def _compact(self) -> None:
        """Compact the rows that are at their triggers, but for those that a step in flight still computes.

        Between two plans: making room for one row can take the memory of another.
        """
        flying = {scheduled.row for step in self._in_flight for scheduled in step.plan.rows}
        for row in [row for row in self.scheduler.due if row not in flying]:
            if not row.is_due:  # the row before it has taken its memory
                continue
            is_done = has_room = True
            try:
                if row.drafting is None:
                    is_done = self.kv.compact(row, self.scheduler.find_room)
                elif self.scheduler.rounds.wants_cache(row):
                    began_s = self._clock()
                    has_room = self.kv.copy_kept(row)
                    self.scheduler.rounds.outlook.note_copy(row, self._clock() - began_s)
                else:
                    self.kv.give_up_drafts(row)
            except Exception as error:
                if row.drafting is None:
                    failure = error if isinstance(error, KvikkError) else StepFailed(f"compressing failed: {error!r}")
                    self._outputs += self._fail(row, failure)
                    continue
                logger.error("%s has no small cache from here on, and decodes plainly: %s", row.id, error)
                self.scheduler.due.remove(row)
                row.set_trigger(None, range(0))
                continue
            if is_done:
                self.scheduler.due.remove(row)
                self.kv.plan_trigger(row)
            if not has_room:
                self.kv.want_cache_later(row)

    def _check_choice(self, row: Row) -> None:
        """A step has been read that came after a row was compacted: what its policy said is known by now."""
        check, row.check_choice = row.check_choice, None
        assert check is not None
        try:
            check()
        except KvikkError as error:
            if row.finish_reason is not None:
                return
            if row.draft_of is None:
                self._outputs += self._fail(row, error)
                return
            logger.error("%s keeps the small cache that it has: %s", row.draft_of.id, error)
            if row.draft_of in self.scheduler.due:
                self.scheduler.due.remove(row.draft_of)
            row.draft_of.set_trigger(None, range(0))

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        """A step is lost: its rows end, with what was in flight before it."""
        self._step_clock.interrupt()
        logger.error("step %d failed with %d rows", self.steps, len(plan.rows), exc_info=error)
        failure = StepFailed(f"the step failed: {error!r}")
        for scheduled in plan.rows:
            row = scheduled.row.draft_of or scheduled.row
            if row.finish_reason is None:
                self._outputs += self._fail(row, failure)

    def close(self) -> None:
        """End the prefix tier, after what is cached has been written to its outer store. No step is made afterwards."""
        if self.tier is not None:
            self.tier.close()

    def check(self) -> None:
        """Recount all memory.

        Raises:
            PoolCorrupt: with the first disagreement found.
        """
        self.kv.check(row for request in self._requests.values() for row in request.rows)

    def pin(self, name: str, token_ids: Sequence[int], *, salt: str = "") -> int:
        """Keep what is cached of a prefix until `prefix.unpin(name)`. Returns how many blocks are held.

        Raises:
            PinRefused: over the limit that leaves room for a request of the maximum length.
        """
        prompt = self.limits.checked_prompt(token_ids)
        keys = [self._keyspace.root(salt)]
        extend_keys(keys, prompt, self._keyspace.page_size)
        return self.prefix.pin(name, keys[1:])

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """The grammar that a request asks for, at its start. Under `ignore_eos` it ends where no text can follow."""
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise InvalidRequest(
                "structured_outputs are not available: this engine was built without a tokenizer",
                param="structured_outputs",
            )
        return self._grammars.compile(params.structured_outputs, may_end_early=not params.ignore_eos)

    def _kv_cache(self, params: SamplingParams) -> KVCacheParams | None:
        """How a request's rows are to be compressed; None: not at all.

        Raises:
            InvalidRequest: it cannot be done, or cannot be understood.
        """
        asked = self._config.kv_cache.asked(params.kv_cache)
        if asked.is_full and not asked.lossless:
            return None
        if self.kv.compressor is None:
            raise InvalidRequest("kv_cache is not available: this engine was built without policies", param="kv_cache")
        self.kv.compressor.check(asked)
        return asked

    def _advance(self, scheduled: ScheduledRow, result: RowResult) -> list[EngineOutput]:
        """Hand a row what the step gave it: no token, one, or `n` of them when it forks."""
        row, request = scheduled.row, scheduled.row.request
        if request.prompt_logprobs is not None:
            request.prompt_logprobs.extend(result.prompt_logprobs)
        if scheduled.samples and not result.tokens:
            return self._fail(row, self._why_no_token(row))
        self.scheduler.commit(scheduled)
        if not scheduled.samples:
            return []
        if len(result.tokens) == 1 and request.prompt_logprobs is None:
            return self._append(row, result.tokens[0])
        is_first = row.known == len(request.prompt_token_ids)
        rows = [row]
        if len(result.tokens) > 1:
            row.unforked = 1
            choices = [row.fork(choice) for choice in range(1, len(result.tokens))]
            request.rows.extend(choices)
            self.scheduler.fork(row, choices)
            for given_up in request.aborted_choices:
                self._finish(request.rows[given_up], FinishReason.ABORT)
            rows = request.rows
        both = zip(rows, result.tokens, strict=True)
        outputs = [out for r, token in both if r.finish_reason is None for out in self._append(r, token)]
        if is_first and request.prompt_logprobs is not None:
            outputs[0] = outputs[0]._replace(prompt_logprobs=request.prompt_logprobs)
        return outputs

    def _draft(self, scheduled: ScheduledRow, result: RowResult, repeats: int) -> None:
        """A small cache has said some tokens, or can say none. After an end token there is nothing to draft.

        These are the next one of each repeat, or those that were proposed to it as far as they agree, and the one after
        them.
        """
        cache = scheduled.row
        row = cache.draft_of
        assert row is not None
        drafting = row.drafting
        assert drafting is not None
        if not drafting.length:  # none of its drafts could be verified, and the round has ended
            cache.settle()
            return
        if not cache.pending and not drafting.missing:  # the round ended with a token that the step was ahead of
            return
        most = repeats
        if scheduled.drafts:
            most = 1 + len(agreeing(scheduled.drafts, result.tokens))
        if drafting.below is not None:
            drafting.below.note_step(len(scheduled.drafts), most - 1)
        said = [token.token_id for token in result.tokens[:most]]
        drafting.is_over = len(said) < most
        for token in said:
            cache.append(token)
            if cache.grammar is not None:
                cache.grammar.advance(token)
            if token in cache.request.stop_ids:
                drafting.is_over = True
                break
        if drafting.is_over:
            cache.settle()
            drafting.length = drafting.drafted
            if not drafting.length:  # it would go on to say none
                self.kv.give_up_drafts(row)

    def _verify(self, scheduled: ScheduledRow, result: RowResult) -> None:
        """Tell a row what the whole cache says: the drafts that agree with it, and the token after these."""
        row, drafts = scheduled.row, scheduled.known_drafts
        assert row.drafting is not None
        row.drafting.length = 0
        if not result.tokens:
            self._outputs += self._fail(row, self._why_no_token(row))
            return
        agreed = agreeing(drafts, result.tokens)
        accepted = len(agreed)
        self.scheduler.rounds.note_verified(row, len(drafts), accepted)
        tokens, leads = result.tokens[: accepted + 1], result.leads[: accepted + 1]
        ids = [*agreed, tokens[-1].token_id]
        if not self._may_end(row, ids):
            row.extend(ids)
            self._outputs.append(_Verified(scheduled, tokens, len(drafts), accepted, leads))
            return
        self.scheduler.commit(scheduled, accepted, then=agreed)
        known = row.known
        for token in tokens:
            self._outputs += self._append(row, token)
            if row.finish_reason is not None:
                break
        gained = row.known - known  # what was drafted beyond the end is no part of the text
        self._outputs.append(_Verified(scheduled, (), len(drafts), min(accepted, gained), leads[:gained]))

    def _may_end(self, row: Row, token_ids: Sequence[int]) -> bool:
        """Whether the row must look at each of these tokens before it gains the next."""
        request = row.request
        if row.known + len(token_ids) >= request.max_length or row.history is not None or row.grammar is not None:
            return True
        return not request.stop_ids.isdisjoint(token_ids)

    def _write(self, verified: _Verified) -> list[EngineOutput]:
        """Write out and count what a verification gave a row."""
        scheduled, tokens, drafted, accepted, leads = verified
        request, choice, usage = scheduled.row.request, scheduled.row.choice, scheduled.row.request.kv_usage
        assert usage is not None
        if tokens:
            self.scheduler.commit(scheduled, accepted)
        usage.rounds += 1
        usage.drafted += drafted
        usage.accepted += accepted
        counters = self.scheduler.rounds.counters
        counters.note(drafted, accepted)
        if self._config.numerics == "fast":
            counters.note_leads(leads)
        return [EngineOutput(request, choice, token) for token in tokens]

    def _append(self, row: Row, token: SampledToken) -> list[EngineOutput]:
        """A row gains a token, and ends when that was its last."""
        request, token_id = row.request, token.token_id
        row.append(token_id)
        known, is_end_token, is_complete = row.known, False, False
        if token_id in request.stop_ids:
            is_end_token = known - len(request.prompt_token_ids) >= request.params.min_tokens
        if row.grammar is not None:
            row.grammar.advance(token_id)
            is_complete = row.grammar.is_complete
        reason = None
        if is_end_token or is_complete:
            reason = FinishReason.STOP
        elif known >= request.max_length:
            reason = FinishReason.LENGTH
        if reason is None:
            return [EngineOutput(request, row.choice, token)]
        self._finish(row, reason)
        if reason is FinishReason.STOP and not is_end_token:  # the token is text, as one that comes with STOP is not
            return [
                EngineOutput(request=request, choice=row.choice, token=token),
                EngineOutput(request=request, choice=row.choice, finish_reason=reason),
            ]
        stop_id = token_id if is_end_token and token_id not in self._eos else None
        return [EngineOutput(request, row.choice, token, reason, stop_id)]

    def _why_no_token(self, row: Row) -> StepFailed:
        if row.grammar is not None and row.grammar.failure is not None:
            return StepFailed(f"the text cannot go on as its structured_outputs demand: {row.grammar.failure}")
        self.prefix.discard(row.blocks)  # whatever made the logits so may lie in them
        return StepFailed("the model's logits are not finite: this request cannot go on")

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

    def _note_start(self, plan: StepPlan) -> None:
        """Requests that are scheduled for the first time have waited until now."""
        for scheduled in plan.rows:
            if scheduled.row.request.queued_s is None:
                scheduled.row.request.queued_s = self._clock() - scheduled.row.request.arrival_s

    def _note_idle(self, plan: StepPlan) -> list[EngineOutput]:
        """Nothing could be scheduled: harmless for a while, a stall when it lasts."""
        if (self.tier is not None and self.tier.wait()) or (self.kv.rests is not None and self.kv.rests.wait()):
            return []
        self._idle_steps = self._idle_steps + 1 if self._requests and not plan.preempted else 0
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


def _goes_on(row: Row) -> bool:
    """Whether a row that was planned still wants to be computed, now that all steps before have been read."""
    if row.finish_reason is not None:
        return False
    return row.draft_of is None or row.draft_of.drafting is None or row.draft_of.drafting.missing > 0


def agreeing(drafts: Sequence[int], tokens: Sequence[SampledToken]) -> Sequence[int]:
    """The drafts before the first that is not the token that was sampled in its place.

    Where a draft was computed and no token could be sampled after it, what was computed is not relied on either.
    """
    count = 0
    for draft, token in zip(drafts, tokens[:-1], strict=False):
        if draft != token.token_id:
            break
        count += 1
    return drafts[:count]

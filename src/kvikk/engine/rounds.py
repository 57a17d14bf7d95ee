"""What lossless rows do in a step: draft, verify, or decode plainly.

Rows with small caches draft together, and are then verified together: in the steps of a round each row that takes
part drafts a token, and the step after them computes all drafts over the whole caches. Rows that have drafted what they
are to wait for the others, so that the whole KV is read once a round, in one step, and the small caches alone in the
others. Rows that look their drafts up have them at once, and are verified in every step, as plain rows are computed in
each. Rows whose whole KV is on the host draft until it has come back, and are verified then, whatever others do.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvikk.compress.config import MAX_DRAFT_TOKENS
from kvikk.engine.drafting import (
    Acceptance,
    Fallback,
    RoundPlan,
    StepKind,
    StepTimes,
    fitting,
    plan_round,
    tokens_until,
)
from kvikk.engine.kv import KVMemory
from kvikk.engine.outlook import MOST_PARTED, PILOT_LENGTH, Outlook
from kvikk.engine.request import UNKNOWN, Row, drafting_of, kv_cache_of
from kvikk.engine.step import StepPlan

logger = logging.getLogger(__name__)

NEAR_TIES: Final = (0.0, 0.125, 0.25)
"""In nats: where the two likeliest tokens are no further apart than this, rounding alone can decide between them."""

EVEN, HOPELESS = 0.5, 0.1
"""Chances that all tokens of a draft are right, at which a row on the host queues for the link, and drafts no more,
while the model does not say how many it should draft."""

RIPE: Final = 0.5
"""Of what a row on the host wants to draft, what it must have drafted to queue for a link that has nothing to do."""

MOST_REPEATS: Final = 8
"""Draft steps that are started as one: what a request that comes meanwhile waits for."""


@dataclass(slots=True)
class DraftCounters:
    """Of all verifications since the start; only ever grow."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    """By the place in the draft, as far as any was accepted."""
    near_ties: dict[str, int] = field(default_factory=dict)
    """Verified tokens of greedy texts in fast numerics that lead the next one by at most so much, in nats."""

    def note(self, drafted: int, accepted: int) -> None:
        """Drafts of a row were verified, and the first `accepted` of them are part of its text."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for place in range(accepted):
            self.accepted_at[place] += 1

    def note_leads(self, leads: Iterable[float]) -> None:
        """Verified tokens lead the next ones by so much."""
        for lead in leads:
            if lead <= NEAR_TIES[-1]:
                border = str(next(border for border in NEAR_TIES if lead <= border))
                self.near_ties[border] = self.near_ties.get(border, 0) + 1

    def copy(self) -> DraftCounters:
        """As they stand."""
        return DraftCounters(self.rounds, self.drafted, self.accepted, [*self.accepted_at], dict(self.near_ties))


class DraftRounds:
    """Plans the steps of lossless rows.

    Args:
        kv: their memory.
        max_model_len: tokens of the longest sequence.
    """

    def __init__(self, kv: KVMemory, max_model_len: int) -> None:
        self.times = StepTimes()
        self.outlook = Outlook(kv, max_model_len)
        """Which rows get small caches, and how many part."""
        self.runs_ahead = False
        """Whether a step can be started on tokens that are still being computed: from the last one, or to verify."""
        self.counters = DraftCounters()
        self.fallbacks: Counter[Fallback] = Counter()
        """How often a row began to decode plainly, and why."""
        self.promised_gain: float | None = None
        """How much faster than plainly the rows that last began a round with small caches would be, at best; None: not
        known yet."""
        self._kv = kv
        self._page_size = kv.page_size
        self._max_model_len = max_model_len

    def schedule(self, rows: Sequence[Row], plan: StepPlan, step_tokens: int) -> None:
        """Add what decoding lossless rows do next to a step.

        Args:
            rows: running ones, whose last token is all that they have to compute, each with a block of its own for
                it; of small caches none.
            plan: has the other decoding rows.
            step_tokens: of the step, at the most; but each row's own token is computed in any case.
        """
        looking, drafting, hosted = [], [], []
        for row in rows:
            state, rest = drafting_of(row), row.rest
            if rest is not None and rest.is_leaving:
                continue
            if state.lookup is not None:
                looking.append(row)
            elif rest is not None and (rest.is_parted or rest.is_leased):
                hosted.append(row)
            else:
                drafting.append(row)
        self._look_up(looking, plan, step_tokens - len(drafting) - len(hosted))
        for left, row in zip(range(len(hosted) - 1, -1, -1), hosted, strict=True):
            self._draft_hosted(row, plan, step_tokens - plan.tokens - len(drafting) - left)
        if hosted:
            self._use_link(hosted)
        self._draft(drafting, plan, step_tokens)

    def forget(self) -> None:
        """What steps take and what was accepted: others will follow."""
        self.times, self.outlook = StepTimes(), Outlook(self._kv, self._max_model_len)

    def wants_cache(self, row: Row) -> bool:
        """Whether a row that is at its trigger should get a small cache: its copy takes time and memory."""
        record = drafting_of(row).record
        if not self.outlook.wants_cache(row):
            return False
        if record.is_untried:
            record.acceptance = Acceptance(self.outlook.prior(row))
        return True

    def note_verified(self, row: Row, drafted: int, accepted: int) -> None:
        """Drafts of a row were verified, or it has decoded plainly; the first `accepted` are right."""
        state = drafting_of(row)
        state.record.note_round(drafted, accepted)
        if state.lookup is None:
            self.outlook.note_verified(row, drafted, accepted)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long; those that tell something of lossless rows are remembered.

        What was compiled or captured in a step tells nothing of later ones.
        """
        if not plan.has_lossless or plan.is_cold:
            return
        drafting = verified = plain = 0
        for each in plan.rows:
            if each.row.draft_of is not None:
                drafting += 1
            elif each.drafts:
                verified += 1
            elif each.samples == 1 and each.runs[0].length == 1:
                plain += 1
            else:  # a prompt
                return
        rows = drafting + verified + plain
        kind = StepKind.VERIFY if verified else StepKind.PLAIN if plain else StepKind.DRAFT
        if kind is StepKind.DRAFT:
            drafting = 0  # beside no others
        self.times.record(
            kind, rows=rows, tokens=plan.tokens, seconds=seconds / plan.repeats, drafting=drafting,
            plain=plain if verified else 0,
        )  # fmt: skip

    def repeats(self, plan: StepPlan) -> int:
        """How often a step can be computed without the host: where nothing but drafting is done in it, until the first
        of its rows has drafted what it is to, or until it is time to look who came meanwhile."""
        if not (self.runs_ahead and plan.rows):
            return 1
        missing = MOST_REPEATS
        for scheduled in plan.rows:
            row = scheduled.row.draft_of
            if row is None or scheduled.drafts or row.rest is not None or not row.request.is_plain:
                return 1
            state = drafting_of(row)
            if state.below is not None and state.below.is_hopeful:
                return 1
            missing = min(missing, state.missing)
        return max(1, missing)  # a small cache that was given up since it was planned has nothing to draft

    # Rows that look up

    def _look_up(self, rows: Sequence[Row], plan: StepPlan, step_tokens: int) -> None:
        known = self._ready(rows, plan)
        drafts = []
        for row in known:
            lookup = drafting_of(row).lookup
            assert lookup is not None
            lookup.extend(row.tokens[len(lookup) :])
            most = self._most(row)
            drafts.append(lookup.propose(most) if most else [])
        spare = step_tokens - plan.tokens - len(known)  # each computes its last token in any case
        lengths = self._plan(known, [len(found) for found in drafts], drafts_are_free=True).lengths if known else []
        for row, found, length in zip(known, drafts, lengths, strict=True):
            length = self._with_room(row, min(length, max(0, spare)))
            spare -= length
            self._add(row, found[:length], plan)

    # Rows with small caches

    def _draft(self, rows: Sequence[Row], plan: StepPlan, step_tokens: int) -> None:
        """Begin rounds, go on with them, or verify what has been drafted in them."""
        begun: list[Row] = []
        fresh: list[Row] = []
        longest = 0
        for row in rows:
            state = drafting_of(row)
            if state.length:
                begun.append(row)
                longest = max(longest, state.missing)
            else:
                fresh.append(row)
        if begun and not longest:
            self._verify(begun, fresh, plan, step_tokens)
            return
        ready = self._ready(fresh, plan) if fresh else []
        if ready:
            most = [self._most(row) for row in ready]
            if longest:  # others are in the midst of a round
                most = [min(each, longest) for each in most]
            planned = self._plan(ready, most).lengths
            room = step_tokens - plan.tokens - len(rows) - sum(drafting_of(row).length for row in begun)
            for row, length in zip(ready, fitting(planned, room), strict=True):
                length = self._with_room(row, length)
                if length:
                    drafting_of(row).begin(row, length, self._page_size)
                    begun.append(row)
                else:
                    self._add(row, [], plan)
        for row in begun:
            if drafting_of(row).missing:
                self._draft_on(row, plan, step_tokens)

    def _draft_on(self, row: Row, plan: StepPlan, step_tokens: int) -> None:
        """Have a row in a round draft its next token, or verify some that are proposed to its small cache.

        Nothing is proposed behind a token that is not known yet: a row that may have a proposal waits for it.
        """
        state = drafting_of(row)
        cache, below = state.cache, state.below
        assert cache is not None
        if below is None or not below.is_hopeful:
            plan.add(cache, 1)
        elif not cache.pending:
            most = min(state.missing, step_tokens - plan.tokens) - 1
            proposed = below.propose(row.tokens, state.tokens, most)
            if proposed:
                plan.add_verification(cache, proposed)
            else:
                plan.add(cache, 1)

    def _verify(self, begun: Sequence[Row], fresh: Sequence[Row], plan: StepPlan, step_tokens: int) -> None:
        """End a round: verify as many drafts of each row as the step has room for; other rows decode plainly in it.

        Where the host has a say in a row's tokens it must know all drafts before.
        """
        drafts = [drafting_of(row).tokens for row in begun]
        for row, drafted in zip(begun, drafts, strict=True):
            if UNKNOWN in drafted and not (self.runs_ahead and row.request.is_plain):
                return
        for row in self._ready(fresh, plan):
            self._add(row, [], plan)
        spare = step_tokens - plan.tokens - len(begun)  # each computes its last token in any case
        for row, drafted, length in zip(begun, drafts, fitting(list(map(len, drafts)), spare), strict=True):
            self._add(row, drafted[:length], plan)

    # Rows whose whole KV is on the host

    def _draft_hosted(self, row: Row, plan: StepPlan, step_tokens: int) -> None:
        """Draft a token more until the row is whole, and verify all of them as soon as it is.

        It waits for no other row: what it waits for is the link.
        """
        state, rest = drafting_of(row), row.rest
        assert rest is not None
        assert self._kv.rests is not None
        if rest.is_leased:
            if UNKNOWN not in state.tokens and not row.pending and not rest.is_verified:
                self._add(row, state.tokens[: max(0, step_tokens - 1)], plan)
                rest.is_verified = True
            return
        wanted, most = self._wanted(row), self._most(row, MOST_PARTED)
        if state.cache is not None and not state.length and (length := self._with_room(row, min(wanted, most))):
            state.begin(row, length, self._page_size)
        elif state.length and not state.missing and self._goes_on(row, most):
            length = self._with_room(row, state.drafted + 1)
            state.go_on(row, max(length, state.drafted), self._page_size)
        if state.missing:
            self._draft_on(row, plan, plan.tokens + step_tokens)
        if not state.missing or state.drafted + 1 + self._drafts_until_whole() >= wanted:
            self._kv.rests.want(row)

    def _use_link(self, rows: Sequence[Row]) -> None:
        """Have the row that has drafted most queue for a link that has nothing to do, if it has drafted long enough.

        So rows that have begun together are not all done together, with nothing to bring before.
        """
        assert self._kv.rests is not None
        if not self._kv.rests.is_idle:
            return
        row = max(rows, key=lambda row: drafting_of(row).drafted)
        if row.rest is not None and row.rest.is_parted and drafting_of(row).drafted >= RIPE * self._wanted(row):
            self._kv.rests.want(row)

    def _drafts_until_whole(self) -> float:
        """Tokens that a row would draft until it had got its blocks back, if it queued for the link now."""
        rests, mix = self._kv.rests, self.outlook.mix
        assert rests is not None
        return 0.0 if mix is None or not mix.step_s else rests.wait_s / mix.step_s

    def _wanted(self, row: Row) -> int:
        """How many tokens a row drafts before it is whole, at best; or until a miss among them is as likely as not."""
        asked, mix = kv_cache_of(row).draft_tokens, self.outlook.mix
        if asked is not None:
            return asked
        if mix is not None and mix.length:
            return mix.length
        return tokens_until(EVEN, drafting_of(row).record.acceptance.probability, MOST_PARTED)

    def _goes_on(self, row: Row, most: int) -> bool:
        """Whether a row that has drafted all that it wanted drafts another token while it waits."""
        state = drafting_of(row)
        if state.is_over or kv_cache_of(row).draft_tokens is not None or state.drafted >= most:
            return False
        return state.drafted < tokens_until(HOPELESS, state.record.acceptance.probability, MOST_PARTED)

    # All

    def _ready(self, rows: Sequence[Row], plan: StepPlan) -> list[Row]:
        """The rows that can begin something; those whose last token is not known yet go on plainly, or wait for it."""
        ready = []
        for row in rows:
            if not row.pending:
                ready.append(row)
                continue
            state = drafting_of(row)
            has_drafter = state.cache is not None or state.lookup is not None
            if not has_drafter or (state.record.fallback is not None and not state.record.is_due):
                self._add(row, [], plan)
        return ready

    def _add(self, row: Row, drafts: Sequence[int], plan: StepPlan) -> None:
        """Verify drafts in this step; without any, decode plainly."""
        state = drafting_of(row)
        if drafts:
            plan.add_verification(row, drafts)
        else:
            state.length = 0
            self.note_verified(row, 0, 0)
            plan.add(row, 1)

    def _plan(self, rows: Sequence[Row], most: list[int], *, drafts_are_free: bool = False) -> RoundPlan:
        """How many tokens rows draft now: as many as pay, or as their requests say."""
        costs = self.times.costs(len(rows), drafts_are_free=drafts_are_free)
        planned = plan_round([drafting_of(row).record for row in rows], most, costs)
        if planned.best is not None and not drafts_are_free:
            self.promised_gain = planned.best.tokens_per_s / planned.best.plain_tokens_per_s
        for index, row in enumerate(rows):
            asked = kv_cache_of(row).draft_tokens
            if asked is None and not drafts_are_free and self.outlook.is_pilot(row):
                asked = PILOT_LENGTH
            if asked is not None:
                planned.lengths[index] = min(asked, most[index])
                drafting_of(row).record.fallback = None
        for index, reason in planned.fell_back:
            if drafting_of(rows[index]).record.fallback is not None:
                self.fallbacks[reason] += 1
                logger.info("%s decodes plainly for now, as drafting does not pay: %s", rows[index].id, reason)
        return planned

    def _most(self, row: Row, limit: int = MAX_DRAFT_TOKENS) -> int:
        """How many tokens a row may draft now, `limit` at the most."""
        request, state = row.request, drafting_of(row)
        if state.cache is None and state.lookup is None:
            return 0
        end = self._max_model_len - 1
        if request.params.max_tokens is not None:  # a text's last token need not be drafted
            end = min(end, request.params.max_tokens + len(request.prompt_token_ids) - 1)
        if row.compress_at is not None:
            end = min(end, row.compress_at)
        return max(0, min(limit, end - len(row.tokens)))

    def _with_room(self, row: Row, length: int) -> int:
        """Give a row blocks for the tokens that it drafts, as far as that takes nothing from other rows."""
        behind = len(row.tokens) - row.tail_start
        room = len(row.blocks) * self._page_size - behind
        if room >= length:
            return length
        blocks = -(-(length - room) // self._page_size)
        if not self._kv.make_room(blocks):
            return room
        row.blocks += self._kv.pool.take(blocks)
        row.request.note_blocks(blocks)
        return length

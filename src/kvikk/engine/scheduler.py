"""Who computes what in the next step, and whose memory pays for it."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Iterable, Sequence
from math import ceil, inf

from kvikk.engine.config import SchedulerConfig
from kvikk.engine.kv import KVMemory
from kvikk.engine.request import FinishReason, Row, Segment
from kvikk.engine.rest import Rests, is_between_steps
from kvikk.engine.rounds import DraftRounds
from kvikk.engine.step import ScheduledRow, StepPlan
from kvikk.engine.tier import EngineTier
from kvikk.types import BlockId

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching with chunked prefill: first come, first served, over blocks that may run out.

    Running rows with one token to go are served first in each step, then prompts in the order of their arrival with
    what the token budget leaves, then new rows. As a row keeps its seat while its prompt is computed, fewer rows than
    the budget has tokens can be decoding then: neither side starves.

    Both queues are in the order of arrival, also after preemption. When memory runs out, the running row that arrived
    last loses its blocks and waits again; full blocks stay in the prefix cache until others need the room. A compressed
    row cannot be computed again, so what it holds is saved. The first row always gets on.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVMemory, max_model_len: int, tier: EngineTier | None = None
    ) -> None:
        self.config = config
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.due: list[Row] = []
        """Running rows at their triggers: they must be compacted before they can be planned again."""
        self.preemptions = 0
        self._kv = kv
        self._pool = kv.pool
        self._prefix = kv.prefix
        self._tier = tier
        self._page_size = kv.page_size
        self._step_tokens = config.step_tokens()
        self._reserve = ceil(config.admission_reserve * kv.pool.total)
        self._short_of = 0
        """Blocks that must be obtainable for the next row to start, when that is what it waits for; else 0."""
        self.rounds = DraftRounds(kv, max_model_len)

    def add(self, row: Row) -> None:
        """Queue a row by its arrival."""
        insort(self.waiting, row, key=_arrival)

    def schedule(self) -> StepPlan:
        """Plan one step, taking the blocks it needs.

        Every plan must be followed by `commit` of its rows or `roll_back`, or its rows removed.
        """
        plan = StepPlan()
        self.rounds.outlook.look(self.running, self.waiting, self.rounds.times)
        if self._kv.rests is not None:
            self._make_whole(self._kv.rests, plan)
        if self._short_of:
            self._give_way()
        prompts, drafting = [], []
        for row in list(self.running):
            if not row.is_running or row.is_due:  # it has just been preempted, or waits to be compacted
                continue
            missing = row.missing_tokens
            if missing > 1:
                prompts.append(row)
            elif missing and self._make_tail_writable(row, plan):  # which preempts none of those before it
                if row.drafting is not None and row.has_begun:
                    drafting.append(row)
                else:
                    plan.add(row, 1)
        if drafting:
            plan.has_lossless = True
            others = bool(prompts or self.waiting)  # drafts leave them half of the step
            self.rounds.schedule(drafting, plan, self._step_tokens // 2 if others else self._step_tokens)
        for row in prompts:
            if row.is_running and plan.tokens < self._step_tokens:
                plan.add(row, self._step_tokens - plan.tokens)
        if not plan.preempted:
            self._admit(plan)
        if drafting:
            plan.repeats = self.rounds.repeats(plan)
        return plan

    def commit(self, scheduled: ScheduledRow, accepted: int = 0, then: Sequence[int] = ()) -> None:
        """A row's part of a plan has been computed: index the blocks that became full.

        The row may be planned further by now: what it has not computed yet is left to the next commit.

        Args:
            scheduled: the part.
            accepted: drafts that turned out right.
            then: those of them that the row has not been told yet.
        """
        row = scheduled.row
        if row.blocks is not scheduled.runs[-1].blocks:  # it has lost its blocks since, and may have others
            return
        complete = (scheduled.front + accepted) // self._page_size
        if complete <= row.indexed_blocks or row.body is not None or not self._prefix.enabled:
            return  # with a body it was computed by reading what it keeps: nobody else's KV
        keys = row.full_block_keys(self._page_size, then)[row.indexed_blocks : complete]
        for index, key in enumerate(keys, row.indexed_blocks):
            self._prefix.insert(key, row.blocks[index], index)
        self._prefix.unclaim(keys, row)
        row.indexed_blocks = complete

    def roll_back(self, plan: StepPlan) -> None:
        """A plan will not be carried out: its rows wait again, as after a preemption."""
        for scheduled in reversed(plan.rows):
            row = scheduled.row.draft_of or scheduled.row
            if row.is_running:
                if row is scheduled.row:
                    row.give_back(scheduled.runs)
                self._preempt(row)

    def note_due(self, rows: Iterable[Row]) -> None:
        """Some of these rows may have reached their triggers."""
        self.due += [row for row in rows if row.is_due and row not in self.due]

    def find_room(self, blocks: int, row: Row) -> bool:
        """Come nearer to having so many blocks free for a running row.

        By joining and eviction, by taking back what was taken for drafts, by parting a lossless row with what the host
        has too, by giving up what another one drafts with, or by one preemption.

        A preemption can also spare the row blocks, by leaving it alone with those that it shared: ask again for what
        it needs then. False when `row` itself was the last to arrive: it has been preempted.
        """
        if self._kv.make_room(blocks) or self._take_back_drafts():
            return True
        if (self._kv.rests is not None and self._kv.rests.part_one()) or self._kv.give_up_a_draft():
            return True
        victim = self.running[-1]
        self._preempt(victim)
        return victim is not row

    def fork(self, row: Row, choices: list[Row]) -> None:
        """Rows that continue a running row: they share its blocks until they write."""
        for choice in choices:
            choice.blocks = list(row.blocks)
            self._prefix.acquire(choice.blocks)
            choice.indexed_blocks = row.indexed_blocks
            choice.is_running = True
        at = self.running.index(row) + 1
        self.running[at:at] = choices
        row.request.recount_blocks()

    def remove(self, row: Row, reason: FinishReason) -> None:
        """A row has ended: its blocks go back."""
        row.finish_reason = reason
        row.settle()
        if row.is_running:
            self._vacate(row)
            self.running.remove(row)
        elif row in self.waiting:
            self.waiting.remove(row)
            self._kv.release(row)
            if self._tier is not None:
                self._tier.forget(row)

    # Memory

    def _make_tail_writable(self, row: Row, plan: StepPlan) -> bool:
        """Give a row a block of its own for its last token; False when the row itself had to be preempted."""
        segment = row.segments[0]
        if not segment.write:
            return True
        index = (segment.start - row.tail_start) // self._page_size
        is_new = index == len(row.blocks)
        if not is_new and self._pool.references(row.blocks[index]) == 1:
            return True
        while self._pool.free < 1:
            preemptions = self.preemptions
            if not self.find_room(1, row):
                plan.preempted += 1
                return False
            plan.preempted += self.preemptions - preemptions
            if not is_new and self._pool.references(row.blocks[index]) == 1:
                return True  # the one it shared the block with has gone
        (block,) = self._pool.take(1)
        if is_new:
            row.blocks.append(block)
        else:
            shared, row.blocks[index] = row.blocks[index], block
            self._kv.store.copy_blocks([(shared, block)])
            self._prefix.release([shared])
        row.request.note_blocks()
        return True

    def _make_whole(self, rests: Rests, plan: StepPlan) -> None:
        """Give parted rows back what they are to be verified on, as far as there is room.

        Where no row would become whole otherwise, others pay for it.
        """
        rests.take_back()
        row = rests.load(len(self.running))
        while row is not None and not rests.load_row(row):
            preemptions = self.preemptions
            is_left = self.find_room(rests.blocks_to_load(row), row)
            plan.preempted += self.preemptions - preemptions
            if not is_left:
                return

    def _take_back_drafts(self) -> bool:
        """Take the blocks that lossless rows got for drafts and need no more; False: there are none."""
        free = self._pool.free
        for row in self.running:
            if row.drafting is not None and not row.drafting.length and is_between_steps(row):
                self._kv.trim(row)
        return self._pool.free > free

    def _give_way(self) -> None:
        """The next row waits for room: take it from what others draft with, where that costs less than the row brings.

        A row more brings the speed of one row. A small cache brings what drafting gains, for one row.
        """
        if self._kv.obtainable < self._short_of and self.running and self.waiting:
            self._take_back_drafts()
            if not self.rounds.outlook.keeps_caches_from(self.waiting[0]):
                gain = (self.rounds.promised_gain or 1) - 1
                self._kv.give_up_drafts_for(self._short_of, most=1 / gain if gain > 0 else inf)

    def _preempt(self, row: Row) -> None:
        """Take a running row's memory.

        It will be computed again, as far as the prefix cache has lost it; a compressed row is saved.
        """
        self.preemptions += 1
        row.preemptions += 1
        logger.warning(
            "preempted %s (%d times): %d computed tokens in %d blocks given up; %d free, %d cached, %d held of %d",
            row.id, row.preemptions, len(row.tokens) - row.missing_tokens, len(row.blocks),
            self._pool.free, self._pool.cached, self._pool.held, self._pool.total,
        )  # fmt: skip
        row.computed_once = row.front
        if row.body is not None:
            self._kv.offload(row)
        self._vacate(row)
        self.running.remove(row)
        self.add(row)

    def _vacate(self, row: Row) -> None:
        """Return a running row to the state of a waiting one: with nothing computed, or with what was saved."""
        row.is_running = False
        if row in self.due:
            self.due.remove(row)
        if row.saved is None:
            if self._prefix.enabled and row.body is None:
                self._prefix.unclaim(row.full_block_keys(self._page_size)[row.indexed_blocks :], row)
            self._kv.release(row)
            row.segments, row.queries, row.indexed_blocks = [], None, 0
            if row.drafting is not None:
                self._kv.give_up_drafts(row)
                self._kv.plan_trigger(row, anew=True)
        row.request.recount_blocks()

    # Admission

    def _admit(self, plan: StepPlan) -> None:
        """Start waiting rows in order, while seats, tokens and blocks last.

        A row whose blocks another one is computing, or the tier is bringing, is passed over until these are there. One
        for which memory is short is not, so that small ones behind it cannot keep it waiting. No more rows are looked
        at in a step than there are seats: the first look at a row hashes its prompt.
        """
        self._short_of = 0
        if self._tier is not None:
            self._tier.bring_in()
        seats = self.config.max_num_seqs - sum(row.unforked for row in self.running)
        for row in self.waiting[: self.config.max_num_seqs]:
            if plan.tokens >= self._step_tokens or row.unforked > seats:
                return
            if row.pending:  # preempted while a token was being sampled: the next step knows it
                continue
            if row.saved is not None:
                if not self._resume(row):
                    return
                seats -= 1
                self._plan_first(row, plan)
                continue
            if self._tier is not None and self._tier.is_loading(row):
                continue
            if row.waits_for is not None and self._prefix.is_claimed([row.waits_for]):
                continue
            keys = row.reusable_keys(self._page_size) if self._prefix.enabled else []
            hits = self._prefix.lookup(keys)
            missing_keys = [key for key, hit in zip(keys, hits, strict=True) if hit is None]
            row.waits_for = next((key for key in missing_keys if self._prefix.is_claimed([key])), None)
            if row.waits_for is not None:
                continue
            if not self._has_room(row, hits):
                return
            if self._tier is not None and self._tier.load(row, keys, hits):
                continue
            self._start(row, hits)
            self._prefix.claim(missing_keys, row)
            seats -= row.unforked
            self._plan_first(row, plan)

    def _plan_first(self, row: Row, plan: StepPlan) -> None:
        """Plan what a row computes that has just been seated: nothing where all below its trigger was there."""
        self.note_due([row])
        if not row.is_due:
            plan.add(row, self._step_tokens - plan.tokens)

    def _has_room(self, row: Row, hits: list[BlockId | None]) -> bool:
        """Whether there are all the blocks that a row's known tokens need."""
        found = [block for block in hits if block is not None]
        needed = ceil(len(row.tokens) / self._page_size) - len(found)
        cached = sum(self._pool.references(block) == 0 for block in found)
        needed += cached + self._reserved(row)
        rests = self._kv.rests
        in_all = needed + self._kv.staging
        if in_all <= self._kv.obtainable or (rests is not None and rests.part_for(needed)):
            return True
        self._short_of = in_all
        return False

    def _start(self, row: Row, hits: list[BlockId | None]) -> None:
        """Give a row these blocks, and its segments; there is room."""
        found = [block for block in hits if block is not None]
        needed = ceil(len(row.tokens) / self._page_size) - len(found)
        self._prefix.acquire(found)
        self._kv.make_room(needed)
        fresh = iter(self._pool.take(needed))
        row.blocks = [next(fresh) if hit is None else hit for hit in hits]
        row.blocks.extend(fresh)
        length = len(row.tokens)
        wanted_from = length - 1  # its logits are needed
        if row.watched:
            wanted_from = min(wanted_from, row.watched.start)
        row.segments = self._segments(length, hits, wanted_from=wanted_from)
        self._seat(row)

    def _resume(self, row: Row) -> bool:
        """Give a compressed row its memory back; False when there is no room."""
        needed = self._kv.blocks_to_resume(row)
        needed += self._reserved(row) + self._kv.staging
        if needed > self._kv.obtainable:
            self._short_of = needed
            return False
        self._kv.make_room(needed)
        self._kv.resume(row)
        self._seat(row)
        return True

    def _reserved(self, row: Row) -> int:
        """Blocks to leave free when a row is admitted: each running one may need another soon."""
        tails = sum(other.unforked for other in self.running) + row.unforked - 1
        loading = 0 if self._tier is None else self._tier.awaited_blocks
        loading += self.rounds.outlook.awaited_blocks((*self.running, row))
        return loading + (max(self._reserve, tails) if self.running else 0)

    def _seat(self, row: Row) -> None:
        row.is_running = True
        self.waiting.remove(row)
        insort(self.running, row, key=_arrival)
        if self._tier is not None:
            self._tier.forget(row)
        self._count(row)
        row.request.recount_blocks()

    def _segments(self, length: int, hits: list[BlockId | None], *, wanted_from: int) -> list[Segment]:
        """The runs of positions that no hit covers, and for the sake of their queries all from `wanted_from` on."""
        segments: list[Segment] = []
        for index in range(ceil(length / self._page_size)):
            start, stop = index * self._page_size, min((index + 1) * self._page_size, length)
            write = index >= len(hits) or hits[index] is None
            if not write:
                start = max(start, wanted_from)
            if start >= stop:
                continue
            if segments and segments[-1].stop == start and segments[-1].write == write:
                segments[-1] = Segment(segments[-1].start, stop, write)
            else:
                segments.append(Segment(start, stop, write))
        return segments

    def _count(self, row: Row) -> None:
        counters = self._prefix.counters
        missing = row.missing_tokens
        found = len(row.tokens) - missing
        if row.preemptions:
            counters.resumed += found
            counters.recomputed += sum(max(0, min(stop, row.computed_once) - start) for start, stop, _ in row.segments)
        else:
            counters.queries += len(row.tokens)
            counters.hits += found
            row.request.cached_tokens = found


def _arrival(row: Row) -> int:
    return row.request.number

"""Which lossless rows get small caches, and which part with their whole KV: by what all of them together then commit.

A small cache takes time to make, and room that another row could have. So rows get one where the model of
`drafting.residence` says that it brings more, for all the rows that run and wait. It goes by the step times that were
measured, and by what was accepted of other rows of the same method. What it does not know it learns from a few rows.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvikk.compress.config import MAX_DRAFT_TOKENS
from kvikk.engine.drafting import SMALL_CACHE, Acceptance, HostCosts, Mix, Prior, Room, StepTimes, best_mix
from kvikk.engine.kv import KVMemory
from kvikk.engine.request import Row, drafting_of, kv_cache_of

logger = logging.getLogger(__name__)

MOST_PARTED: Final = 128
"""Tokens that a row drafts at the most while the host has its whole KV: one verification takes the whole link."""

ASKED_ANEW: Final = 32
"""Steps for which an answer of the model is good, while it would be asked much the same."""

LEAST_GAIN, LEAST_GAIN_OF_PARTED = 1.03, 1.15
"""By which the model must say that all commit more before small caches are made, and before rows part: it is a model
of rows that are where they should be, and to part them all and to bring them back takes long."""

KEPT_SHARE: Final = 1 / 3
"""Of that gain, what must be left of it for rows to go on so."""

PILOTS: Final = 4
"""Rows with small caches while it is not known what they bring, or known that they bring nothing."""

PILOT_TOKENS, PILOT_LENGTH = 512, 8
"""Drafted tokens of a method that must have been tried before all its rows follow, and in a round of a pilot."""

STANDARD_ERRORS: Final = 1.5
"""Taken off the acceptance that was seen: what pays must not hang on luck."""

SHORTEST_PATIENCE, LONGEST_PATIENCE = 2**13, 2**17
"""Tokens that all rows commit until small caches are tried again that brought nothing, at first and at the most."""

POOL_TOKENS: Final = 1024
"""A token of any row counts 1/e for the next rows when so many of its method were tried after it."""

POOLED_WEIGHT: Final = 32
"""Tokens that what other rows have shown is worth to a new one, at the most."""

MORE_MISSES: Final = 8
"""Times as many misses as on average that a row may have to part."""

ANSWER_TOKENS: Final = 256
"""That a text is taken to go on for where its request does not say."""


@dataclass(slots=True)
class _Known:
    """What rows of one method have shown.

    Args:
        acceptance: of the tokens that were tried.
        tried: how many.
        idle_tokens: committed by its rows since one of them last got a small cache.
        patience: so many of them until some get one again that would bring nothing.
        share: of a row's blocks that its small cache takes; 0: none has been made.
    """

    acceptance: Acceptance = field(default_factory=lambda: Acceptance(SMALL_CACHE, memory_tokens=POOL_TOKENS))
    tried: int = 0
    idle_tokens: int = 0
    patience: int = SHORTEST_PATIENCE
    share: float = 0.0

    @property
    def least_acceptance(self) -> float:
        """What the probability that a token is accepted may well be."""
        mean = self.acceptance.probability
        error = math.sqrt(mean * (1 - mean) / (SMALL_CACHE.weight + min(self.tried, POOL_TOKENS)))
        return max(0.0, mean - STANDARD_ERRORS * error)


class Outlook:
    """Says which rows get small caches, and how many part.

    Args:
        kv: the memory.
        max_model_len: tokens of the longest sequence.
    """

    def __init__(self, kv: KVMemory, max_model_len: int) -> None:
        self.mix: Mix | None = None
        """What rows should do; None: not known yet."""
        self.copy_s = 0.0
        """What it takes to make a small cache, running; 0: it is not known yet."""
        self._kv = kv
        self._max_model_len = max_model_len
        self._methods: dict[tuple[object, ...], _Known] = {}
        self._steps = 0
        self._case: tuple[int, int] | None = None
        self._is_ample = True
        self._drafts = False
        """Whether small caches bring more than the rows that would fit in their place."""
        self._since: int | None = None
        """The step from which on the model has said so, where it does."""
        self._acceptance = SMALL_CACHE.mean
        self._may_pay, self._has_tried = True, False
        self._plain_token_s = self._token_s = 0.0

    # What rows have shown

    def note_verified(self, row: Row, drafted: int, accepted: int) -> None:
        """Drafts of a row's small cache were verified; none: it has decoded plainly."""
        known = self._known(row)
        if drafted:
            known.acceptance.observe(drafted, accepted)
            known.tried += min(drafted, accepted + 1)
        known.idle_tokens += 1 + accepted

    def note_copy(self, row: Row, seconds: float) -> None:
        """A row has got a small cache, which took so long."""
        self.copy_s = 0.9 * self.copy_s + 0.1 * seconds if self.copy_s else seconds
        cache = drafting_of(row).cache
        if cache is not None:
            known = self._known(row)
            known.share = cache.body_blocks / max(1, len(row.tokens) // self._kv.page_size)
            known.idle_tokens = 0

    # What follows from it

    def look(self, running: Sequence[Row], waiting: Sequence[Row], times: StepTimes) -> None:
        """Before a step is planned: ask the model anew where that is due, and have rows do what it says."""
        self._steps += 1
        case = len(running) // 4, len(waiting) // 4
        if self._steps % ASKED_ANEW and (case == self._case or self._steps % (ASKED_ANEW // 4)):
            return
        self._case = case
        rows = [row for row in (*running, *waiting) if _is_concerned(row)]
        if not rows:
            return
        room = self._room(rows, running)
        self._is_ample = room.rows * (room.row_blocks + (room.cache_blocks or room.row_blocks)) <= room.blocks
        self._ask(rows, room, times)
        self._decide()
        rests = self._kv.rests
        if rests is not None and not rests.always:
            rests.most_parted = self.mix.parted if self.mix is not None and self._drafts else 0
            rests.least_acceptance = 1 - MORE_MISSES * (1 - self._acceptance)
        self._invite(running)

    def wants_cache(self, row: Row) -> bool:
        """Whether a row that is at its trigger should get a small cache: it would draft, and that brings more than it
        takes."""
        record, params = drafting_of(row).record, kv_cache_of(row)
        if params.draft_tokens is not None:
            return params.draft_tokens != 0
        if record.fallback is not None and not record.is_due:
            return False
        rests = self._kv.rests
        if (rests is not None and rests.always) or self._pays(row):
            return True
        known = self._known(row)
        if self.mix is None or self._is_open(known):
            return self._is_ample or self._pilots(row) < PILOTS
        if known.idle_tokens < known.patience or self._pilots(row):
            return False
        known.patience = min(2 * known.patience, LONGEST_PATIENCE)
        return True

    def prior(self, row: Row) -> Prior:
        """What is taken to hold of a row that has shown nothing: what the others of its method have shown."""
        known = self._known(row)
        if not known.tried:
            return SMALL_CACHE
        mean = min(0.999, max(0.001, known.acceptance.probability))
        return Prior(mean=mean, weight=min(POOLED_WEIGHT, SMALL_CACHE.weight + known.tried / 8))

    def is_pilot(self, row: Row) -> bool:
        """Whether a row drafts to show what comes of it."""
        return not (self._is_ample or self._drafts) and self._is_open(self._known(row))

    def awaited_blocks(self, rows: Iterable[Row]) -> int:
        """Blocks that rows which run or are about to will take: for the small caches that they are to get, and, where
        some part, for all that they still write, as a row that has parted costs most when it is preempted."""
        blocks, page = 0.0, self._kv.page_size
        if self.mix is not None and self._drafts:
            for row in rows:
                if not _is_concerned(row):
                    continue
                if drafting_of(row).cache is None and self._pays(row):
                    blocks += self._known(row).share * (len(row.tokens) // page)
                if self.mix.parted:
                    blocks += self._left(row) / page
        return math.ceil(blocks)

    def keeps_caches_from(self, row: Row) -> bool:
        """Whether small caches stay while a row waits for room: they bring more, or what they bring is to be seen."""
        pilots = sum(kv_cache_of(other).draft_tokens is None for other in self._kv.drafting)
        if not pilots or not _is_concerned(row):
            return False
        if self.mix is None or (not self._drafts and self._is_open(self._known(row))):
            return pilots <= PILOTS
        return self._drafts

    # Parts of these

    def _ask(self, rows: Sequence[Row], room: Room, times: StepTimes) -> None:
        rests = self._kv.rests
        load_row_s = math.inf if rests is None or not rests.load_block_s else rests.load_block_s * room.row_blocks
        costs = HostCosts.of(times, load_row_s)
        if costs is None or not room.cache_blocks:
            self.mix = None  # as after the times have been forgotten
            return
        known = [self._known(row) for row in rows]
        likely = sum(each.acceptance.probability for each in known) / len(known)
        # Neither to begin with it nor to end it may hang on luck: rows that have parted are not soon whole again.
        self._has_tried = min(each.tried for each in known) >= PILOT_TOKENS
        self._acceptance = likely if self._drafts else sum(each.least_acceptance for each in known) / len(known)
        self.mix = mix = best_mix(room, min(self._acceptance, 0.999), MAX_DRAFT_TOKENS, MOST_PARTED, costs)
        self._may_pay = _is_worth(mix)
        if not (self._may_pay or self._is_ample):
            self._may_pay = _is_worth(best_mix(room, likely, MAX_DRAFT_TOKENS, MOST_PARTED, costs))
        self._plain_token_s = 1 / mix.plain_tokens_per_s
        self._token_s = 1 / mix.tokens_per_s if mix.tokens_per_s else math.inf

    def _decide(self) -> None:
        """Where rows would lack the room of small caches, these are made only once the model has said for a while that
        they pay: what it goes by is known badly at first."""
        mix, drafted = self.mix, self._drafts
        if mix is None or not (mix.gain > 1 if self._is_ample else _is_worth(mix, KEPT_SHARE if drafted else 1)):
            self._drafts, self._since = False, None
        else:
            self._since = self._steps if self._since is None else self._since
            is_sure = self._has_tried and self._steps - self._since >= ASKED_ANEW
            self._drafts = drafted or self._is_ample or is_sure
        if mix is not None and self._drafts != drafted:
            logger.info(
                "lossless rows %s from here on: %d whole and %d parted ones would be %.2f times as fast as plain ones",
                "decode plainly" if drafted else "draft", mix.whole, mix.parted, mix.gain,
            )  # fmt: skip

    def _is_open(self, known: _Known) -> bool:
        """Whether it takes more drafts to see what small caches bring: too few were tried, or it hangs on luck."""
        return known.tried < (POOL_TOKENS if self._may_pay else PILOT_TOKENS)

    def _pays(self, row: Row) -> bool:
        """Whether what the row still says is so much sooner said that this outweighs what its small cache takes."""
        if not self._drafts or self._known(row).tried < PILOT_TOKENS:
            return False
        return self._left(row) * (self._plain_token_s - self._token_s) > self.copy_s

    def _room(self, rows: Sequence[Row], running: Sequence[Row]) -> Room:
        page, count = self._kv.page_size, len(rows)
        others = sum(len(row.blocks) + row.body_blocks for row in running if not _is_concerned(row))
        tokens = sum(len(row.tokens) for row in rows) / count
        left = sum(self._left(row) for row in rows) / count
        cached = sum(len(row.tokens) // page * self._known(row).share for row in rows) / count
        rests, host_rows = self._kv.rests, 0
        if rests is not None:
            host_rows = rests.total_blocks * page // int(tokens)
        return Room(
            rows=count,
            blocks=max(0, self._kv.pool.total - others),  # others may share theirs
            row_blocks=(tokens + left / 2) / page + 1,
            cache_blocks=cached,
            tail_blocks=left / page + 1,
            host_rows=host_rows,
        )

    def _invite(self, running: Sequence[Row]) -> None:
        """Have rows that began plainly come to a trigger where small caches pay by now, and what may part be saved."""
        rests = self._kv.rests
        for row in running:
            if not _is_concerned(row) or not row.has_begun:
                continue
            state = drafting_of(row)
            if state.cache is None and row.compress_at is None and self._pays(row):
                self._kv.want_cache_now(row)
            elif state.cache is not None and row.rest is None and rests is not None and rests.has_use_for(row):
                rests.keep(row)

    def _left(self, row: Row) -> int:
        """Tokens that a row will still write, as far as that is known."""
        prompt, written = len(row.request.prompt_token_ids), len(row.tokens)
        most = row.request.params.max_tokens
        end = self._max_model_len if most is None else min(self._max_model_len, prompt + most)
        return max(0, min(end - written, max(ANSWER_TOKENS, written - prompt)) if most is None else end - written)

    def _pilots(self, row: Row) -> int:
        params = row.request.kv_cache
        return sum(other.request.kv_cache == params for other in self._kv.drafting)

    def _known(self, row: Row) -> _Known:
        params = kv_cache_of(row)
        method = params.policy, params.budget, params.allocator, params.drafter
        known = self._methods.get(method)
        if known is None:
            known = self._methods[method] = _Known()
        return known


def _is_worth(mix: Mix, share: float = 1) -> bool:
    """Whether a mix gains this share of what it must."""
    least = LEAST_GAIN_OF_PARTED if mix.parted else LEAST_GAIN
    return mix.gain > 1 + share * (least - 1)


def _is_concerned(row: Row) -> bool:
    """Whether a row is lossless, and may have a small cache."""
    params = row.request.kv_cache
    return row.drafting is not None and row.drafting.lookup is None and params is not None and params.draft_tokens != 0

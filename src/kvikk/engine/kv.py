"""What rows hold, as one memory: whole blocks, the single frames of compressed rows, and the prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from kvikk.compress import KVCacheParams
from kvikk.engine.request import FinishReason, Row, Saved
from kvikk.engine.rest import RestBytes, Rests
from kvikk.errors import PoolCorrupt
from kvikk.memory import (
    BlockPool,
    Body,
    Compaction,
    FramePool,
    Held,
    Keep,
    Packed,
    frames_wanted,
    held_by,
    plan_compaction,
)
from kvikk.memory.body import IntArray
from kvikk.prefix import PrefixCache
from kvikk.types import BlockId, Position

RETRY_TOKENS: Final = 64
"""That a lossless row writes before it is tried for the first time whether there is room for its small cache now."""


class KVBytes(Protocol):
    """Touches the bytes of the pool between two steps: `memory.KVStore`, or a simulation of it.

    What is asked happens in order, after all steps started before and before any started later.
    """

    @property
    def lanes(self) -> int:
        """Frames of a block."""
        ...

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that one token takes over all lanes."""
        ...

    @property
    def device(self) -> torch.device:
        """Where masks and positions of slots live."""
        ...

    def copy_blocks(self, copies: list[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks, `(source, target)`, in the order given."""
        ...

    def copy_frames(self, sources: IntArray, targets: IntArray) -> None:
        """Copy whole frames. No target is a source."""
        ...

    def pack(self, held: Held, keep: Keep, plan: Compaction, *, wants_order: bool = False) -> Packed:
        """Copy what a row keeps to where it was planned to lie; `Packed.order` is there if it is asked for."""
        ...

    def save(self, frames: IntArray, blocks: Sequence[BlockId]) -> Any:
        """What frames and blocks hold, away from the pool."""
        ...

    def restore(self, saved: Any, frames: IntArray, blocks: Sequence[BlockId]) -> None:
        """Bring it back, to as many frames and blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tokens of a row stay.

    Args:
        keep: of its slots.
        counts: `[lanes]`, how many those are.
        state: `[lanes, slots]` fp32 each, what the policy wants to remember of each slot.
        check: raises `PolicyFailed` where the choice means nothing; its numbers are there when a step that was started
            later has been read. None: there is nothing to check.
    """

    keep: Keep
    counts: IntArray
    state: dict[str, Tensor]
    check: Callable[[], None] | None = None

    def of_first(self, slots: int) -> Keep:
        """What stays of the first slots of each lane, when all others stay."""
        return self.keep[:, :slots] if isinstance(self.keep, Tensor) else self.keep


class Compressor(Protocol):
    """Says what rows keep at a trigger, and which of their queries it will want to see for that."""

    def choose(self, row: Row, held: Held, kept_from: Position) -> Choice:
        """Score a row's slots by its policy and fill its budget.

        Args:
            row: all its positions below `row.compress_at` are computed, and no more.
            held: its slots.
            kept_from: from this position on everything is kept, in every lane.

        Raises:
            KvikkError: the policy broke its contract; nothing changed. That of its scores may come to light later, by
                `Choice.check`.
        """
        ...

    def check(self, params: KVCacheParams) -> None:
        """Refuse what can never be done with this model.

        Raises:
            InvalidRequest: why, and the way out.
        """
        ...

    def keeps_everything(self, row: Row) -> bool:
        """Whether the budget holds all tokens of the row, so that there is nothing to choose."""
        ...

    def next_trigger(self, row: Row, after: int | None = None) -> tuple[int | None, range]:
        """The row's first trigger, or the one after `row.compress_at`, and positions whose queries it needs then.

        Args:
            row: of which.
            after: whatever was asked for: one when the row has written so many tokens more, or a few more than that.
        """
        ...


@dataclass(slots=True)
class CompactionCounters:
    """Since the start; only ever grow.

    `dropped_tokens` are means over lanes. `freed_frames` went back to the pool, less those taken to copy to.
    """

    compactions: int = 0
    dropped_tokens: float = 0.0
    freed_frames: int = 0


class KVMemory:
    """Gives rows blocks and frames, takes them back, and finds room.

    Room comes from free blocks, then from split blocks that can be joined, which costs a few copies, then from the
    prefix cache, which costs whoever would have found the blocks there.

    Args:
        blocks: usable blocks.
        store: their bytes.
        prefix: makes the prefix cache over a pool.
        page_size: slots of a frame.
        compressor: chooses what is kept; None: rows are never compressed.
        rest: the host's memory for the whole KV of lossless rows; None: the device has all of it.
    """

    def __init__(
        self,
        blocks: int,
        store: KVBytes,
        prefix: Callable[[BlockPool], PrefixCache],
        page_size: int,
        compressor: Compressor | None,
        rest: RestBytes | None = None,
    ) -> None:
        self.pool = BlockPool(blocks)
        self.frames = FramePool(self.pool, store.lanes)
        self.prefix = prefix(self.pool)
        self.page_size = page_size
        self.store = store
        self.compressor = compressor
        self.counters = CompactionCounters()
        self.rests = None if rest is None else Rests(self, rest)
        self._bodies: set[Body] = set()
        self.drafting: dict[Row, None] = {}
        """Rows that have small caches to draft with, in the order in which they got them."""

    # Room

    @property
    def obtainable(self) -> int:
        """Blocks that `make_room` can have free."""
        return self.pool.free + self.frames.joinable + self.pool.cached

    def make_room(self, blocks: int) -> bool:
        """Join and evict until `blocks` blocks are free; False, and nothing done, when that cannot be."""
        missing = blocks - self.pool.free
        if missing <= 0:
            return True
        if blocks > self.obtainable:
            return False
        joined = min(missing, self.frames.joinable)
        if joined:
            sources, targets = self.frames.join(joined)
            self.store.copy_frames(sources, targets)
            for body in self._bodies:
                body.relocate(sources, targets)
        return self.prefix.make_room(blocks)

    def release(self, row: Row) -> None:
        """Take all of a row's memory; what it holds is lost."""
        self.prefix.release(row.blocks)
        row.blocks = []
        if row.body is not None and row.saved is None:
            self._give_up(row.body)
        row.body = row.saved = None
        row.body_blocks = 0
        self.give_up_drafts(row)
        if self.rests is not None:
            self.rests.forget(row)

    def check(self, rows: Iterable[Row]) -> None:
        """Recount everything against what all rows hold.

        Raises:
            PoolCorrupt: with the first disagreement found.
        """
        rows = list(rows)
        caches = [row.drafting.cache for row in rows if row.drafting is not None]
        bodies = [row.body for row in rows if row.body is not None and row.saved is None]
        bodies += [cache.body for cache in caches if cache is not None and cache.body is not None]
        if set(bodies) != self._bodies or len(bodies) != len(self._bodies):
            raise PoolCorrupt(f"{len(self._bodies)} bodies are known, rows have {len(bodies)}, or others")
        arriving = () if self.rests is None else self.rests.holders()
        self.pool.check([*(row.blocks for row in rows), *self.prefix.holders(), *self.frames.holders(), *arriving])
        self.frames.check(bodies, self.page_size)
        self.prefix.check()

    # Compressed rows

    def plan_trigger(self, row: Row, *, anew: bool = False) -> None:
        """Find a row's next trigger, if it has any.

        Args:
            row: of which.
            anew: it will be computed again: what it had at triggers before is gone.
        """
        params = row.request.kv_cache
        if params is None or params.is_full or (params.lossless and params.drafts_by_lookup):
            return
        assert self.compressor is not None
        if anew:
            row.compress_at = None
        row.set_trigger(*self.compressor.next_trigger(row))

    def compact(self, row: Row, room: Callable[[int, Row], bool]) -> bool:
        """A row is at its trigger: drop what its policy gives up, and give back the memory.

        Blocks that others hold are left as they are, and what lives in them is copied out. Blocks that only the prefix
        index knows stay there while that takes no eviction; else they are taken out of it and compacted in place.

        Args:
            row: all its positions below `row.compress_at` are computed, and no more.
            room: comes nearer to so many free blocks for the row, at the cost of others; False: at its own.

        Returns:
            False when there was no room: `row` has given up its memory.

        Raises:
            KvikkError: the policy broke its contract; nothing changed.
        """
        assert self.compressor is not None
        if self.compressor.keeps_everything(row):
            return True
        fold_to = Position(row.front // self.page_size * self.page_size)  # a block that is part filled stays a block
        everything = self._held(row, row.blocks)
        choice = self.compressor.choose(row, everything, fold_to)
        row.check_choice = choice.check
        in_body = 0 if row.body is None else int(row.body.lengths.sum())
        live = in_body + self.store.lanes * (row.front - row.tail_start)
        if int(choice.counts.sum()) == live and not choice.state:
            return True
        folded = row.blocks[: (fold_to - row.tail_start) // self.page_size]
        counts = choice.counts - (row.front - fold_to)
        held = self._with_room(row, everything, folded, counts, room)
        if held is None:
            return False
        frames_freed = self._pack(row, folded, held, choice, counts, fold_to)
        self._note(row, live / self.store.lanes, float(choice.counts.mean()), frames_freed)
        return True

    def want_cache_later(self, row: Row) -> None:
        """A lossless row has no small cache for want of room: have it come to a trigger again, each time a longer while
        later, as what it would keep is chosen before it is known whether there is room."""
        assert self.compressor is not None
        assert row.drafting is not None
        soon = self.rests is not None and self.rests.leaving > 0
        if row.compress_at is None or row.front >= row.compress_at:
            row.set_trigger(*self.compressor.next_trigger(row, 1 if soon else RETRY_TOKENS << row.drafting.refusals))
        row.drafting.refusals += not soon

    def want_cache_now(self, row: Row) -> None:
        """Have a lossless row without a small cache come to a trigger as soon as may be."""
        assert self.compressor is not None
        row.set_trigger(*self.compressor.next_trigger(row, 1))

    def copy_kept(self, row: Row) -> bool:
        """A lossless row is at its trigger: make its small cache anew, a copy of what its policy keeps.

        It gets room as far as that takes nothing from other rows; without, the row goes on with none.

        Args:
            row: all its positions below `row.compress_at` are computed, and no more.

        Returns:
            False when there was no room.

        Raises:
            KvikkError: the policy broke its contract; the row has no small cache.
        """
        assert self.compressor is not None
        assert row.drafting is not None
        self.give_up_drafts(row)
        if self.compressor.keeps_everything(row):
            return True
        stop = Position(row.front // self.page_size * self.page_size)
        everything = self._held(row, row.blocks, may_write=False)
        choice = self.compressor.choose(row, everything, stop)
        if int(choice.counts.min()) == row.front:  # a budget that holds so short a text
            return True
        counts = choice.counts - (row.front - stop)
        held = everything.first(stop // self.page_size)
        frames = int(frames_wanted(held, counts).sum())
        while (blocks := self.frames.blocks_needed(frames)) + self.staging > self.obtainable or blocks > self.pool.free:
            # joining takes free frames as well
            has_room = blocks + self.staging <= self.obtainable
            if not (has_room and self.make_room(blocks)) and not self._part_one_more():
                return False
        fresh = self.frames.take(frames)
        plan = plan_compaction(held, counts, fresh, stop=stop)
        body = plan.body(self.store.pack(held, choice.of_first(held.slots), plan))
        self._bodies.add(body)
        cache = Row(request=row.request, choice=row.choice, tokens=array("i"), keys=[], body=body, draft_of=row)
        cache.is_running, cache.check_choice = True, choice.check
        row.drafting.cache, row.drafting.refusals = cache, 0
        self.drafting[row] = None
        self._count(cache)
        if self.rests is not None:
            self.rests.keep(row)
        self._tell_usage(row, float(choice.counts.mean()), 0)
        return True

    def _part_one_more(self) -> bool:
        """Where more rows should part with their whole KV, have one do so, so that this one can too."""
        rests = self.rests
        if rests is None or not rests.may_part(1):
            return False
        if rests.part_one():
            return True
        rests.ask_one_to_part()
        return False

    @property
    def staging(self) -> int:
        """Blocks to leave for parted rows to be whole again."""
        return 0 if self.rests is None else self.rests.staging

    def give_up_drafts(self, row: Row) -> None:
        """Take the small cache of a lossless row, if it has one. What was drafted in this round is forgotten."""
        drafting = row.drafting
        if drafting is None or drafting.cache is None:
            return
        cache, body = drafting.cache, drafting.cache.body
        assert body is not None
        self._give_up(body)
        cache.blocks, cache.is_running, cache.finish_reason = [], False, FinishReason.ABORT
        drafting.cache, drafting.length, drafting.base = None, 0, 0
        del self.drafting[row]
        row.request.recount_blocks()

    def give_up_a_draft(self) -> bool:
        """Take the small cache that was made last, for the sake of rows that need room; False: there is none.

        A row that has parted with the rest of its KV keeps its own: it has nothing else to go on with.
        """
        row = next(self._drafting_on_whole(), None)
        if row is not None:
            self.give_up_drafts(row)
            self.want_cache_later(row)
        return row is not None

    def give_up_drafts_for(self, blocks: int, most: float) -> bool:
        """Take small caches, the last that were made first, so that as many blocks become obtainable.

        Args:
            blocks: to become so.
            most: small caches to take.

        Returns:
            False, and nothing done, where that is not enough.
        """
        victims: list[Row] = []
        frames, needed = 0, blocks - self.obtainable + self.frames.joinable
        for row in self._drafting_on_whole():
            if self.frames.joinable_after(frames) >= needed:
                break
            assert row.drafting is not None
            assert row.drafting.cache is not None
            assert row.drafting.cache.body is not None
            victims.append(row)
            frames += row.drafting.cache.body.frame_count(self.page_size)
        if self.frames.joinable_after(frames) < needed or len(victims) > most:
            return False
        for row in victims:
            self.give_up_drafts(row)
            self.want_cache_later(row)
        return True

    def _drafting_on_whole(self) -> Iterator[Row]:
        """Rows with small caches that can go on without, the last that got theirs first."""
        return (row for row in reversed(self.drafting) if row.rest is None or not row.rest.is_parted)

    def trim(self, row: Row) -> None:
        """Take the blocks behind a row's last token that it got for drafts; it is in no round, and no step has it."""
        needed = -(-(len(row.tokens) - row.tail_start) // self.page_size)
        if len(row.blocks) > needed:
            self.prefix.release(row.blocks[needed:])
            row.blocks = row.blocks[:needed]  # a list of its own: the device knows several of those that are taken
            row.request.recount_blocks()

    def offload(self, row: Row) -> None:
        """Save what a compressed row holds and take its memory: it could not be computed again."""
        assert row.body is not None
        owned = row.body.held(self.page_size)
        row.saved = Saved(self.store.save(owned, row.blocks), len(owned), len(row.blocks))
        self._give_up(row.body)
        self.prefix.release(row.blocks)
        row.blocks, row.body_blocks = [], 0

    def blocks_to_resume(self, row: Row) -> int:
        """Free blocks that `resume` needs at the most."""
        assert row.saved is not None
        tail = -(-(len(row.tokens) - row.tail_start) // self.page_size)
        return tail + -(-row.saved.frames // self.store.lanes)

    def resume(self, row: Row) -> None:
        """Bring a compressed row back to memory; so many blocks are free."""
        assert row.body is not None
        assert row.saved is not None
        saved, row.saved = row.saved, None
        frames = self.frames.take(saved.frames)
        table = row.body.frames.copy()  # another one, so that whoever has told a device of it sees that it changed
        table[row.body.live_columns(self.page_size)] = frames
        row.body.frames = table
        row.blocks = self.pool.take(-(-(len(row.tokens) - row.tail_start) // self.page_size))
        self.store.restore(saved.bytes, frames, row.blocks[: saved.blocks])
        self._bodies.add(row.body)
        self._count(row)

    def _pack(
        self, row: Row, folded: list[BlockId], held: Held, choice: Choice, counts: IntArray, fold_to: Position
    ) -> int:
        """Give a row the body that is left of its old one and of its folded blocks. Returns how many frames that freed.

        Args:
            row: of which.
            folded: the first blocks of its tail.
            held: its slots in the old body and in these.
            choice: what stays of all its slots.
            counts: `[lanes]`, how many that are of those in `held`.
            fold_to: where its tail begins afterwards.
        """
        fresh = self.frames.take(int(frames_wanted(held, counts).sum()))
        plan = plan_compaction(held, counts, fresh, stop=fold_to)
        packed = self.store.pack(held, choice.of_first(held.slots), plan, wants_order=bool(choice.state))
        body = plan.body(packed)
        body.state = {name: packed.gather(values[:, : held.slots]) for name, values in choice.state.items()}
        self.frames.split([block for block, is_used in zip(folded, plan.is_used, strict=True) if is_used])
        self.frames.release(plan.freed)
        self.prefix.release([block for block, is_used in zip(folded, plan.is_used, strict=True) if not is_used])
        frames = len(folded) * self.store.lanes
        if row.body is not None:
            frames += row.body.frame_count(self.page_size)
            self._bodies.remove(row.body)
        self._bodies.add(body)
        row.body, row.blocks = body, row.blocks[len(folded) :]
        self._count(row)
        return frames - body.frame_count(self.page_size)

    def _with_room(
        self, row: Row, before: Held, folded: Sequence[BlockId], counts: IntArray, room: Callable[[int, Row], bool]
    ) -> Held | None:
        """The row's slots once there is room to compact them; None: the row has given up its memory for others.

        Finding room can move frames and lower the counts of blocks, so what was known of them before is not used again.
        """
        held = before.first(len(folded))
        while True:
            blocks = self.frames.blocks_needed(int(frames_wanted(held, counts).sum()))
            if blocks <= self.pool.free:
                return held
            indexed = [block for block in folded if self.pool.references(block) == 1 and self.pool.is_kept(block)]
            if blocks > self.pool.free + self.frames.joinable and indexed:
                self.prefix.give_up(indexed)
            elif not room(blocks, row):
                return None
            held = self._held(row, folded)

    def _held(self, row: Row, blocks: Sequence[BlockId], *, may_write: bool = True) -> Held:
        """A row's slots."""
        return held_by(
            row.body,
            blocks,
            self.pool.are_own(blocks) if may_write else [False] * len(blocks),
            length=row.front,
            lanes=self.store.lanes,
            page_size=self.page_size,
            device=self.store.device,
        )

    def _note(self, row: Row, held: float, kept: float, frames_freed: int) -> None:
        """Tell the request what came of a compaction, and count it."""
        self.counters.compactions += 1
        self.counters.dropped_tokens += held - kept
        self.counters.freed_frames += frames_freed
        self._tell_usage(row, kept, frames_freed)

    def _tell_usage(self, row: Row, kept: float, frames_freed: int) -> None:
        usage = row.request.kv_usage
        assert usage is not None
        usage.compactions += 1
        usage.tokens, usage.kept_tokens = row.front, kept
        usage.kept_bytes = round(kept * self.store.token_bytes)
        usage.frames_freed += frames_freed
        usage.blocks_freed = usage.frames_freed // self.store.lanes

    def _count(self, row: Row) -> None:
        assert row.body is not None
        row.body_blocks = -(-row.body.frame_count(self.page_size) // self.store.lanes)
        row.request.recount_blocks()

    def _give_up(self, body: Body) -> None:
        self.frames.release(body.held(self.page_size))
        self._bodies.remove(body)

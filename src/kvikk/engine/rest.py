"""Lossless rows whose whole KV lies in the host's memory: they draft on the device, and get it back to be verified.

Every small cache is made together with a copy of its row's full blocks in the host's memory. From then on the row can
*part* with these blocks: they are given up when others need the room, and what is left of the row on the device is its
small cache and its tail. So more rows draft at a time than the device could hold. When a parted row has drafted enough
it queues for the link: it gets blocks, those that the prefix cache still has and others that are copied in, and drafts
on while they come. With them it is a whole row, its tokens are verified as any row's are, and it parts again as soon as
another one needs the room.

A row that is whole for good is verified for nothing, one that parts costs the link its whole length each time. So rows
part only when that lets another one start, or keeps one from being preempted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvikk.engine.drafting import loads_at_once
from kvikk.engine.request import Copying, Rest, Row
from kvikk.types import BlockId, Position

if TYPE_CHECKING:
    from kvikk.engine.kv import KVMemory

SPARE_COPIES: Final = 2
"""Rows whose KV the host has besides that of as many as are to part: these can part at once."""


class RestBytes(Protocol):
    """Holds blocks in the host's memory: `memory.RestStore`, or a simulation of it."""

    @property
    def total(self) -> int:
        """Blocks that it can hold."""
        ...

    @property
    def free(self) -> int:
        """Blocks that there is room for."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        ...

    def save(self, blocks: Sequence[BlockId]) -> tuple[list[int], Copying]:
        """Begin to copy blocks out of the pool, no more than `free`. Returns their slots."""
        ...

    def load(self, slots: Sequence[int], blocks: Sequence[BlockId], after: Copying) -> Copying:
        """Begin to copy slots back into the pool, to blocks that no one else has."""
        ...

    def give_back(self, slots: Sequence[int]) -> None:
        """These slots are not needed any more. A copy to them may be under way; one from them has been settled."""
        ...


@dataclass(slots=True)
class RestCounters:
    """Since the start; only ever grow.

    Args:
        saved_blocks: copied to the host.
        loaded_blocks: copied back.
        found_blocks: of rows that got theirs back, those that were still cached on the device.
        partings: rows that gave up what the host had.
        refused: rows that the host had no room for.
    """

    saved_blocks: int = 0
    loaded_blocks: int = 0
    found_blocks: int = 0
    partings: int = 0
    refused: int = 0


class Rests:
    """Parts rows with what the host has of them, and gets it back.

    Args:
        kv: gives room, and takes it.
        store: the host's memory.
    """

    def __init__(self, kv: KVMemory, store: RestBytes) -> None:
        self.always = False
        """Whether rows part wherever that makes room that is wanted, and not only where it pays."""
        self.most_parted = 0
        """Rows that may be parted to make room for others, where they are not `always`; to spare one from being
        preempted any may."""
        self.least_acceptance = 0.0
        """Of the drafts of a row that may part: of one that misses more the link would bring all for a few tokens."""
        self.counters = RestCounters()
        self.load_block_s = 0.0
        """What the link takes for a block, running; 0: it is not known yet."""
        self._kv = kv
        self._store = store
        self._rows: dict[Row, Rest] = {}
        """All that the host has something of, in the order in which they came."""
        self._queue: dict[Row, None] = {}
        """Parted rows that want to be whole, in the order in which they will be."""

    @property
    def parted(self) -> int:
        """Rows whose first blocks the host alone has."""
        return sum(rest.is_parted for rest in self._rows.values())

    @property
    def wait_s(self) -> float:
        """What the link takes for all that it is to bring now."""
        return self.load_block_s * sum(len(self._rows[row].slots) for row in (*self._queue, *self._arriving_rows()))

    @property
    def is_idle(self) -> bool:
        """Whether the link could bring what a row has parted with, and none wants it."""
        return not self._queue and self._arriving < self._loads_at_once

    def has_use_for(self, row: Row) -> bool:
        """Whether the host should have a whole row's KV: as many as may part, and one to see what the link takes."""
        if self.always or row.rest is not None:
            return True
        return len(self._rows) < (self.most_parted + SPARE_COPIES if self.most_parted else not self.load_block_s)

    def may_part(self, rows: int) -> bool:
        """Whether so many rows more may part to make room for others."""
        away = sum(rest.is_parted or rest.is_leased or rest.is_leaving for rest in self._rows.values())
        return self.always or away + rows <= self.most_parted

    @property
    def leaving(self) -> int:
        """Whole rows that part as soon as no step is computing them."""
        return sum(rest.is_leaving for rest in self._rows.values())

    @property
    def total_blocks(self) -> int:
        """Blocks that the host can hold."""
        return self._store.total

    @property
    def used_bytes(self) -> int:
        """Of the host's memory."""
        return (self._store.total - self._store.free) * self._store.block_bytes

    @property
    def total_bytes(self) -> int:
        """Of the host's memory that may be used."""
        return self._store.total * self._store.block_bytes

    @property
    def staging(self) -> int:
        """Blocks that must stay obtainable for the longest of the parted rows to be whole again at times: those that
        keep the link busy."""
        return self._staging([])

    def holders(self) -> Iterator[list[BlockId]]:
        """Blocks that are held for parted rows and are not theirs yet, for `BlockPool.check`."""
        return (rest.arriving for rest in self._rows.values())

    # The host's copy

    def keep(self, row: Row) -> None:
        """A whole row has got a small cache anew: have the host hold all full blocks before that one's tail."""
        drafting = row.drafting
        if drafting is None or drafting.cache is None or not _drafts(row) or not self.has_use_for(row):
            return
        rest = row.rest
        first = 0 if rest is None else len(rest.slots)
        blocks = row.blocks[first : drafting.cache.tail_start // self._kv.page_size]
        if not blocks:
            return
        if len(blocks) > self._store.free:
            self.counters.refused += 1
            return
        slots, saving = self._store.save(blocks)
        if rest is None:
            row.rest = rest = self._rows[row] = Rest([], Position(0), saving)
        rest.slots += slots
        rest.stop, rest.saving = Position(len(rest.slots) * self._kv.page_size), saving
        self.counters.saved_blocks += len(blocks)
        self._note_moved(row, len(blocks))

    def forget(self, row: Row) -> None:
        """A row's memory is taken: the host's part of it, too."""
        rest = self._rows.pop(row, None)
        if rest is None:
            return
        self._queue.pop(row, None)
        if rest.loading is not None:
            rest.loading.settle()
        self._kv.prefix.release(rest.arriving)
        self._store.give_back(rest.slots)
        row.rest = None

    # Parting

    def part_one(self) -> bool:
        """Make room by parting the row that came last, of those that can; False: there is none."""
        victim = next((row for row in self._partable() if is_between_steps(row)), None)
        if victim is not None:
            self._part(victim)
        return victim is not None

    def ask_one_to_part(self) -> bool:
        """Make room by and by: have the row that came last part, of those that can, as soon as no step is computing it.

        Returns:
            False, and nothing done, where there is none. True also where one has been asked already.
        """
        if not self.leaving:
            victim = next(self._partable(), None)
            if victim is not None:
                self._leave(victim)
        return self.leaving > 0

    def part_for(self, blocks: int) -> bool:
        """Part rows, so that as many blocks become obtainable and what parted rows need besides.

        Returns:
            False where so many may not part, there are not enough, or a step is still computing some of them.
        """
        if self.leaving or not self.may_part(1):
            return False
        victims: list[Row] = []
        obtainable = self._kv.obtainable
        for row in self._partable():
            if obtainable >= blocks + self._staging(victims):
                break
            victims.append(row)
            obtainable += self._frees(row)
        if not victims or obtainable < blocks + self._staging(victims) or not self.may_part(len(victims)):
            return False
        for row in victims:
            self._leave(row)
        return not self.leaving

    # Coming back

    def want(self, row: Row) -> None:
        """A parted row would be whole, in its turn."""
        rest = self._rows[row]
        if rest.is_parted and not rest.arriving:
            self._queue.setdefault(row)

    def take_back(self) -> None:
        """Between two steps: rows whose blocks have come are whole; those that were verified part again for others.

        Where the next in the queue has room without, they stay whole: they can part at any time.
        """
        for row, rest in self._rows.items():
            if not self.load_block_s and rest.saving.is_done:  # the link is as fast in the other direction
                self.load_block_s = rest.saving.seconds / len(rest.slots)
            if rest.arriving:
                if rest.loading is None or rest.loading.is_done:
                    self._arrive(row, rest)
            elif rest.is_leaving:
                self._leave(row)
            elif rest.is_leased and rest.is_verified and is_between_steps(row):
                rest.is_leased = rest.is_verified = False
                head = next(iter(self._queue), None)
                if head is not None and self.blocks_to_load(head) > self._kv.obtainable and self._can_part(row):
                    self._leave(row)

    def load(self, spare: int) -> Row | None:
        """Have the next rows of the queue get their blocks, as far as there is room.

        Args:
            spare: blocks to leave obtainable.

        Returns:
            A row that nothing will make room for by itself, as no other row is whole for a while.
        """
        while self._queue and self._arriving < self._loads_at_once:
            row = next(iter(self._queue))
            if not self.load_row(row, spare):
                is_left = self.ask_one_to_part()
                if is_left or self._arriving or any(rest.is_leased for rest in self._rows.values()):
                    return None
                return row
        return None

    def load_row(self, row: Row, spare: int = 0) -> bool:
        """Give a parted row blocks, and begin to fill them; False when there is no room."""
        rest, prefix = self._rows[row], self._kv.prefix
        count = len(rest.slots)
        keys = row.full_block_keys(self._kv.page_size)[:count] if prefix.enabled else []
        hits = prefix.lookup(keys) if keys else [None] * count
        found = [hit for hit in hits if hit is not None]
        prefix.acquire(found)
        missing = [slot for slot, hit in zip(rest.slots, hits, strict=True) if hit is None]
        if len(missing) + spare > self._kv.obtainable:
            prefix.release(found)
            return False
        self._kv.make_room(len(missing))
        fresh = self._kv.pool.take(len(missing))
        blocks = iter(fresh)
        rest.arriving = [next(blocks) if hit is None else hit for hit in hits]
        rest.loading = self._store.load(missing, fresh, rest.saving) if missing else None
        rest.loading_blocks = len(missing)
        self._queue.pop(row, None)
        self.counters.loaded_blocks += len(missing)
        self.counters.found_blocks += len(found)
        self._note_moved(row, len(missing))
        row.request.recount_blocks()
        return True

    def blocks_to_load(self, row: Row) -> int:
        """Blocks that a parted row needs at the most."""
        return len(self._rows[row].slots)

    def wait(self) -> bool:
        """Until the first of the blocks that are being copied are there; False: there are none."""
        loading = next((rest.loading for rest in self._rows.values() if rest.arriving), None)
        if loading is not None:
            loading.wait()
        return loading is not None

    # Parts of these

    @property
    def _loads_at_once(self) -> int:
        longest = max((len(rest.slots) for rest in self._rows.values()), default=0)
        return loads_at_once(longest, self._kv.pool.total)

    @property
    def _arriving(self) -> int:
        return len(self._arriving_rows())

    def _arriving_rows(self) -> list[Row]:
        return [row for row, rest in self._rows.items() if rest.arriving]

    def _arrive(self, row: Row, rest: Rest) -> None:
        if rest.loading is not None:
            seconds = rest.loading.seconds / rest.loading_blocks
            self.load_block_s = seconds if not self.load_block_s else 0.9 * self.load_block_s + 0.1 * seconds
        prefix = self._kv.prefix
        keys = row.full_block_keys(self._kv.page_size)[: len(rest.slots)] if prefix.enabled else []
        for index, (key, block) in enumerate(zip(keys, rest.arriving, strict=False)):
            prefix.insert(key, block, index)  # found again when the row comes back, as long as no one needs the room
        row.blocks = rest.arriving + row.blocks
        rest.arriving, rest.loading, rest.is_parted = [], None, False
        rest.is_leased = True
        row.request.recount_blocks()

    def _leave(self, row: Row) -> None:
        """Part a row as soon as that can be."""
        rest, drafting = self._rows[row], row.drafting
        assert drafting is not None
        if drafting.cache is None:  # it has been given up since
            rest.is_leaving = False
        elif is_between_steps(row) and rest.saving.is_done:  # it may have got a small cache anew, with more to save
            self._part(row)
        else:
            rest.is_leaving = True

    def _part(self, row: Row) -> None:
        rest = self._rows[row]
        rest.is_leaving = False
        given_up = row.blocks[: len(rest.slots)]
        row.blocks = row.blocks[len(rest.slots) :]
        rest.is_parted, rest.is_leased, rest.is_verified = True, False, False
        self._kv.prefix.release(given_up)
        self.counters.partings += 1
        row.request.recount_blocks()

    def _partable(self) -> Iterator[Row]:
        """Rows that can part and make room by it, once no step computes them; the last that came first."""
        rows = [row for row, rest in self._rows.items() if not rest.is_leased and self._can_part(row)]
        rows.sort(key=lambda row: row.request.number, reverse=True)
        return (row for row in rows if self._frees(row))

    def _can_part(self, row: Row) -> bool:
        rest, drafting = self._rows[row], row.drafting
        assert drafting is not None
        if drafting.cache is None or drafting.record.acceptance.probability < self.least_acceptance:
            return False
        return not (rest.is_parted or rest.is_leaving) and row.is_running and rest.saving.is_done

    def _frees(self, row: Row) -> int:
        references = self._kv.pool.references
        return sum(references(block) == 1 for block in row.blocks[: len(self._rows[row].slots)])

    def _staging(self, parting: Sequence[Row]) -> int:
        """What `staging` is once some rows more have parted."""
        needs = [len(rest.slots) for row, rest in self._rows.items() if rest.is_parted or row in parting]
        held = sum(len(rest.slots) for rest in self._rows.values() if rest.arriving or rest.is_leased)
        return max(0, sum(sorted(needs)[-self._loads_at_once :]) - held)

    def _note_moved(self, row: Row, blocks: int) -> None:
        usage = row.request.kv_usage
        assert usage is not None
        usage.moved_bytes += blocks * self._store.block_bytes


def _drafts(row: Row) -> bool:
    """Whether the request does not say that nothing is to be drafted."""
    params = row.request.kv_cache
    return params is not None and params.draft_tokens != 0


def is_between_steps(row: Row) -> bool:
    """Whether no step that was planned reads or writes the row, which has its last token to compute."""
    return row.is_running and row.missing_tokens == 1 and not row.pending and not row.is_due

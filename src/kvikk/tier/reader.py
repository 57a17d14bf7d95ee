"""The way in: blocks that rows ask for, from the host's memory and then from the outer store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import takewhile
from queue import SimpleQueue
from typing import Final

from kvikk.tier.breaker import Breaker
from kvikk.tier.host import HostStore
from kvikk.tier.journal import Journal
from kvikk.tier.keeper import Keeper, start_thread
from kvikk.tier.record import BadRecord, block_of, unpack
from kvikk.tier.store import Store
from kvikk.tier.ticket import Arrival, Staged, Ticket
from kvikk.types import BlockKey

OUTSIDE_THREADS: Final = 4
"""That read the outer store, so that one slow answer does not hold up all rows."""
CHUNK_BYTES: Final = 4 * 2**20
"""Of blocks that are asked for at once: what has come can be used before the rest is there."""


class Reader:
    """Answers tickets: on one thread what the host's memory has, on others the rest.

    Args:
        layout: of a block's bytes, in words; records of another one are no good.
        block_bytes: bytes of a block.
        host: None: none.
        outer: None: none.
        keeper: knows what is spoilt and what is on its way out, and deletes what is no good.
        stage: copies a block's bytes to where the pool can take them from; waits for room up to so many seconds, and
            gives None when there is none.
        journal: told of what is damaged, late, and fails.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        layout: str,
        block_bytes: int,
        host: HostStore | None,
        outer: Store | None,
        keeper: Keeper,
        stage: Callable[[memoryview, float], Staged | None],
        journal: Journal,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._chunk = max(1, CHUNK_BYTES // block_bytes)
        self._host, self._outer = host, outer
        self._keeper = keeper
        self._stage = stage
        self._journal = journal
        self._clock = clock
        self._breaker = Breaker(clock)
        self._news = threading.Event()
        self._to_read: SimpleQueue[Ticket | None] = SimpleQueue()
        self._to_read_outside: SimpleQueue[Ticket | None] = SimpleQueue()
        self.threads = [start_thread(self._read_host)] if host is not None else []
        if outer is not None:
            self.threads += [start_thread(self._read_outside) for _ in range(OUTSIDE_THREADS)]

    @property
    def pause_s(self) -> float:
        """How long the outer store is not being read; 0: all is well."""
        return self._breaker.pause_s

    def fetch(self, keys: Sequence[BlockKey], timeout_s: float) -> Ticket:
        """Ask for blocks; see `PrefixTier.fetch`."""
        ticket = Ticket(keys, self._clock() + timeout_s, self._news)
        if self._host is not None and (self._host.contains(keys[0]) or self._keeper.is_leaving(keys[0])):
            self._to_read.put(ticket)
        else:
            self._go_outside(ticket)
        return ticket

    def give_up(self, ticket: Ticket) -> None:
        """A ticket has taken too long. A store that had nothing for it by now is left alone."""
        if not ticket.close():
            return
        self._journal.count("late")
        if ticket.is_outside and not ticket.outside_arrivals and self._breaker.note_failure():
            self._journal.warn(
                "late", "the prefix tier's store gave nothing in time, next try in %.0f s", self._breaker.pause_s
            )

    def wait(self, timeout_s: float) -> None:
        """Until something has come for any ticket; for the one thread that takes it."""
        self._news.wait(timeout_s)
        self._news.clear()

    def stop(self) -> None:
        """End the threads."""
        self._to_read.put(None)
        for _ in range(OUTSIDE_THREADS):
            self._to_read_outside.put(None)

    # Threads

    def _read_host(self) -> None:
        assert self._host is not None
        while (ticket := self._to_read.get()) is not None:
            while keys := self._next_keys(ticket):
                self._keeper.wait_for(keys, ticket.until_s - self._clock())
                records = list(takewhile(bool, self._unspoilt(keys, self._host.get(keys))))
                for key, record in zip(keys, records, strict=False):
                    self._hand_over(ticket, key, block_of(record or b"", self._layout), is_outside=False)
                if len(records) < len(keys):
                    break
            if ticket.is_wanted(self._clock()):
                self._go_outside(ticket)

    def _go_outside(self, ticket: Ticket) -> None:
        """Have the rest of a ticket read from the outer store, if there is a rest and a store that may be asked."""
        if self._outer is None or not ticket.left(1) or not self._breaker.allows():
            ticket.finish()
            return
        ticket.is_outside = True
        self._to_read_outside.put(ticket)

    def _read_outside(self) -> None:
        while (ticket := self._to_read_outside.get()) is not None:
            while keys := self._next_keys(ticket):
                if not self._read_chunk(ticket, keys):
                    ticket.finish()
            if not ticket.left(1):
                ticket.finish()
            if self._host is not None:
                self._host.get(ticket.keys)  # they have come from start to end: make the start the youngest again

    def _next_keys(self, ticket: Ticket) -> Sequence[BlockKey]:
        return ticket.left(self._chunk) if ticket.is_wanted(self._clock()) else ()

    def _read_chunk(self, ticket: Ticket, keys: Sequence[BlockKey]) -> bool:
        """Hand over what the outer store has of these. False when it lacks one: nothing behind that comes."""
        try:
            records = self._get_outside(ticket, keys)
        except Exception as error:
            is_pause = self._breaker.note_failure()
            self._journal.note_failure("reading from", error, self._breaker.pause_s if is_pause else None)
            return False
        if ticket.is_wanted(self._clock()):  # an answer that comes too late is no success
            self._breaker.note_success()
        for key, record in zip(keys, records, strict=True):
            block = None if record is None else self._checked(key, record)
            if record is None or block is None:
                return False
            if self._host is not None:
                self._host.put(key, record)
            self._hand_over(ticket, key, block, is_outside=True)
        return True

    def _get_outside(self, ticket: Ticket, keys: Sequence[BlockKey]) -> list[bytes | None]:
        """What the outer store has, or will have when all that was offered has been written."""
        assert self._outer is not None
        self._keeper.wait_for(keys, ticket.until_s - self._clock())
        records = self._keeper.being_written(keys)
        if None in records:  # what is written between the two looks is found at both places
            both = zip(records, self._outer.get(keys), strict=True)
            records = [here or there for here, there in both]
        return self._unspoilt(keys, records)

    def _unspoilt(self, keys: Sequence[BlockKey], records: Sequence[bytes | None]) -> list[bytes | None]:
        both = zip(keys, records, strict=True)
        return [None if self._keeper.is_spoilt(key) else record for key, record in both]

    def _hand_over(self, ticket: Ticket, key: BlockKey, block: memoryview, *, is_outside: bool) -> None:
        """Stage a block for a ticket, if there is room in time and someone still waits for it."""
        now = self._clock()
        staged = self._stage(block, ticket.until_s - now) if ticket.is_wanted(now) else None
        if staged is not None:
            ticket.add(Arrival(key, staged, is_outside))

    def _checked(self, key: BlockKey, record: bytes) -> memoryview | None:
        """A record's block; None, and the record is deleted, where it is no good."""
        try:
            return unpack(record, key, self._layout)
        except BadRecord as error:
            self._journal.count("damaged")
            text = "a record of the prefix tier was no good and is deleted: block %s: %s"
            self._journal.warn("damaged", text, key.hex(), error)
            self._keeper.forget([key])
            return None

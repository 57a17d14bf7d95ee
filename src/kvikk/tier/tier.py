"""The tier: takes blocks that leave the pool, and brings them back, on threads of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from kvikk.tier.host import HostStore
from kvikk.tier.journal import Journal, TierCounters
from kvikk.tier.keeper import Keeper, Leaving
from kvikk.tier.reader import Reader
from kvikk.tier.store import Store
from kvikk.tier.ticket import Staged, Ticket
from kvikk.types import BlockKey

logger = logging.getLogger(__name__)


class PrefixTier:
    """Blocks by key in the host's memory, and behind it in an outer store.

    What leaves the pool goes to the host's memory and is *written through* to the outer store: a process that is
    killed leaves its blocks to the next one, and engines that share a store find each other's at once. What comes from
    the outer store stays in the host's memory, too.

    No method waits for a store, and none fails because of one. An outer store that fails, or gives nothing in the time
    that rows can wait, is left alone for a growing while (`Breaker`), for reading and for writing each by itself.

    Args:
        layout: of a block's bytes, in words; records of another one are no good.
        block_bytes: bytes of a block.
        host: None: none.
        outer: the store behind it; None: none.
        stage: copies a block's bytes to where the pool can take them from; called on threads, waits for room up to so
            many seconds, and gives None when there is none.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        layout: str,
        block_bytes: int,
        host: HostStore | None,
        outer: Store | None,
        stage: Callable[[memoryview, float], Staged | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._outer = host, outer
        self._clock = clock
        self._journal = Journal(clock)
        self._keeper = Keeper(layout, block_bytes, host, outer, self._journal, clock)
        self._reader = Reader(layout, block_bytes, host, outer, self._keeper, stage, self._journal, clock)

    @property
    def counters(self) -> TierCounters:
        """As they are now."""
        return self._journal.counters

    @property
    def host_bytes(self) -> int:
        """Of the records in the host's memory."""
        return 0 if self._host is None else self._host.size_bytes

    @property
    def pause_s(self) -> float:
        """How long the outer store is being left alone, for reading or writing; 0: it is not."""
        return max(self._reader.pause_s, self._keeper.pause_s)

    @property
    def outlives_us(self) -> bool:
        """Whether there is a store that another process finds as this one left it."""
        return self._outer is not None

    # Out

    @property
    def is_idle(self) -> bool:
        """Whether all that was offered has been taken in and written, or dropped."""
        return self._keeper.is_idle

    @property
    def is_busy(self) -> bool:
        """Whether what is offered now might be dropped."""
        return self._keeper.is_busy

    def wants(self, key: BlockKey) -> bool:
        """Whether a block that leaves the pool is worth its copy: it is not here already, and could be kept."""
        return self._keeper.wants(key)

    def offer(self, key: BlockKey, leaving: Leaving) -> None:
        """Take in a block that leaves the pool."""
        self._keeper.offer(key, leaving)

    def note_dropped(self, blocks: int) -> None:
        """So many blocks have left the pool without having been offered: there was no room to copy them to."""
        self._journal.note_dropped(blocks)

    def forget(self, keys: Iterable[BlockKey]) -> None:
        """These blocks may be wrong: delete them everywhere, and give them out no more."""
        self._keeper.forget(keys)

    # In

    def fetch(self, keys: Sequence[BlockKey], timeout_s: float) -> Ticket:
        """Ask for blocks, which come in this order until one is found nowhere.

        Args:
            keys: at least one.
            timeout_s: after it nothing more comes.
        """
        return self._reader.fetch(keys, timeout_s)

    def give_up(self, ticket: Ticket) -> None:
        """A ticket has taken too long. What has come for it and was not taken is let go."""
        self._reader.give_up(ticket)

    def wait(self, timeout_s: float) -> None:
        """Until something has come for any ticket; for the one thread that takes it."""
        self._reader.wait(timeout_s)

    def close(self, flush_s: float) -> None:
        """Take in what was offered, for so many seconds at the most, and stop."""
        until_s = time.monotonic() + flush_s
        self._keeper.stop()
        self._reader.stop()
        for thread in (*self._keeper.threads, *self._reader.threads):
            thread.join(max(0.0, until_s - time.monotonic()))
        is_writing = any(thread.is_alive() for thread in self._keeper.threads)
        if is_writing and flush_s:
            logger.warning("the prefix tier had %.1f s to write what it was given, and did not finish", flush_s)
        is_reading = any(thread.is_alive() for thread in self._reader.threads)
        if self._outer is not None and not is_writing and not is_reading:
            self._outer.close()

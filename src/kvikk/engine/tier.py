"""The prefix tier at work in the engine: evicted blocks go out, blocks that waiting rows lack come in."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvikk.engine.kv import KVMemory
from kvikk.engine.prompt_speed import PromptSpeed
from kvikk.engine.request import Row
from kvikk.geometry import KVGeometry
from kvikk.memory import BlockTransfer, KVStore, check_host_memory
from kvikk.tier import Arrival, PrefixTier, Ticket, TierConfig, TierCounters
from kvikk.types import BlockId, BlockKey

BLOCKS_A_STEP: Final = 256
"""Of a row that are copied in between two steps: the others' next tokens wait for it."""
IDLE_WAIT_S: Final = 0.002
"""How long the engine sleeps when all it could do is wait for the tier; new requests come in between."""
FLUSH_S: Final = 3.0
"""For writing what is cached when the engine ends: a server waits 5 s for it."""


logger = logging.getLogger(__name__)


class Transfer(Protocol):
    """Copies blocks in and out of the pool: `memory.BlockTransfer`, or a simulation of it."""

    def copy_out(self, blocks: Sequence[BlockId]) -> Sequence[Any]:
        """Start to copy blocks to the host: the first of these, as many as there is room for."""
        ...

    def copy_in(self, blocks: Sequence[tuple[Any, BlockId]]) -> None:
        """Copy what the tier staged into the pool."""
        ...


@dataclass(slots=True)
class TierStats:
    """The tier as it stands; all but the last two only grow.

    Args:
        queries: tokens that were asked of it.
        host_hits: tokens that came back from the host's memory.
        store_hits: tokens that came back from the outer store.
        stored, written, dropped, damaged, failures, late: see `TierCounters`.
        host_bytes: held in the host's memory.
        pause_s: how long the outer store is being left alone.
    """

    queries: int = 0
    host_hits: int = 0
    store_hits: int = 0
    stored: int = 0
    written: int = 0
    dropped: int = 0
    damaged: int = 0
    failures: int = 0
    late: int = 0
    host_bytes: int = 0
    pause_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Load:
    """What a waiting row has asked for.

    Args:
        ticket: its blocks.
        positions: where in the row each of them belongs, in blocks.
        blocks: of the row, those that are cached and those that no one has included.
        until_s: then it is computed.
        is_over: the row waits no more. It is not asked for again until the row has run.
    """

    ticket: Ticket
    positions: dict[BlockKey, int]
    blocks: int
    until_s: float
    is_over: bool = False


class EngineTier:
    """Asks the tier for what waiting rows lack, and puts what comes into the prefix cache, where the rows find it.

    A block that comes back is a cached block like any other: it takes room as a row's own would, by eviction, and never
    from a running row. While a row waits it claims the blocks it asked for, so that others wait for the same blocks
    rather than ask again.

    Args:
        tier: the places and their threads.
        transfer: copies blocks.
        kv: the pool and the prefix cache.
        timeout_s: how long a row waits, at the most.
        clock: seconds, monotonic.
    """

    def __init__(
        self, tier: PrefixTier, transfer: Transfer, kv: KVMemory, *, timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._tier = tier
        self._transfer = transfer
        self._kv = kv
        self._prefix = kv.prefix
        self._timeout_s = timeout_s
        self._clock = clock
        self.speed = PromptSpeed(clock)
        """Bounds how long rows wait."""
        self._loads: dict[Row, _Load] = {}
        self._queries = self._host_hits = self._store_hits = 0
        self._end_threads = weakref.finalize(self, tier.close, 0.0)  # they keep the pool alive
        self._prefix.on_evict = self._take_out
        self._prefix.on_spoil = tier.forget

    @property
    def stats(self) -> TierStats:
        """As it stands."""
        counters: TierCounters = self._tier.counters
        return TierStats(
            queries=self._queries,
            host_hits=self._host_hits,
            store_hits=self._store_hits,
            stored=counters.stored,
            written=counters.written,
            dropped=counters.dropped,
            damaged=counters.damaged,
            failures=counters.failures,
            late=counters.late,
            host_bytes=self._tier.host_bytes,
            pause_s=self._tier.pause_s,
        )

    # Out

    def _take_out(self, evicted: Sequence[tuple[BlockKey, BlockId]]) -> None:
        """Blocks are about to be given away: copy those that the tier lacks.

        A sequence's end is evicted before its start, and is worth less: it goes without when there is no room, and is
        offered first, so that stores find it older.
        """
        wanted = [(key, block) for key, block in reversed(evicted) if self._tier.wants(key)]
        leaving = self._transfer.copy_out([block for _, block in wanted]) if wanted else ()
        for (key, _), copy in reversed(list(zip(wanted, leaving, strict=False))):
            self._tier.offer(key, copy)
        if len(leaving) < len(wanted):
            self._tier.note_dropped(len(wanted) - len(leaving))

    # In

    def load(self, row: Row, keys: Sequence[BlockKey], hits: Sequence[BlockId | None]) -> bool:
        """A waiting row could be started, with these blocks of its keys cached: ask for the others.

        Returns:
            Whether the row has to be passed over until they are there.
        """
        missing = {key: index for index, (key, hit) in enumerate(zip(keys, hits, strict=True)) if hit is None}
        if row in self._loads or not missing:
            return False
        tokens = len(missing) * self._kv.page_size
        timeout_s = self.speed.bound(self._timeout_s, tokens)
        self._queries += tokens
        found = [hit for hit in hits if hit is not None]
        self._prefix.acquire(found)  # used now: what comes in shall not push them out
        self._prefix.release(found)
        blocks = -(-len(row.tokens) // self._kv.page_size)
        load = _Load(self._tier.fetch(list(missing), timeout_s), missing, blocks, self._clock() + timeout_s)
        self._loads[row] = load
        self._prefix.claim(missing, row)
        if load.ticket.is_spent:
            self._end(row, load)
        return not load.is_over

    @property
    def awaited_blocks(self) -> int:
        """Blocks that rows will need which wait for the tier: others that pass them leave these alone."""
        return sum(load.blocks for load in self._loads.values() if not load.is_over)

    def is_loading(self, row: Row) -> bool:
        """Whether a waiting row has to be passed over, since blocks that it asked for may still come."""
        load = self._loads.get(row)
        return load is not None and not load.is_over

    def bring_in(self) -> None:
        """Put what has come into the prefix cache, and give up what comes too late."""
        blocks = BLOCKS_A_STEP
        for row, load in self._loads.items():
            if not load.is_over:
                blocks -= self._bring_in(row, load, blocks)

    def forget(self, row: Row) -> None:
        """A row has been started, or has ended: it waits for nothing."""
        load = self._loads.pop(row, None)
        if load is not None and not load.is_over:
            load.ticket.close()
            self._end(row, load)

    def wait(self) -> bool:
        """Sleep a little when rows wait for the tier; False: none does."""
        if not any(map(self.is_loading, self._loads)):
            return False
        self._tier.wait(IDLE_WAIT_S)
        return True

    def _bring_in(self, row: Row, load: _Load, blocks: int) -> int:
        """Take up to so many blocks that have come for a row. Returns how many those were."""
        arrivals = load.ticket.take(blocks)
        self._place(load, arrivals)
        is_late = self._clock() >= load.until_s
        if is_late:
            self._tier.give_up(load.ticket)
        if is_late or load.ticket.is_spent:
            self._end(row, load)
        return len(arrivals)

    def _place(self, load: _Load, arrivals: list[Arrival]) -> None:
        """Copy blocks into the pool and index them; those for which there is no room are let go."""
        wanted: list[Arrival] = []
        for arrival in arrivals:
            is_cached = self._prefix.lookup([arrival.key]) != [None]
            if is_cached or len(wanted) == self._kv.obtainable:
                arrival.staged.release()
            else:
                wanted.append(arrival)
        if not wanted:
            return
        self._kv.make_room(len(wanted))
        blocks = self._kv.pool.take(len(wanted))
        try:
            both = list(zip(wanted, blocks, strict=True))
            self._transfer.copy_in([(arrival.staged, block) for arrival, block in both])
            for arrival, block in both:
                self._prefix.insert(arrival.key, block, load.positions[arrival.key])
                self._count(arrival)
        finally:
            self._prefix.release(blocks)

    def _count(self, arrival: Arrival) -> None:
        if arrival.is_outside:
            self._store_hits += self._kv.page_size
        else:
            self._host_hits += self._kv.page_size

    def _end(self, row: Row, load: _Load) -> None:
        load.is_over = True
        self._prefix.unclaim(load.positions, row)

    def close(self) -> None:
        """Write what is cached to the outer store, so that the next engine finds it, and end the tier's threads."""
        self._end_threads.detach()
        until_s = time.monotonic() + FLUSH_S
        entries = self._prefix.entries() if self._tier.outlives_us else []
        for key, block in entries:
            if not self._tier.wants(key):
                continue
            leaving: Sequence[Any] = ()
            while time.monotonic() < until_s and not leaving:
                leaving = () if self._tier.is_busy else self._transfer.copy_out([block])
                if not leaving:
                    time.sleep(IDLE_WAIT_S)
            for copy in leaving:
                self._tier.offer(key, copy)
        self._tier.close(max(0.0, until_s - time.monotonic()))


def tier_maker(config: TierConfig, store: KVStore) -> Callable[[KVMemory, Callable[[], float]], EngineTier] | None:
    """What gives an engine its tier; None: it has none.

    Raises:
        ConfigError: there is not so much memory, a library is missing, or a url is not understood.
    """
    if not config.is_on:
        return None
    if config.prefix_tier_memory is not None:
        check_host_memory("--prefix-tier-memory", config.prefix_tier_memory, config.memory_bytes)
    host, outer = config.open_stores()
    logger.info("prefix tier: %s", config)

    def make(kv: KVMemory, clock: Callable[[], float]) -> EngineTier:
        transfer = BlockTransfer(store, kv.pool.total)
        tier = PrefixTier(layout_of(store.geometry), store.geometry.block_bytes, host, outer, transfer.stage)
        return EngineTier(tier, transfer, kv, timeout_s=config.prefix_tier_timeout, clock=clock)

    return make


def layout_of(geometry: KVGeometry) -> str:
    """How a block's bytes are laid out, in words: records of other words are not read."""
    heads = ",".join(map(str, geometry.kv_heads))
    return f"{geometry.format}; {geometry.page_size} tokens; {geometry.head_dim} wide; KV heads {heads}"

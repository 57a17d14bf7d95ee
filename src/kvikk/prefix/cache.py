"""The prefix cache: which blocks hold the KV of which prefix, hits with holes included."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from kvikk.errors import PinRefused, PoolCorrupt
from kvikk.memory import BlockPool
from kvikk.prefix.eviction import Eviction
from kvikk.types import BlockId, BlockKey

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PrefixCounters:
    """Tokens and blocks since the start; only ever grow.

    `queries` and `hits` are of new requests: `hits / queries` is the hit rate. A row that was preempted and comes back
    counts in `resumed` (found again in the cache) and `recomputed`, never in hits.
    """

    queries: int = 0
    hits: int = 0
    resumed: int = 0
    recomputed: int = 0
    inserted_blocks: int = 0
    evicted_blocks: int = 0


class PrefixCache:
    """Maps block keys to blocks, and gives room back to the pool by eviction.

    A key covers a whole prefix, so a hit after a miss is as exact as one before it: look-up does not stop at the
    first miss, and cached blocks need no cached ancestors. The cache holds no references: a cached block may be
    evicted at any time unless a row or a pin holds it.

    Args:
        pool: where the blocks come from.
        eviction: which cached block goes first.
        clock: seconds; passed on to `eviction`.
        pinnable_blocks: how many blocks pins may hold in all.
        enabled: when False nothing is ever inserted, and every look-up misses.

    Attributes:
        on_evict: told of blocks that go to make room, the first to go first, while they still hold what their keys say.
        on_spoil: told of keys whose blocks may hold something else.
    """

    def __init__(
        self,
        pool: BlockPool,
        eviction: Eviction,
        clock: Callable[[], float],
        *,
        pinnable_blocks: int,
        enabled: bool = True,
    ) -> None:
        self.pool = pool
        self.counters = PrefixCounters()
        self.pinnable_blocks = pinnable_blocks
        self._eviction = eviction
        self._clock = clock
        self.enabled = enabled
        self.on_evict: Callable[[Sequence[tuple[BlockKey, BlockId]]], None] | None = None
        self.on_spoil: Callable[[Sequence[BlockKey]], None] | None = None
        self._block_of: dict[BlockKey, BlockId] = {}
        self._key_of: dict[BlockId, BlockKey] = {}
        self._claims: dict[BlockKey, Hashable] = {}
        self._pins: dict[str, list[BlockId]] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    # Look-up and use

    def lookup(self, keys: Sequence[BlockKey]) -> list[BlockId | None]:
        """The block of each key, None where it is not cached. Takes no reference and counts nothing."""
        return [self._block_of.get(key) for key in keys]

    def acquire(self, blocks: Sequence[BlockId]) -> None:
        """Take a reference to cached or held blocks: they cannot be evicted until `release`."""
        self.pool.share(blocks)
        now = self._clock()
        for block in blocks:
            if block in self._key_of:
                self._eviction.on_access(block, now)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Give up a row's references, from its end to its start."""
        now = self._clock()
        for block in self.pool.release(reversed(blocks)):
            self._eviction.on_release(block, now)

    def insert(self, key: BlockKey, block: BlockId, position: int) -> None:
        """Index a held block that is full and computed. A key that is there already keeps its block."""
        if not self.enabled or key in self._block_of:
            return
        self.pool.keep(block)
        self._block_of[key] = block
        self._key_of[block] = key
        self._eviction.on_insert(block, position, self._clock())
        self.counters.inserted_blocks += 1

    # Blocks that are being computed

    def claim(self, keys: Iterable[BlockKey], owner: Hashable) -> None:
        """Say that `owner` is about to compute these blocks; others that need them wait."""
        if self.enabled:
            for key in keys:
                self._claims.setdefault(key, owner)

    def is_claimed(self, keys: Iterable[BlockKey]) -> bool:
        """Whether someone is computing one of these blocks."""
        return any(key in self._claims for key in keys)

    def unclaim(self, keys: Iterable[BlockKey], owner: Hashable) -> None:
        """Withdraw `owner`'s claims on these keys: computed, or given up."""
        for key in keys:
            if self._claims.get(key) == owner:
                del self._claims[key]

    # Room

    def make_room(self, blocks: int) -> bool:
        """Evict until the pool has `blocks` free; False, and nothing evicted, when that cannot be."""
        missing = blocks - self.pool.free
        if missing <= 0:
            return True
        if missing > self.pool.cached:
            return False
        victims = self._eviction.evict(missing)
        if len(victims) != missing:
            raise PoolCorrupt(f"{self.pool.cached} blocks are cached, the eviction policy named {len(victims)}")
        self._tell_evicted(victims)
        self._drop(victims)
        logger.debug("evicted %d blocks, %d cached are left", missing, self.pool.cached)
        return True

    def reset(self) -> int:
        """Empty the cache; held blocks stay their rows' but are found no more. Returns how many were dropped."""
        return self._remove(list(self._key_of))

    def give_up(self, blocks: Sequence[BlockId]) -> None:
        """Take indexed blocks out for the sake of room, as an eviction does; those that are held stay their rows'."""
        self._tell_evicted(blocks)
        self._remove(blocks)

    def discard(self, blocks: Sequence[BlockId]) -> int:
        """Forget what these blocks hold, as it may be wrong; those that are held stay their rows'.

        Returns:
            How many were indexed.
        """
        indexed = [block for block in blocks if block in self._key_of]
        if self.on_spoil is not None:
            self.on_spoil([self._key_of[block] for block in indexed])
        return self._remove(indexed)

    def entries(self) -> list[tuple[BlockKey, BlockId]]:
        """All keys and their blocks, in the order in which they were indexed."""
        return list(self._block_of.items())

    def _tell_evicted(self, blocks: Sequence[BlockId]) -> None:
        if self.on_evict is not None:
            self.on_evict([(self._key_of[block], block) for block in blocks])

    def _remove(self, blocks: Sequence[BlockId]) -> int:
        for block in blocks:
            self._eviction.on_remove(block)
        self._drop(blocks)
        return len(blocks)

    def _drop(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            del self._block_of[self._key_of.pop(block)]
            self.pool.forget(block)
        self.counters.evicted_blocks += len(blocks)

    # Pins

    @property
    def pinned(self) -> int:
        """Blocks held by pins."""
        return len({block for blocks in self._pins.values() for block in blocks})

    def pins(self) -> dict[str, int]:
        """The blocks that each pin holds."""
        return {name: len(blocks) for name, blocks in self._pins.items()}

    def pin(self, name: str, keys: Sequence[BlockKey]) -> int:
        """Keep these blocks, where they are cached now, until `unpin(name)`. Returns how many are held.

        Pinning a name again replaces it.

        Raises:
            PinRefused: pins would hold more than `pinnable_blocks`; nothing changed.
        """
        blocks = [block for block in self.lookup(keys) if block is not None]
        others = {block for other, pinned in self._pins.items() if other != name for block in pinned}
        wanted = len(others | set(blocks))
        if wanted > self.pinnable_blocks:
            raise PinRefused(
                f"pin {name!r} would bring the pinned blocks to {wanted}, the limit is {self.pinnable_blocks} "
                "(the rest is kept for a request of the maximum length): unpin another, or raise --kv-memory"
            )
        self.acquire(blocks)
        self.unpin(name)
        self._pins[name] = blocks
        return len(blocks)

    def unpin(self, name: str) -> bool:
        """Let a pin go; False when there was none of that name."""
        blocks = self._pins.pop(name, None)
        if blocks is None:
            return False
        self.release(blocks)
        return True

    # Checking

    def holders(self) -> list[list[BlockId]]:
        """The block lists of all pins, for `BlockPool.check`."""
        return list(self._pins.values())

    def check(self) -> None:
        """Recount the index against the pool.

        Raises:
            PoolCorrupt: the first disagreement found.
        """
        if {key: block for block, key in self._key_of.items()} != self._block_of:
            raise PoolCorrupt("the prefix index disagrees with itself")
        kept = sum(self.pool.is_kept(BlockId(b)) for b in range(self.pool.total + 1))
        if kept != len(self._key_of) or not all(map(self.pool.is_kept, self._key_of)):
            raise PoolCorrupt(f"{len(self._key_of)} blocks are indexed, the pool keeps {kept}")

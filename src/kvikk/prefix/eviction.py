"""Which cached block goes first when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from kvikk.types import BlockId


class Eviction(Protocol):
    """Listens to what happens to indexed blocks and names victims.

    A block is *evictable* between `on_release` and the next `on_access`. Times are seconds of one clock, passed in
    and never read here, so that a simulation can run it.
    """

    def on_insert(self, block: BlockId, position: int, now: float) -> None:
        """A held block entered the index; `position` is its index in its sequence, in blocks."""
        ...

    def on_access(self, block: BlockId, now: float) -> None:
        """A row took the block: it is not evictable until released."""
        ...

    def on_release(self, block: BlockId, now: float) -> None:
        """The last holder has gone: the block is evictable.

        The blocks of one row are released from its end to its start, so that ties favour the start.
        """
        ...

    def on_remove(self, block: BlockId) -> None:
        """The block left the index for another reason than `evict`."""
        ...

    def evict(self, blocks: int) -> list[BlockId]:
        """Name up to `blocks` evictable blocks, worst first, and forget them. Fewer only when there are no more."""
        ...


class LRU:
    """Least recently used: the block that was released longest ago goes first."""

    def __init__(self) -> None:
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()

    def on_insert(self, block: BlockId, position: int, now: float) -> None:
        """Nothing: a held block is not evictable."""

    def on_access(self, block: BlockId, now: float) -> None:
        """The block is in use."""
        self._evictable.pop(block, None)

    def on_release(self, block: BlockId, now: float) -> None:
        """The block goes to the young end."""
        self._evictable[block] = None
        self._evictable.move_to_end(block)

    def on_remove(self, block: BlockId) -> None:
        """Forget the block."""
        self._evictable.pop(block, None)

    def evict(self, blocks: int) -> list[BlockId]:
        """The oldest blocks."""
        count = min(blocks, len(self._evictable))
        return [self._evictable.popitem(last=False)[0] for _ in range(count)]

"""Who owns each block: free, held by rows, or cached. Counts only; the bytes lie in `storage`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvikk.errors import OutOfBlocks, PoolCorrupt
from kvikk.types import NULL_BLOCK, BlockId


class BlockPool:
    """Gives out blocks by reference count, all or nothing.

    A block is in exactly one of three states, and `free + held + cached = total`:

    - *held*: at least one reference; each holder releases its own once;
    - *cached*: no reference, but kept for its content (the prefix cache marked it with `keep`);
    - *free*: no reference and no worth; what it holds is garbage.

    The pool never evicts: ask `PrefixCache.make_room` first.

    Args:
        blocks: usable blocks; the null block comes on top and is never given out.
    """

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._references = [0] * (blocks + 1)
        self._kept = [False] * (blocks + 1)
        # Last freed is first given: its lines are the likeliest to be in a cache. Low ids come first in a new pool.
        self._free = [BlockId(b) for b in range(blocks, NULL_BLOCK, -1)]
        self._cached = 0

    @property
    def free(self) -> int:
        """Blocks that `take` can give at once."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks without a holder that are kept for their content."""
        return self._cached

    @property
    def held(self) -> int:
        """Blocks with at least one holder, each counted once however often it is shared."""
        return self.total - self.free - self.cached

    def references(self, block: BlockId) -> int:
        """Holders of a block."""
        return self._references[block]

    def is_kept(self, block: BlockId) -> bool:
        """Whether the block falls to *cached* rather than *free* when its last holder releases it."""
        return self._kept[block]

    def are_own(self, blocks: Sequence[BlockId]) -> list[bool]:
        """Of held blocks: whether they have one holder and are not kept, so that the holder may write to them."""
        references, kept = self._references, self._kept
        return [references[block] == 1 and not kept[block] for block in blocks]

    def take(self, blocks: int) -> list[BlockId]:
        """Reserve `blocks` free blocks with one reference each, all or none.

        They stay the caller's until `release`.

        Raises:
            OutOfBlocks: fewer are free; nothing was reserved.
        """
        if blocks > len(self._free):
            raise OutOfBlocks(f"{blocks} blocks asked for, {len(self._free)} of {self.total} are free")
        if not blocks:
            return []
        taken = self._free[-blocks:][::-1]
        del self._free[-blocks:]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each block, which must be held or cached."""
        for block in blocks:
            if self._references[block] == 0:
                if not self._kept[block]:
                    raise PoolCorrupt(f"block {block} is free and cannot be shared")
                self._cached -= 1
            self._references[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """Give up one reference to each block.

        Returns:
            The blocks that became *cached* by it, in the order given.
        """
        now_cached = []
        for block in blocks:
            if self._references[block] <= 0:
                raise PoolCorrupt(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._kept[block]:
                self._cached += 1
                now_cached.append(block)
            else:
                self._free.append(block)
        return now_cached

    def keep(self, block: BlockId) -> None:
        """Mark a held block as worth keeping after its last holder has gone."""
        if self._references[block] == 0 or self._kept[block]:
            raise PoolCorrupt(f"block {block} cannot be kept: it is not held, or is kept already")
        self._kept[block] = True

    def forget(self, block: BlockId) -> None:
        """Take back `keep`: a cached block becomes free, a held one will be free when released."""
        if not self._kept[block]:
            raise PoolCorrupt(f"block {block} is not kept")
        self._kept[block] = False
        if self._references[block] == 0:
            self._cached -= 1
            self._free.append(block)

    def check(self, holders: Iterable[Sequence[BlockId]]) -> None:
        """Recount everything against the block lists of all holders.

        Raises:
            PoolCorrupt: the first disagreement found.
        """
        expected = Counter(block for holder in holders for block in holder)
        free = set(self._free)
        if len(free) != len(self._free):
            raise PoolCorrupt("a block is free twice")
        if expected[NULL_BLOCK] or NULL_BLOCK in free or self._references[NULL_BLOCK] or self._kept[NULL_BLOCK]:
            raise PoolCorrupt("the null block was given out")
        cached = 0
        for block in map(BlockId, range(1, self.total + 1)):
            references = self._references[block]
            if references != expected[block]:
                raise PoolCorrupt(f"block {block} counts {references} references, its holders have {expected[block]}")
            is_cached = references == 0 and self._kept[block]
            cached += is_cached
            if (block in free) != (references == 0 and not is_cached):
                raise PoolCorrupt(f"block {block} is free and in use at once, or lost")
        if cached != self._cached:
            raise PoolCorrupt(f"{cached} blocks are cached, {self._cached} were counted")

"""Single frames of blocks: who owns each, and how blocks come together again. Counts only, as in `pool`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvikk.errors import OutOfBlocks, PoolCorrupt
from kvikk.memory.body import Body, IntArray
from kvikk.memory.pool import BlockPool
from kvikk.types import BlockId


class FramePool:
    """Gives out single frames. A block whose frames are owned one by one is *split*: the block pool counts it as held.

    Any frame serves any lane. Frames come from the fullest split blocks first, so that the emptiest run dry; a block
    without a live frame goes back to the block pool at once, and `join` empties others by moving what lives in them.

    Args:
        pool: where whole blocks come from and go to.
        frames_per_block: lanes of the model.
    """

    def __init__(self, pool: BlockPool, frames_per_block: int) -> None:
        self.pool = pool
        self.frames_per_block = frames_per_block
        self._live = np.zeros((pool.total + 1, frames_per_block), dtype=bool)
        self._counts = np.zeros(pool.total + 1, dtype=np.int64)
        self._split: set[BlockId] = set()
        self._used = 0

    @property
    def used(self) -> int:
        """Frames that are owned singly."""
        return self._used

    @property
    def split_blocks(self) -> int:
        """Blocks whose frames are owned singly."""
        return len(self._split)

    @property
    def free(self) -> int:
        """Frames of split blocks that nobody owns."""
        return len(self._split) * self.frames_per_block - self._used

    @property
    def joinable(self) -> int:
        """Blocks that `join` could make free."""
        return self.joinable_after(0)

    def joinable_after(self, frames: int) -> int:
        """Blocks that `join` could make free once so many of the frames have been given up."""
        return len(self._split) - -(-(self._used - frames) // self.frames_per_block)

    def blocks_needed(self, frames: int) -> int:
        """Whole blocks that `take(frames)` would split."""
        return max(0, -(-(frames - self.free) // self.frames_per_block))

    def split(self, blocks: Sequence[BlockId]) -> None:
        """Take over blocks that have one holder: each of their frames is owned from here on.

        Raises:
            PoolCorrupt: a block is shared, indexed or split already; nothing changed.
        """
        for block, is_own in zip(blocks, self.pool.are_own(blocks), strict=True):
            if not is_own or block in self._split:
                raise PoolCorrupt(f"block {block} cannot be split: it is shared, indexed or split already")
        self._live[blocks] = True
        self._counts[blocks] = self.frames_per_block
        self._split.update(blocks)
        self._used += len(blocks) * self.frames_per_block

    def take(self, frames: int) -> IntArray:
        """Reserve `frames` frames, all or none: `[frames]` ids. They stay the caller's until `release`.

        Raises:
            OutOfBlocks: the split blocks and the free ones hold fewer; nothing was reserved.
        """
        if not frames:
            return np.zeros(0, dtype=np.int64)
        missing = self.blocks_needed(frames)
        if missing > self.pool.free:
            raise OutOfBlocks(
                f"{frames} frames asked for, {self.free} are free in split blocks and "
                f"{self.pool.free * self.frames_per_block} in free ones"
            )
        fullest = np.flatnonzero((self._counts > 0) & (self._counts < self.frames_per_block))
        fullest = fullest[np.argsort(-self._counts[fullest], kind="stable")]
        fresh = self.pool.take(missing)
        self._split.update(fresh)
        self._used += frames
        return self._own(np.concatenate([fullest, np.array(fresh, dtype=np.int64)]), frames)

    def release(self, frames: IntArray) -> int:
        """Give up frames, each once. Returns how many blocks became free by it.

        Raises:
            PoolCorrupt: one of them is not owned; nothing changed.
        """
        if not len(frames):
            return 0
        live = self._live.reshape(-1)
        was_owned = live[frames]
        live[frames] = False
        gone = np.bincount(frames // self.frames_per_block)
        touched = np.flatnonzero(gone)
        left = self._counts[touched] - gone[touched]
        if (self._live[touched].sum(axis=1) != left).any():
            live[frames] = was_owned
            raise PoolCorrupt("a frame is released that is not owned, or released twice")
        self._counts[touched] = left
        self._used -= len(frames)
        return self._close(touched[left == 0])

    def join(self, blocks: int) -> tuple[IntArray, IntArray]:
        """Empty the `blocks` emptiest split blocks, which are free afterwards.

        Returns:
            `[moved]` sources, ascending, and targets. The caller copies the frames' bytes before anything writes to
            the pool, and hands both to `Body.relocate` of every body.

        Raises:
            OutOfBlocks: `blocks` is more than `joinable`; nothing changed.
        """
        if blocks > self.joinable:
            raise OutOfBlocks(f"{blocks} blocks are to be joined, {self.joinable} can be")
        by_count = np.flatnonzero(self._counts)
        by_count = by_count[np.argsort(self._counts[by_count], kind="stable")]
        emptied = np.sort(by_count[:blocks])
        at, offsets = np.nonzero(self._live[emptied])
        targets = self._own(by_count[blocks:][::-1], len(at))
        self._live[emptied] = False
        self._counts[emptied] = 0
        self._close(emptied)
        return emptied[at] * self.frames_per_block + offsets, targets

    def check(self, bodies: Iterable[Body], page_size: int) -> None:
        """Recount everything against the frames of all bodies.

        Raises:
            PoolCorrupt: the first disagreement found.
        """
        owned = [frame for body in bodies for frame in body.held(page_size).tolist()]
        live = np.flatnonzero(self._live)
        if sorted(owned) != live.tolist():
            raise PoolCorrupt(f"{len(owned)} frames are owned by bodies, {len(live)} are marked as owned, or others")
        if len(live) != self._used or (self._live.sum(axis=1) != self._counts).any():
            raise PoolCorrupt("the frames of split blocks are counted wrong")
        if set(np.flatnonzero(self._counts).tolist()) != self._split:
            raise PoolCorrupt("a block is split without a live frame, or owned singly without being split")
        split = list(self._split)
        for block, is_own in zip(split, self.pool.are_own(split), strict=True):
            if not is_own:
                raise PoolCorrupt(f"split block {block} is shared or indexed")

    def holders(self) -> list[list[BlockId]]:
        """The split blocks, for `BlockPool.check`."""
        return [sorted(self._split)]

    def _own(self, blocks: IntArray, frames: int) -> IntArray:
        """Mark the first free frames of these blocks as owned, in the order of the blocks. They have as many."""
        free = np.cumsum(self.frames_per_block - self._counts[blocks])
        blocks = blocks[: np.searchsorted(free, frames) + 1]  # no more than hold them
        every = blocks[:, None] * self.frames_per_block + np.arange(self.frames_per_block)
        owned: IntArray = every[~self._live[blocks]][:frames]
        self._live.reshape(-1)[owned] = True
        self._counts[blocks] = self._live[blocks].sum(axis=1)
        return owned

    def _close(self, empty: IntArray) -> int:
        """Give blocks without a live frame back."""
        closed = [BlockId(block) for block in empty.tolist()]
        self._split.difference_update(closed)
        self.pool.release(closed)
        return len(closed)

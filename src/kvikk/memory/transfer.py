"""Whole blocks between the pool and the host's memory, without waiting for the device."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kvikk.memory.storage import KVStore
from kvikk.types import BlockId

OUT_BYTES: Final = 2**30
"""Of blocks on their way out, at the most: a long prompt evicts many at once."""
IN_BYTES: Final = 256 * 2**20
"""Of blocks on their way in."""
_LANDING_POLL_S: Final = 0.002


class HostSlots:
    """Slots of the host's memory that hold a block each, given to one user at a time; pinned where the device is a GPU.

    Args:
        store: whose blocks.
        slots: how many.
    """

    def __init__(self, store: KVStore, slots: int) -> None:
        words = store.geometry.block_bytes // torch.int32.itemsize
        self.rows: Tensor = torch.empty(slots, words, dtype=torch.int32, pin_memory=store.device.type == "cuda")
        """`[slots, words]` int32."""
        self._bytes = self.rows.numpy().view(np.uint8)
        self._free = list(range(slots))
        self._landing: deque[tuple[torch.cuda.Event, int]] = deque()
        """Slots that the device still reads, in the order of its reading."""
        self._changed = threading.Condition()

    def bytes_of(self, slot: int) -> memoryview:
        """A slot's bytes."""
        return memoryview(self._bytes[slot])

    def fill(self, slot: int, data: memoryview) -> None:
        """Copy a block's bytes into a slot."""
        np.copyto(self._bytes[slot], np.frombuffer(data, dtype=np.uint8))

    def take(self, timeout_s: float = 0.0) -> int | None:
        """A free slot; waits for one for so many seconds, then gives None."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                while self._landing and self._landing[0][0].query():  # type: ignore[no-untyped-call]
                    self._free.append(self._landing.popleft()[1])
                if self._free:
                    return self._free.pop()
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(min(left_s, _LANDING_POLL_S) if self._landing else left_s)

    def give_back(self, slot: int, *, after: torch.cuda.Event | None = None) -> None:
        """A slot is free again, once the device has come to an event."""
        with self._changed:
            if after is None:
                self._free.append(slot)
            else:
                self._landing.append((after, slot))
            self._changed.notify()


class LeavingBlock:
    """A block whose bytes are being copied out of the pool; see `tier.Leaving`."""

    def __init__(self, slots: HostSlots, slot: int, copied: torch.cuda.Event | None) -> None:
        self._slots, self._slot, self._copied = slots, slot, copied

    def wait(self) -> memoryview:
        """The bytes, once all of them are there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._slots.bytes_of(self._slot)

    def release(self) -> None:
        """They are not needed any more."""
        self._slots.give_back(self._slot, after=self._copied)


class StagedBlock:
    """A block's bytes, ready to be copied into the pool.

    Args:
        slots: where they lie.
        slot: in which.
    """

    def __init__(self, slots: HostSlots, slot: int) -> None:
        self.slots, self.slot = slots, slot

    def release(self) -> None:
        """They are not needed any more."""
        self.slots.give_back(self.slot)


class BlockTransfer:
    """Copies whole blocks out of the pool and into it.

    Copies happen on the device in the order in which they are asked for, between the steps that were started before
    and after. `stage` and what `copy_out` gives may be used from any thread, the rest is for the engine's.

    Args:
        store: the pool's bytes.
        blocks: no more slots are made than this.
    """

    def __init__(self, store: KVStore, blocks: int) -> None:
        block_bytes = store.geometry.block_bytes
        self._words = store.words.view(store.blocks, -1)
        self._is_cuda = store.device.type == "cuda"
        self._out = HostSlots(store, max(1, min(blocks, OUT_BYTES // block_bytes)))
        self._in = HostSlots(store, max(1, min(blocks, IN_BYTES // block_bytes)))

    def copy_out(self, blocks: Sequence[BlockId]) -> list[LeavingBlock]:
        """Start to copy blocks to the host: the first of these, as many as there is room for."""
        taken = []
        for block in blocks:
            slot = self._out.take()
            if slot is None:
                break
            self._out.rows[slot].copy_(self._words[block], non_blocking=True)
            taken.append(slot)
        copied = self._event() if taken else None
        return [LeavingBlock(self._out, slot, copied) for slot in taken]

    def stage(self, data: memoryview, timeout_s: float) -> StagedBlock | None:
        """Copy a block's bytes to where `copy_in` takes them from; None when there was no room in so many seconds."""
        slot = self._in.take(timeout_s)
        if slot is None:
            return None
        self._in.fill(slot, data)
        return StagedBlock(self._in, slot)

    def copy_in(self, blocks: Sequence[tuple[StagedBlock, BlockId]]) -> None:
        """Copy staged blocks into the pool, and release them."""
        for staged, block in blocks:
            self._words[block].copy_(staged.slots.rows[staged.slot], non_blocking=True)
        copied = self._event() if blocks else None
        for staged, _ in blocks:
            staged.slots.give_back(staged.slot, after=copied)

    def _event(self) -> torch.cuda.Event | None:
        """Comes when all that was asked of the device is done; None where that is done at once."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

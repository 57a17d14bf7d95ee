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

from kvikk.memory.crossing import PIECE_BYTES, Crossing, CudaStream
from kvikk.memory.runs import RunPool
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
        self._free = RunPool(slots)
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
                self._note_landed()
                if self._free.free:
                    return self._free.take(1)[0]
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(min(left_s, _LANDING_POLL_S) if self._landing else left_s)

    def take_up_to(self, count: int) -> list[int]:
        """So many slots in as few runs as may be; fewer where there are not so many."""
        with self._changed:
            self._note_landed()
            return self._free.take(min(count, self._free.free))

    def give_back(self, slot: int, *, after: torch.cuda.Event | None = None) -> None:
        """A slot is free again, once the device has come to an event."""
        with self._changed:
            if after is None:
                self._free.give_back([slot])
            else:
                self._landing.append((after, slot))
            self._changed.notify()

    def _note_landed(self) -> None:
        while self._landing and self._landing[0][0].query():  # type: ignore[no-untyped-call]
            self._free.give_back([self._landing.popleft()[1]])


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

    What happens to the pool happens in the order in which it is asked for, between the steps that were started before
    and after. On a GPU that is gathering and scattering; blocks cross the link beside the steps, which wait for it only
    where more is asked for at once than the staging memory holds, or where what comes in is not there yet. `stage` and
    what `copy_out` gives may be used from any thread, the rest is for the engine's.

    Args:
        store: the pool's bytes.
        blocks: no more slots are made than this.
        piece_bytes: that cross the link together.
    """

    def __init__(self, store: KVStore, blocks: int, *, piece_bytes: int = PIECE_BYTES) -> None:
        block_bytes = store.geometry.block_bytes
        self._words = store.words.view(store.blocks, -1)
        self._device = store.device
        self._out = HostSlots(store, max(1, min(blocks, OUT_BYTES // block_bytes)))
        self._in = HostSlots(store, max(1, min(blocks, IN_BYTES // block_bytes)))
        if self._device.type == "cuda":
            self._leaving, self._coming = (
                Crossing.on_gpu(self._words, slots.rows, is_out=is_out, piece_bytes=piece_bytes)
                for slots, is_out in ((self._out, True), (self._in, False))
            )

    def copy_out(self, blocks: Sequence[BlockId]) -> list[LeavingBlock]:
        """Start to copy blocks to the host: the first of these, as many as there is room for."""
        slots = self._out.take_up_to(len(blocks))
        if not slots:
            return []
        copied = None
        if self._device.type == "cuda":
            _, copied = self._leaving.copy(blocks[: len(slots)], slots, self._steps(), direct=False)
        else:
            for slot, block in zip(slots, blocks, strict=False):
                self._out.rows[slot].copy_(self._words[block])
        return [LeavingBlock(self._out, slot, copied) for slot in slots]

    def stage(self, data: memoryview, timeout_s: float) -> StagedBlock | None:
        """Copy a block's bytes to where `copy_in` takes them from; None when there was no room in so many seconds."""
        slot = self._in.take(timeout_s)
        if slot is None:
            return None
        self._in.fill(slot, data)
        return StagedBlock(self._in, slot)

    def copy_in(self, blocks: Sequence[tuple[StagedBlock, BlockId]]) -> None:
        """Copy staged blocks into the pool, and release them."""
        if not blocks:
            return
        copied = None
        if self._device.type == "cuda":
            slots, targets = [staged.slot for staged, _ in blocks], [block for _, block in blocks]
            _, copied = self._coming.copy(targets, slots, self._steps(), direct=False)
        else:
            for staged, block in blocks:
                self._words[block].copy_(self._in.rows[staged.slot])
        for staged, _ in blocks:
            self._in.give_back(staged.slot, after=copied)

    def _steps(self) -> CudaStream:
        return CudaStream.current(self._device)

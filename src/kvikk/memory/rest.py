"""Whole blocks in the host's memory, for as long as someone wants them, copied beside the steps."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvikk.errors import ConfigError
from kvikk.memory.storage import KVStore
from kvikk.memory.upload import upload
from kvikk.types import BlockId


class Copying:
    """Blocks that are being copied on a stream of their own; on a CPU they have been.

    Args:
        seconds: it took, where that is known already.
        events: before and after it on its stream, elsewhere.
    """

    def __init__(self, seconds: float = 0.0, events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None) -> None:
        self._seconds, self._events = seconds, events

    @property
    def is_done(self) -> bool:
        """Whether all has been copied."""
        return self._events is None or self._events[1].query()  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        """How long it took, without the time for which it waited for others. It is done."""
        if self._events is None:
            return self._seconds
        begun, ended = self._events
        return begun.elapsed_time(ended) / 1000  # type: ignore[no-any-return]

    def wait(self) -> None:
        """Until it is done."""
        if self._events is not None:
            self._events[1].synchronize()

    def settle(self) -> None:
        """Whatever is asked of the device from now on happens after it."""
        if self._events is not None:
            torch.cuda.current_stream().wait_event(self._events[1])


class Settles(Protocol):
    """As much of a `Copying` as another copy needs that comes after it."""

    def settle(self) -> None:
        """Whatever is asked of the device from now on happens after it."""
        ...


class RestStore:
    """Holds blocks by slot: `save` copies them out of the pool, `load` back into it, to any blocks.

    On a GPU both are done by streams of their own, the link being free in both directions while steps run. A copy
    begins when all that was asked of the device before it is done. What is asked afterwards does not wait for it: until
    a copy is done its blocks must not be written, when they are saved, nor be read or given away, when they are loaded.

    Args:
        store: whose blocks.
        size_bytes: of the host's memory, pinned for a GPU.

    Raises:
        ConfigError: that is not enough for a block, or could not be had.
    """

    def __init__(self, store: KVStore, size_bytes: int) -> None:
        block_bytes = store.geometry.block_bytes
        self.total = size_bytes // block_bytes
        if not self.total:
            raise ConfigError(f"--kv-host-memory of {size_bytes:,} bytes is less than a block, of {block_bytes:,}")
        self.block_bytes = block_bytes
        self._device = store.device
        self._blocks: Tensor = store.words.view(torch.int32).view(store.blocks, -1)
        self._slots: Tensor = torch.empty(self.total, self._blocks.shape[1], dtype=torch.int32)
        self._free = list(range(self.total))[::-1]
        if self._device.type == "cuda":
            _pin(self._slots)
            weakref.finalize(self, _unpin, self._slots)
            self._out, self._in = (torch.cuda.Stream(self._device) for _ in range(2))  # type: ignore[no-untyped-call]

    @property
    def free(self) -> int:
        """Blocks that there is room for."""
        return len(self._free)

    def save(self, blocks: Sequence[BlockId]) -> tuple[list[int], Copying]:
        """Begin to copy blocks out of the pool, no more than `free`. Returns their slots."""
        slots = self._free[len(self._free) - len(blocks) :]
        del self._free[len(self._free) - len(blocks) :]
        if self._device.type == "cuda":
            return slots, self._copy_beside(self._out, blocks, slots)
        begun_s = time.perf_counter()
        self._slots[torch.tensor(slots)] = self._blocks[torch.tensor(blocks)]
        return slots, Copying(time.perf_counter() - begun_s)

    def load(self, slots: Sequence[int], blocks: Sequence[BlockId], after: Settles) -> Copying:
        """Begin to copy slots back into the pool.

        Args:
            slots: full ones.
            blocks: as many, that no one else has.
            after: of the `save` that filled the last of these slots.
        """
        if self._device.type == "cuda":
            with torch.cuda.stream(self._in):
                after.settle()
            return self._copy_beside(self._in, blocks, slots)
        begun_s = time.perf_counter()
        self._blocks[torch.tensor(blocks)] = self._slots[torch.tensor(slots)]
        return Copying(time.perf_counter() - begun_s)

    def give_back(self, slots: Sequence[int]) -> None:
        """These slots are not needed any more; a copy to or from them may still be under way."""
        self._free += slots

    def _copy_beside(self, stream: torch.cuda.Stream, blocks: Sequence[BlockId], slots: Sequence[int]) -> Copying:
        from kvikk.memory.gpu.link import copy_rows  # imports triton

        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            of_blocks, of_slots = (upload(np.asarray(each, dtype=np.int64), self._device) for each in (blocks, slots))
            begun.record()
            if stream is self._in:
                copy_rows(self._slots, self._blocks, of_slots, of_blocks)
            else:
                copy_rows(self._blocks, self._slots, of_blocks, of_slots)
            ended.record()
        return Copying(events=(begun, ended))


def _pin(memory: Tensor) -> None:
    """Lock memory where it lies: torch's own pinned allocations are rounded up to a power of two."""
    size_bytes = memory.numel() * memory.itemsize
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size_bytes, 0)  # type: ignore[no-untyped-call]
    if int(error):
        raise ConfigError(
            f"--kv-host-memory: {size_bytes / 2**30:.1f} GiB of the host's memory could not be pinned (CUDA error "
            f"{int(error)}): give less"
        )


def _unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]

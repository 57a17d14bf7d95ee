"""Whole blocks in the host's memory, for as long as someone wants them, copied beside the steps."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvikk.errors import ConfigError
from kvikk.memory.crossing import PIECE_BYTES, Crossing, CudaStream
from kvikk.memory.runs import RunPool
from kvikk.memory.storage import KVStore
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
        size_bytes: of the host's memory, pinned for a GPU, which takes `staging_bytes` of its own besides.
        piece_bytes: that cross the link together.

    Raises:
        ConfigError: that is not enough for a block, or could not be had.
    """

    def __init__(self, store: KVStore, size_bytes: int, *, piece_bytes: int = PIECE_BYTES) -> None:
        block_bytes = store.geometry.block_bytes
        self.total = size_bytes // block_bytes
        if not self.total:
            raise ConfigError(f"--kv-host-memory of {size_bytes:,} bytes is less than a block, of {block_bytes:,}")
        self.block_bytes = block_bytes
        self._device = store.device
        self._blocks: Tensor = store.words.view(torch.int32).view(store.blocks, -1)
        self._slots: Tensor = torch.empty(self.total, self._blocks.shape[1], dtype=torch.int32)
        self._free = RunPool(self.total)
        if self._device.type == "cuda":
            _pin(self._slots)
            weakref.finalize(self, _unpin, self._slots)
            self._out, self._in = (
                Crossing.on_gpu(self._blocks, self._slots, is_out=is_out, piece_bytes=piece_bytes)
                for is_out in (True, False)
            )
            self._gathers, self._scatters = CudaStream(self._device), CudaStream(self._device)

    @property
    def free(self) -> int:
        """Blocks that there is room for."""
        return self._free.free

    def save(self, blocks: Sequence[BlockId]) -> tuple[list[int], Copying]:
        """Begin to copy blocks out of the pool, no more than `free`. Returns their slots, in as few runs as may be."""
        slots = self._free.take(len(blocks))
        if self._device.type == "cuda":
            return slots, self._copy_beside(self._out, self._gathers, blocks, slots)
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
            self._in.link.do(after.settle)
            return self._copy_beside(self._in, self._scatters, blocks, slots)
        begun_s = time.perf_counter()
        self._blocks[torch.tensor(blocks)] = self._slots[torch.tensor(slots)]
        return Copying(time.perf_counter() - begun_s)

    def give_back(self, slots: Sequence[int]) -> None:
        """These slots are not needed any more. A copy to them may be under way; one from them has been settled."""
        self._free.give_back(slots)

    def _copy_beside(
        self, crossing: Crossing, near: CudaStream, blocks: Sequence[BlockId], slots: Sequence[int]
    ) -> Copying:
        asked = CudaStream.current(self._device).record()
        for stream in (near, crossing.link):
            stream.wait(asked)
        return Copying(events=crossing.copy(blocks, slots, near, direct=True))


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

"""Whole blocks over the link to the host: by copy engines in large pieces, gathered and scattered on the device.

A copy engine takes some microseconds a call, fills the link from calls of a few MiB on, and leaves what runs beside it
alone. A kernel that reads and writes the host's memory fills it with any blocks, but then all others wait for their
memory, too. So blocks that lie strewn over the pool are gathered into staging memory on the device, where that takes
next to nothing, and cross from there, in one call for each run of slots; the same way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvikk.geometry import KVGeometry
from kvikk.memory.body import IntArray
from kvikk.memory.runs import runs_of
from kvikk.memory.upload import upload

PIECE_BYTES: Final = 32 * 2**20
"""Of a piece, and of each half of the staging memory: a call then takes 0.6 ms of a link of 55 GB/s."""

CopyRows = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Copies `source[source_rows[i]]` to `target[target_rows[i]]` on the device: source, target, their rows."""


class Call(NamedTuple):
    """What one call of a copy engine copies.

    Args:
        row: the first one on the device, of the pool or of a half.
        slot: the first one on the host.
        length: so many of both.
    """

    row: int
    slot: int
    length: int


@dataclass(frozen=True, eq=False)
class Piece:
    """Blocks that pass through a half together; or blocks that need not, as they follow each other on both sides.

    Args:
        blocks: `[blocks]`, in the order in which they lie in the half; None: the calls reach into the pool.
        calls: of a copy engine.
    """

    blocks: IntArray | None
    calls: list[Call]


def plan_pieces(blocks: IntArray, slots: IntArray, *, room: int, direct_from: int | None) -> list[Piece]:
    """Cut pairs of a block and a slot into pieces.

    Args:
        blocks, slots: `[pairs]`, no slot twice.
        room: blocks of a half; no call copies more.
        direct_from: from how many blocks on, that follow each other on both sides, they pass through no half; None:
            all do.
    """
    order = np.argsort(slots)
    blocks, slots = blocks[order], slots[order]
    pieces = []
    if direct_from is not None:
        is_direct = np.zeros(len(slots), dtype=bool)
        runs = runs_of(blocks, slots)
        for start, stop in runs[runs[:, 1] - runs[:, 0] >= direct_from].tolist():
            is_direct[start:stop] = True
            for at in range(start, stop, room):
                call = Call(int(blocks[at]), int(slots[at]), min(room, stop - at))
                pieces.append(Piece(None, [call]))
        blocks, slots = blocks[~is_direct], slots[~is_direct]
    firsts = np.arange(0, len(slots), room)
    starts = np.union1d(runs_of(slots)[:, 0], firsts)
    lengths = np.diff(starts, append=len(slots))
    calls = [Call(*call) for call in np.stack((starts % room, slots[starts], lengths), axis=1).tolist()]
    cuts = [*np.searchsorted(starts, firsts).tolist(), len(calls)]
    for at, (first, last) in zip(firsts.tolist(), pairwise(cuts), strict=True):
        pieces.append(Piece(blocks[at : at + room], calls[first:last]))
    return pieces


class Stream(Protocol):
    """A line of work: the device does it in the order in which it is asked."""

    def do(self, work: Callable[[], object]) -> None:
        """Ask for what `work` asks of the device."""
        ...

    def upload(self, numbers: IntArray) -> Tensor:
        """An array on the device, for work of this stream."""
        ...

    def record(self, *, timed: bool = False) -> torch.cuda.Event:
        """Comes when all that was asked so far is done."""
        ...

    def wait(self, event: torch.cuda.Event) -> None:
        """What is asked from now on is done after an event; the host does not wait."""
        ...


class CudaStream:
    """A stream of a GPU.

    Args:
        stream: the one; None makes one, for what is asked after all that the device has been asked so far.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        if stream is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
        self._device, self._stream = device, stream

    @classmethod
    def current(cls, device: torch.device) -> CudaStream:
        """That of the steps."""
        return cls(device, torch.cuda.current_stream(device))

    def do(self, work: Callable[[], object]) -> None:
        """Ask for what `work` asks of the current stream."""
        with torch.cuda.stream(self._stream):
            work()

    def upload(self, numbers: IntArray) -> Tensor:
        """An array on the device, for work of this stream."""
        with torch.cuda.stream(self._stream):
            return upload(numbers, self._device)

    def record(self, *, timed: bool = False) -> torch.cuda.Event:
        """Comes when all that was asked so far is done."""
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """What is asked from now on is done after an event."""
        self._stream.wait_event(event)


class Crossing:
    """Copies blocks over the link in one direction, through two halves of staging memory in turn.

    While one half is on the link the other is gathered or scattered. Copies cross in the order in which they are asked
    for.

    Args:
        pool: `[blocks, words]` int32, on the device.
        host: `[slots, words]` int32, pinned.
        is_out: to the host, or from there.
        link: does the copies between device and host, and nothing else.
        copy_rows: gathers and scatters.
        piece_bytes: of a half; it holds a block at the least.
    """

    def __init__(
        self,
        pool: Tensor,
        host: Tensor,
        *,
        is_out: bool,
        link: Stream,
        copy_rows: CopyRows,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.link = link
        self._pool, self._host = pool, host
        self._is_out = is_out
        self._copy_rows = copy_rows
        self._room = min(_room(pool.shape[1] * pool.itemsize, piece_bytes), len(host))
        self._halves = [pool.new_empty(self._room, pool.shape[1]) for _ in range(2)]
        self._free: list[torch.cuda.Event | None] = [None, None]
        """What each half has to wait for before it is filled again."""
        self._turn = 0
        self._places = torch.arange(self._room, device=pool.device)

    @classmethod
    def on_gpu(cls, pool: Tensor, host: Tensor, *, is_out: bool, piece_bytes: int = PIECE_BYTES) -> Crossing:
        """With a stream of its own for the link."""
        from kvikk.memory.gpu.rows import copy_rows  # imports triton

        first = torch.zeros(1, dtype=torch.int64, device=pool.device)
        copy_rows(pool, torch.empty_like(pool[:1]), first, first)  # compiled now, and not while requests wait
        link = CudaStream(pool.device)
        return cls(pool, host, is_out=is_out, link=link, copy_rows=copy_rows, piece_bytes=piece_bytes)

    def copy(
        self, blocks: Sequence[int] | IntArray, slots: Sequence[int] | IntArray, near: Stream, *, direct: bool
    ) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Begin to copy, between as many blocks and slots.

        Args:
            blocks: of the pool.
            slots: of the host, none twice.
            near: gathers from the pool, or scatters into it. When all is asked for it has done with the pool.
            direct: blocks that follow each other on both sides may go without. The link then reaches into the pool
                itself, and neither `near` nor what is asked of it later is kept from there.

        Returns:
            Timed events from before and after it.
        """
        pieces = plan_pieces(
            np.asarray(blocks, dtype=np.int64),
            np.asarray(slots, dtype=np.int64),
            room=self._room,
            direct_from=max(1, self._room // 2) if direct else None,
        )
        first, second = (near, self.link) if self._is_out else (self.link, near)
        staged = [piece.blocks for piece in pieces if piece.blocks is not None]
        of_blocks = near.upload(np.concatenate(staged)) if staged else self._places
        begun = self.link.record(timed=True)
        for piece in pieces:
            if piece.blocks is None:
                self.link.do(partial(self._cross, self._pool, piece.calls))
                continue
            half, rows = self._halves[self._turn], of_blocks[: len(piece.blocks)]
            cross, move = partial(self._cross, half, piece.calls), partial(self._move, half, rows)
            fill, drain = (move, cross) if self._is_out else (cross, move)
            if (free := self._free[self._turn]) is not None:
                first.wait(free)
            first.do(fill)
            second.wait(first.record())
            second.do(drain)
            self._free[self._turn] = second.record()
            self._turn = 1 - self._turn
            of_blocks = of_blocks[len(piece.blocks) :]
        second.wait(first.record())
        return begun, second.record(timed=True)

    def _cross(self, memory: Tensor, calls: Sequence[Call]) -> None:
        for row, slot, length in calls:
            here, there = memory[row : row + length], self._host[slot : slot + length]
            source, target = (here, there) if self._is_out else (there, here)
            target.copy_(source, non_blocking=True)

    def _move(self, half: Tensor, rows: Tensor) -> None:
        places = self._places[: len(rows)]
        if self._is_out:
            self._copy_rows(self._pool, half, rows, places)
        else:
            self._copy_rows(half, self._pool, places, rows)


def staging_bytes(geometry: KVGeometry, device: torch.device) -> int:
    """Of the device, at the most, for a crossing in each direction; a CPU needs none."""
    if device.type != "cuda":
        return 0
    return 4 * _room(geometry.block_bytes, PIECE_BYTES) * geometry.block_bytes


def _room(block_bytes: int, piece_bytes: int) -> int:
    return max(1, piece_bytes // block_bytes)

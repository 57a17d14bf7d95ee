"""Which row sits where on the device, and what the device holds of it: the host's mirror of `SeatState`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvikk.engine.request import Row
from kvikk.memory.body import IntArray
from kvikk.types import BlockId


@dataclass(slots=True, eq=False)
class Mirror:
    """What the device holds of one row.

    Args:
        row: the row.
        seat: its seat.
        blocks: the row's own list when it was last looked at: a row that comes back, or lost some, has another.
        written: entries of the table on the device.
        last: the block at the last of them.
        position: what the device has as the row's next position; -1: nothing that counts.
        frames: of the body that the device has, as the body had them then; None: it has none.
        watched: positions whose queries the device keeps.
    """

    row: Row
    seat: int
    blocks: list[BlockId] | None = None
    written: int = 0
    last: int = -1
    position: int = -1
    frames: IntArray | None = None
    watched: range = range(0)


class SeatMap:
    """Gives rows seats, and says what the device has to be told of them.

    Args:
        seats: how many there are; at least the rows of a step.
        max_blocks: entries of a row's table.
        on_forget: told of each row that loses its seat.
        cache_seats: how many there are behind the others for small caches of lossless rows.
    """

    def __init__(
        self,
        seats: int,
        max_blocks: int,
        on_forget: Callable[[Mirror], None] | None = None,
        *,
        cache_seats: int = 0,
    ) -> None:
        self._seats = seats
        self._free = list(range(seats))
        self._free_of_caches = list(range(seats, seats + cache_seats))
        self._mirrors: dict[Row, Mirror] = {}
        self._max_blocks = max_blocks
        self._on_forget = on_forget

    def __len__(self) -> int:
        return len(self._mirrors)

    def mirror(self, row: Row, commands: list[int]) -> Mirror:
        """The row's mirror; a row that had none gets a seat, and a command that tells of it."""
        mirror = self._mirrors.get(row)
        if mirror is None:
            free = self._free if row.draft_of is None else self._free_of_caches
            if not free:
                self.forget([other for other in self._mirrors if not other.is_running])
            mirror = self._mirrors[row] = Mirror(row, free.pop())
            commands.extend(seat_command(mirror))
        return mirror

    def write_table(self, mirror: Mirror, writes: list[int]) -> None:
        """Add what the device's table lacks of the row's blocks."""
        blocks = mirror.row.blocks
        if blocks is not mirror.blocks:
            mirror.blocks, mirror.written, mirror.position = blocks, 0, -1
        elif mirror.written and blocks[mirror.written - 1] != mirror.last:  # it got a copy of its own
            mirror.written -= 1
        if mirror.written == len(blocks):
            return
        at = mirror.seat * self._max_blocks
        for index in range(mirror.written, len(blocks)):
            writes.append(at + index)
            writes.append(blocks[index])
        mirror.written, mirror.last = len(blocks), blocks[-1]

    def forget_positions(self, rows: Iterable[Row]) -> None:
        """These rows moved on without the device."""
        for row in rows:
            if row in self._mirrors:
                self._mirrors[row].position = -1

    def forget(self, rows: Iterable[Row]) -> None:
        """Take back the seats of these rows: if they come again, the device is told of them anew."""
        for row in rows:
            mirror = self._mirrors.pop(row, None)
            if mirror is not None:
                if self._on_forget is not None:
                    self._on_forget(mirror)
                (self._free if mirror.seat < self._seats else self._free_of_caches).append(mirror.seat)


def seat_command(mirror: Mirror) -> tuple[int, ...]:
    """What the device must know of a row besides its table: how it is sampled, and where its tail begins."""
    row = mirror.row
    params, seed = row.request.params, row.request.seed
    return (
        mirror.seat,
        _bits(0.0 if params.is_greedy else params.temperature),
        max(params.top_k, 0),
        _bits(params.top_p),
        _bits(params.min_p),
        _signed(seed & 0xFFFFFFFF),
        _signed(seed >> 32),
        row.choice,
        row.tail_start,
        mirror.watched.start,
        mirror.watched.stop,
    )


def _bits(number: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits


def _signed(word: int) -> int:
    """The int32 with the same bits."""
    return word - 2**32 if word >= 2**31 else word

"""Where kernels find the bodies of compressed rows: one arena of frame ids on the device, written at compactions."""

from __future__ import annotations

import numpy as np
import torch

from kvikk.attention.gpu.rows import Bodies
from kvikk.engine.request import Row
from kvikk.memory import Body, Staging


class BodyArena:
    """The bodies of rows by seat, at addresses that stay.

    A body is laid down behind the last one. When the arena ends, those that running rows have by now are laid down anew
    from its start: they fit, as every frame of the pool belongs to one of them at the most. (Of rows that have ended,
    and of bodies that were compacted since, frames belong to others.) What is written is seen by steps that are started
    later, and only by these.

    Args:
        seats: rows that can be known at once.
        lanes: of the model.
        frames: of the pool.
        page_size: slots of a frame.
        device: of the pool.
    """

    def __init__(self, seats: int, lanes: int, frames: int, page_size: int, device: torch.device) -> None:
        self._lanes = torch.zeros((seats + 1, 2, lanes), dtype=torch.int32, device=device)  # one copy writes both
        self.bodies = Bodies(
            frames=torch.zeros(frames, dtype=torch.int32, device=device),
            offsets=self._lanes[:, 0],
            lengths=self._lanes[:, 1],
        )
        self._staging = Staging(device)
        self._page_size = page_size
        self._held: dict[int, Row] = {}
        self._end = 0

    def __contains__(self, seat: int) -> bool:
        return seat in self._held

    def put(self, seat: int, row: Row) -> None:
        """The running row at this seat has another body now."""
        assert row.body is not None
        self._held[seat] = row
        if self._end + row.body.frame_count(self._page_size) <= len(self.bodies.frames):
            self._write(seat, row.body)
            return
        self._end = 0
        for other, its_row in [*self._held.items()]:
            if its_row.is_running and its_row.body is not None:
                self._write(other, its_row.body)
            else:
                self.clear(other)

    def clear(self, seat: int) -> None:
        """The seat has another row, without a body."""
        if self._held.pop(seat, None) is not None:
            self.bodies.lengths[seat].zero_()

    def _write(self, seat: int, body: Body) -> None:
        held = -(-body.lengths // self._page_size)
        frames = body.held(self._page_size)
        start, self._end = self._end, self._end + len(frames)
        self._staging.send(self.bodies.frames[start : self._end], frames)
        self._staging.send(self._lanes[seat], np.stack((start + np.cumsum(held) - held, body.lengths)))

"""The compressed part of a row: for each lane frames of its own number, in no particular order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvikk.types import Position

IntArray = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Body:
    """What a row keeps of its positions below `stop`; those from `stop` on lie in its tail of whole blocks.

    Lanes are layer-major: lane `first_frame[layer] + kv_head`. Slot s of a lane lies in its frame `s // page_size` at
    offset `s % page_size`, and slots `0..length-1` are live: a body has no holes. The order of slots says nothing,
    `positions` does. A body changes only between two steps, and `frames` is then another array; its frames are its own.

    Args:
        frames: `[lanes, columns]`, frame ids, contiguous; the null frame behind a lane's last.
        lengths: `[lanes]`, live slots of each lane.
        stop: first position of the tail: a multiple of the page size.
        positions: `[lanes, columns * page_size]` int32 on the pool's device; later than any token beyond a lane's
            length.
        state: what the policy remembers of each slot, by name: the same shape, fp32. Moves with the slots.
    """

    frames: IntArray
    lengths: IntArray
    stop: Position
    positions: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        """KV heads of all layers."""
        return len(self.lengths)

    def held(self, page_size: int) -> IntArray:
        """The frames that the body owns, each once, lane after lane."""
        if self.frame_count(page_size) == self.frames.size:
            return self.frames.ravel()
        return self.frames[self.live_columns(page_size)]

    def frame_count(self, page_size: int) -> int:
        """How many these are."""
        return int((-(-self.lengths // page_size)).sum())

    def live_columns(self, page_size: int) -> NDArray[np.bool_]:
        """`[lanes, columns]`: where `frames` names a frame of the body."""
        return np.arange(self.frames.shape[1]) < -(-self.lengths // page_size)[:, None]

    def relocate(self, sources: IntArray, targets: IntArray) -> None:
        """Frames have moved: `sources[i]`, ascending, lies at `targets[i]` now."""
        if not len(sources):
            return
        at = np.minimum(np.searchsorted(sources, self.frames), len(sources) - 1)
        has_moved = sources[at] == self.frames
        if has_moved.any():
            self.frames = np.where(has_moved, targets[at], self.frames)

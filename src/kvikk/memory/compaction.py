"""From what is kept to a smaller body: which frames stay, which tokens move, what becomes free.

Kept tokens are packed in the order of their positions. That moves more of them than filling holes would, by at most
what is kept, and it makes the order of a lane's slots, and so every rounding of its softmax, a function of what is kept
alone: never of which blocks happened to be shared when the row was compacted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvikk.memory.body import Body, IntArray
from kvikk.memory.upload import upload
from kvikk.types import NULL_BLOCK, BlockId, Position

NO_POSITION: Final = 2**31 - 1
"""Of a body's slots beyond a lane's length: later than any token."""


@dataclass(frozen=True, eq=False)
class Held:
    """A row's slots before compaction, in the order of positions: its body, then its tail's blocks.

    What lies on the device is made when it is first asked for.

    Args:
        frames: `[lanes, columns]`, the null frame where a lane has none.
        lengths: `[lanes]`, live slots of the body.
        is_own: `[blocks]` of the tail, whether the row alone owns them and may write to them.
        body: `[lanes, body_columns * page_size]` int32 on the device, the positions of the body; None: there is none.
        start: first position of the tail.
        length: computed positions of the row.
        page_size: slots of a frame.
        device: of the pool.
    """

    frames: IntArray
    lengths: IntArray
    is_own: NDArray[np.bool_]
    body: Tensor | None
    start: int
    length: int
    page_size: int
    device: torch.device

    @property
    def lanes(self) -> int:
        """KV heads of all layers."""
        return len(self.frames)

    @property
    def slots(self) -> int:
        """Of a lane, dead ones included."""
        return int(self.frames.shape[1]) * self.page_size

    @property
    def body_columns(self) -> int:
        """Columns before those of the tail."""
        return int(self.frames.shape[1]) - len(self.is_own)

    @cached_property
    def in_body(self) -> IntArray:
        """`[lanes]`, frames of the body, which are the first of each lane and the row's own."""
        frames: IntArray = -(-self.lengths // self.page_size)
        return frames

    @cached_property
    def table(self) -> Tensor:
        """`frames`, int64 on the device."""
        return upload(self.frames, self.device)

    @property
    def is_told(self) -> bool:
        """Whether the device has `table` already."""
        return "table" in vars(self)

    @cached_property
    def positions(self) -> Tensor:
        """`[lanes, slots]` int64 on the device; anything where a slot is dead."""
        return self._laid_out[0]

    @cached_property
    def live(self) -> Tensor:
        """`[lanes, slots]` bool on the device: what attention reads now."""
        return self._laid_out[1]

    @cached_property
    def _laid_out(self) -> tuple[Tensor, Tensor]:
        return lay_out(self.body, self.table, start=self.start, length=self.length, page_size=self.page_size)

    def first(self, blocks: int) -> Held:
        """The body and the first blocks of the tail only."""
        columns = self.body_columns + blocks
        first = replace(self, frames=self.frames[:, :columns], is_own=self.is_own[:blocks])
        for name, stop in (("table", columns), ("positions", first.slots), ("live", first.slots)):
            if name in vars(self):  # what is on the device already
                vars(first)[name] = vars(self)[name][:, :stop]
        return first


@dataclass(frozen=True, slots=True)
class Ends:
    """What stays of a lane where that is known beforehand: its first live slots, and the last of the others.

    Args:
        first: so many of the first.
    """

    first: int

    def mask(self, held: Held, counts: IntArray) -> Tensor:
        """`[lanes, slots]` bool: what stays, when each lane keeps `counts` `[lanes]`, no fewer than the first ones."""
        place = held.live.cumsum(1)
        last = place[:, -1:] - upload(counts - self.first, held.device)[:, None]
        return held.live & ((place <= self.first) | (place > last))


Keep = Tensor | Ends
"""What stays: `[lanes, slots]` bool on the device, of live slots only; or the ends of each lane."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """A body to be.

    Args:
        frames: `[lanes, columns]`, of the body.
        counts: `[lanes]`, what each lane keeps.
        stop: where the tail begins afterwards.
        is_used: `[blocks]` of the tail, of which the body has frames now.
        freed: frames of the old body, and of these blocks, that it does not need.
        is_cut: `frames` are the first columns of those before.
    """

    frames: IntArray
    counts: IntArray
    stop: Position
    is_used: NDArray[np.bool_]
    freed: IntArray
    is_cut: bool

    @property
    def is_in_order(self) -> bool:
        """Whether a lane can be packed from its front to its end: nothing is written over that was not read before.

        So it is where no block lies before a used one that the row may not write to.
        """
        return not self.is_used[np.count_nonzero(self.is_used) :].any()

    def body(self, packed: Packed) -> Body:
        """With its frames, lengths and positions."""
        return Body(frames=self.frames, lengths=self.counts, stop=self.stop, positions=packed.positions)


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the slots of a body come from.

    Args:
        positions: `[lanes, slots]` int32 on the device, of the slots after; `NO_POSITION` beyond a lane's last.
        order: the same shape, int64: the slot before of each of them; None: nobody asked.
    """

    positions: Tensor
    order: Tensor | None

    def gather(self, values: Tensor) -> Tensor:
        """What belongs to each slot after compaction: from `[lanes, slots]` before to that after."""
        assert self.order is not None
        return values.gather(1, self.order)


def held_by(
    body: Body | None,
    blocks: Sequence[BlockId],
    is_own: Sequence[bool],
    *,
    length: int,
    lanes: int,
    page_size: int,
    device: torch.device,
) -> Held:
    """A row's slots: its body, if it has one, and its tail.

    Args:
        body: of the row.
        blocks: of its tail.
        is_own: of each of them, whether the row may write to it.
        length: computed positions of the row.
        lanes: of the model.
        page_size: slots of a frame.
        device: of the pool.
    """
    frames = np.asarray(blocks, dtype=np.int64) * lanes + np.arange(lanes)[:, None]
    if body is not None:
        frames = np.concatenate([body.frames, frames], axis=1)
    return Held(
        frames=frames,
        lengths=np.zeros(lanes, dtype=np.int64) if body is None else body.lengths,
        is_own=np.asarray(is_own, dtype=bool),
        body=None if body is None else body.positions,
        start=0 if body is None else body.stop,
        length=length,
        page_size=page_size,
        device=device,
    )


def frames_wanted(held: Held, counts: IntArray) -> IntArray:
    """Frames that each lane lacks to hold `counts` `[lanes]` tokens in frames of its own."""
    lacking: IntArray = -(-counts // held.page_size) - held.in_body - np.count_nonzero(held.is_own)
    return np.maximum(lacking, 0)


def plan_compaction(held: Held, counts: IntArray, fresh: IntArray, *, stop: Position) -> Compaction:
    """Choose the frames that what is kept is packed into: the row's own, as far as there are enough.

    Args:
        held: the row's slots.
        counts: `[lanes]`, how many each lane keeps.
        fresh: `[sum(frames_wanted)]`, frames for the lanes that lack some, lane by lane.
        stop: where the tail begins afterwards.
    """
    needed, in_body = -(-counts // held.page_size), held.in_body
    if (needed == needed[0]).all() and (in_body == in_body[0]).all():
        return _plan_alike(held, counts, fresh, stop, int(needed[0]), int(in_body[0]))
    needed, in_body = needed[:, None], in_body[:, None]
    of_body = np.arange(held.body_columns) < np.minimum(in_body, needed)
    of_tail = held.is_own & (np.cumsum(held.is_own) <= needed - in_body)
    own = np.minimum(needed, in_body + np.count_nonzero(held.is_own))
    column = np.arange(needed.max(initial=0))
    frames = np.full((held.lanes, len(column)), NULL_BLOCK, dtype=np.int64)
    frames[column < own] = held.frames[np.concatenate([of_body, of_tail], axis=1)]
    is_lacking = (column >= own) & (column < needed)
    assert len(fresh) == np.count_nonzero(is_lacking)
    frames[is_lacking] = fresh
    is_used: NDArray[np.bool_] = np.any(of_tail, axis=0)
    is_freed = np.arange(held.frames.shape[1]) < in_body
    is_freed[:, : held.body_columns] &= ~of_body
    is_freed[:, held.body_columns :] = is_used & ~of_tail
    return Compaction(frames, counts, stop, is_used=is_used, freed=held.frames[is_freed], is_cut=False)


def _plan_alike(held: Held, counts: IntArray, fresh: IntArray, stop: Position, needed: int, in_body: int) -> Compaction:
    """The same where every lane has as many frames, and needs as many: what holds of one's columns holds of all."""
    own = np.flatnonzero(held.is_own)[: max(0, needed - in_body)]
    is_used = np.zeros(len(held.is_own), dtype=bool)
    is_used[own] = True
    columns = np.concatenate([np.arange(min(in_body, needed)), held.body_columns + own])
    is_cut = len(columns) == needed and (needed == 0 or columns[-1] == needed - 1)  # they ascend
    if is_cut:
        frames = held.frames[:, :needed].copy()
    else:
        frames = np.concatenate([held.frames[:, columns], fresh.reshape(held.lanes, -1)], axis=1)
    freed = held.frames[:, needed:in_body].ravel()
    return Compaction(frames, counts, stop, is_used=is_used, freed=freed, is_cut=is_cut)


def lay_out(body: Tensor | None, table: Tensor, *, start: int, length: int, page_size: int) -> tuple[Tensor, Tensor]:
    """The positions of a row's slots, `[lanes, slots]` int64, and which of them live, bool.

    Args:
        body: `[lanes, body_slots]` int32, the positions of the first ones; None: there is no body.
        table: `[lanes, columns]` int64, their frames.
        start: position of the first slot behind the body.
        length: live positions are below it.
        page_size: slots of a frame.
    """
    if table.is_cuda:
        from kvikk.memory.gpu.pack import lay_out as lay_out_on_gpu  # imports triton

        return lay_out_on_gpu(body, table, start=start, length=length, page_size=page_size)
    lanes, columns = table.shape
    body_slots = 0 if body is None else body.shape[1]
    positions = torch.arange(start, start + columns * page_size - body_slots, device=table.device).repeat(lanes, 1)
    if body is not None:
        positions = torch.cat([body, positions], dim=1)
    return positions, positions < length


def places(
    keep: Tensor, positions: Tensor, before: Tensor, after: Tensor, counts: IntArray, *, page_size: int
) -> tuple[Packed, Tensor]:
    """Where each kept slot goes, when those of a lane are packed in their order.

    Args:
        keep: `[lanes, slots]` bool.
        positions: `[lanes, slots]` int64, of what the slots hold.
        before: `[lanes, columns]` int64, the frames that the slots lie in.
        after: `[lanes, columns]` int64, the frames that they go to, enough for the lane that keeps most.
        counts: `[lanes]`, how many each lane keeps.
        page_size: slots of a frame.

    Returns:
        What the body's slots are; and `[4, kept]` int64, of each move the frame and the offset before, then after. They
        lie one lane after the other, those that stay where they are among them.
    """
    kept = int(counts.sum())
    lane, slot = keep.nonzero_static(size=kept).unbind(1)
    place = torch.arange(kept, device=keep.device) - upload(np.cumsum(counts) - counts, keep.device)[lane]
    shape = len(after), after.shape[1] * page_size
    order = torch.zeros(shape, dtype=torch.int64, device=keep.device)
    order[lane, place] = slot
    packed = torch.full(shape, NO_POSITION, dtype=torch.int32, device=keep.device)
    packed[lane, place] = positions[lane, slot].int()
    source, target = before[lane, slot // page_size], after[lane, place // page_size]
    return Packed(packed, order), torch.stack((source, slot % page_size, target, place % page_size))


def moves(held: Held, keep: Keep, plan: Compaction) -> tuple[Packed, Tensor]:
    """`places` of a compaction."""
    mask = keep if isinstance(keep, Tensor) else keep.mask(held, plan.counts)
    after = upload(plan.frames, held.device)
    return places(mask, held.positions, held.table, after, plan.counts, page_size=held.page_size)

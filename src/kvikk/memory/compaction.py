"""From a mask of what is kept to a smaller body: which frames stay, which tokens move, what becomes free.

Kept tokens are packed in the order of their positions. That moves more of them than filling holes would, by at most
what is kept, and it makes the order of a lane's slots, and so every rounding of its softmax, a function of what is kept
alone: never of which blocks happened to be shared when the row was compacted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Held:
    """A row's slots before compaction, in the order of positions: its body, then its tail's blocks.

    Args:
        frames: `[lanes, columns]`, the null frame where a lane has none.
        in_body: `[lanes]`, frames of the body, which are the first of each lane and the row's own.
        is_own: `[blocks]` of the tail, whether the row alone owns them and may write to them.
        table: `frames`, on the device.
        positions: `[lanes, columns * page_size]` int64 on the device.
        live: the same shape, bool: what attention reads now.
    """

    frames: IntArray
    in_body: IntArray
    is_own: NDArray[np.bool_]
    table: Tensor
    positions: Tensor
    live: Tensor

    @property
    def body_columns(self) -> int:
        """Columns before those of the tail."""
        return int(self.frames.shape[1]) - len(self.is_own)

    def first(self, blocks: int, page_size: int) -> Held:
        """The body and the first blocks of the tail only."""
        columns = self.body_columns + blocks
        slots = columns * page_size
        return replace(
            self, frames=self.frames[:, :columns], is_own=self.is_own[:blocks], table=self.table[:, :columns],
            positions=self.positions[:, :slots], live=self.live[:, :slots],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moves:
    """Tokens to copy. A lane's are copied together: all its sources are read before one of its targets is written.

    Those that stay where they are are among them: to leave them out, the host would have to wait for how many they are.

    Args:
        counts: `[lanes]`, how many of the moves are each lane's: they lie one lane after the other.
        sources, targets: `[2, moves]` int64 on the device: frames, and offsets in them.
    """

    counts: IntArray
    sources: Tensor
    targets: Tensor


@dataclass(frozen=True, slots=True)
class Compaction:
    """A body to be.

    Args:
        body: with its frames, lengths and positions; its policy state is the caller's to move with `gather`.
        moves: what to copy before it is read.
        is_used: `[blocks]` of the tail, of which the body has frames now.
        freed: frames of the old body, and of these blocks, that it does not need.
    """

    body: Body
    moves: Moves
    is_used: NDArray[np.bool_]
    freed: IntArray
    _order: Tensor

    def gather(self, values: Tensor) -> Tensor:
        """What belongs to each slot after compaction: from `[lanes, slots]` before to that after."""
        return values.gather(1, self._order)


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
    start = 0 if body is None else body.stop
    frames = np.asarray(blocks, dtype=np.int64) * lanes + np.arange(lanes)[:, None]
    in_body = np.zeros(lanes, dtype=np.int64)
    positions = torch.arange(start, start + len(blocks) * page_size, device=device).repeat(lanes, 1)
    if body is not None:
        frames, in_body = np.concatenate([body.frames, frames], axis=1), -(-body.lengths // page_size)
        positions = torch.cat([body.positions, positions], dim=1)
    return Held(frames, in_body, np.asarray(is_own, dtype=bool), upload(frames, device), positions, positions < length)


def frames_wanted(held: Held, counts: IntArray, page_size: int) -> IntArray:
    """Frames that each lane lacks to hold `counts` `[lanes]` tokens in frames of its own."""
    lacking: IntArray = -(-counts // page_size) - held.in_body - np.count_nonzero(held.is_own)
    return np.maximum(lacking, 0)


@torch.inference_mode()
def plan_compaction(
    held: Held, keep: Tensor, counts: IntArray, fresh: IntArray, *, stop: Position, page_size: int
) -> Compaction:
    """Pack what is kept into frames of the row's own. Does not wait for the device.

    Args:
        held: the row's slots.
        keep: `[lanes, slots]` bool on the device, true for live slots only.
        counts: `[lanes]`, how many each lane keeps: those that `keep` says.
        fresh: `[sum(frames_wanted)]`, frames for the lanes that lack some, lane by lane.
        stop: where the tail begins afterwards.
        page_size: slots of a frame.
    """
    needed, in_body = -(-counts // page_size)[:, None], held.in_body[:, None]
    of_body = np.arange(held.body_columns) < np.minimum(in_body, needed)
    of_tail = held.is_own & (np.cumsum(held.is_own) <= needed - in_body)
    own = np.minimum(needed, in_body + np.count_nonzero(held.is_own))
    column = np.arange(needed.max(initial=0))
    frames = np.full((len(counts), len(column)), NULL_BLOCK, dtype=np.int64)
    frames[column < own] = held.frames[np.concatenate([of_body, of_tail], axis=1)]
    is_lacking = (column >= own) & (column < needed)
    assert len(fresh) == np.count_nonzero(is_lacking)
    frames[is_lacking] = fresh
    is_used: NDArray[np.bool_] = np.any(of_tail, axis=0)
    is_freed = np.arange(held.frames.shape[1]) < in_body
    is_freed[:, : held.body_columns] &= ~of_body
    is_freed[:, held.body_columns :] = is_used & ~of_tail
    first = np.cumsum(counts) - counts
    table = upload(np.column_stack([first, frames]), keep.device)
    order, positions, places = pack(
        keep, held.positions, held.table, table[:, 1:], table[:, 0], kept=int(counts.sum()), page_size=page_size
    )
    return Compaction(
        body=Body(frames=frames, lengths=counts, stop=stop, positions=positions),
        moves=Moves(counts=counts, sources=places[:2], targets=places[2:]),
        is_used=is_used,
        freed=held.frames[is_freed],
        _order=order,
    )


def pack(
    keep: Tensor, positions: Tensor, before: Tensor, after: Tensor, first: Tensor, *, kept: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each kept slot goes, when those of a lane are packed in their order.

    Args:
        keep: `[lanes, slots]` bool.
        positions: `[lanes, slots]` int64, of what the slots hold.
        before: `[lanes, columns]` int64, the frames that the slots lie in.
        after: `[lanes, columns]` int64, the frames that they go to, enough for the lane that keeps most.
        first: `[lanes]` int64, how many the lanes before keep.
        kept: how many all lanes keep.
        page_size: slots of a frame.

    Returns:
        `[lanes, slots]` int64, the slot before of each slot after, 0 beyond a lane's last; the same shape in int32, its
        position, `NO_POSITION` there; `[4, kept]` int64, of each move the frame and the offset before, then after.
    """
    if keep.is_cuda:
        from kvikk.memory.gpu.pack import pack as pack_on_gpu  # imports triton

        return pack_on_gpu(keep, positions, before, after, first, kept=kept, page_size=page_size)
    lane, slot = keep.nonzero_static(size=kept).unbind(1)
    place = torch.arange(kept, device=keep.device) - first[lane]
    shape = len(after), after.shape[1] * page_size
    order = torch.zeros(shape, dtype=torch.int64, device=keep.device)
    order[lane, place] = slot
    packed = torch.full(shape, NO_POSITION, dtype=torch.int32, device=keep.device)
    packed[lane, place] = positions[lane, slot].int()
    source, target = before[lane, slot // page_size], after[lane, place // page_size]
    return order, packed, torch.stack((source, slot % page_size, target, place % page_size))

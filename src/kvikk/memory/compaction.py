"""From a mask of what is kept to a smaller body: which frames stay, which tokens move, what becomes free.

Kept tokens are packed in the order of their positions. That moves more of them than filling holes would, by at most
what is kept, and it makes the order of a lane's slots, and so every rounding of its softmax, a function of what is kept
alone: never of which blocks happened to be shared when the row was compacted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvikk.memory.body import Body, IntArray
from kvikk.memory.upload import upload
from kvikk.types import NULL_BLOCK, BlockId, Position


@dataclass(frozen=True, slots=True)
class Held:
    """A row's slots before compaction, in the order of positions: its body, then its tail's blocks.

    Args:
        frames: `[lanes, columns]`, the null frame where a lane has none.
        is_own: `[lanes, columns]`, frames that the row alone owns and may write to.
        positions: `[lanes, columns * page_size]` int32 on the device.
        live: the same shape, bool: what attention reads now.
    """

    frames: IntArray
    is_own: NDArray[np.bool_]
    positions: Tensor
    live: Tensor

    def first(self, columns: int, page_size: int) -> Held:
        """The first columns only."""
        slots = columns * page_size
        return Held(self.frames[:, :columns], self.is_own[:, :columns], self.positions[:, :slots], self.live[:, :slots])


@dataclass(frozen=True, slots=True)
class Moves:
    """Tokens to copy. A lane's are copied together: all its sources are read before one of its targets is written.

    Args:
        counts: `[lanes]`, how many of the moves are each lane's: they lie one lane after the other.
        sources, targets: `[moves]` int64 slots, `frame * page_size + offset`, on the device.
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
        freed: frames of the row that the body does not need.
    """

    body: Body
    moves: Moves
    freed: IntArray
    _kept: tuple[Tensor, Tensor, Tensor]

    def gather(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """What belongs to each slot after compaction: from `[lanes, slots]` before to that after."""
        lane, slot, rank = self._kept
        moved = values.new_full(self.body.positions.shape, fill)
        moved[lane, rank] = values[lane, slot]
        return moved


def held_by(
    body: Body | None,
    blocks: Sequence[BlockId],
    is_own: Sequence[bool],
    *,
    length: int,
    lanes: int,
    page_size: int,
    device: torch.device,
    before: Held | None = None,
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
        before: the same slots, and maybe more behind them, as they were before frames moved or blocks changed hands.
    """
    start = 0 if body is None else body.stop
    frames = np.asarray(blocks, dtype=np.int64)[None, :] * lanes + np.arange(lanes)[:, None]
    own = np.broadcast_to(np.asarray(is_own, dtype=bool), frames.shape)
    if body is not None:
        frames = np.concatenate([body.frames, frames], axis=1)
        own = np.concatenate([body.live_columns(page_size), own], axis=1)
    if before is not None:
        slots = frames.shape[1] * page_size
        return Held(frames, own, before.positions[:, :slots], before.live[:, :slots])
    positions = torch.arange(start, start + len(blocks) * page_size, dtype=torch.int32, device=device)
    positions = positions.expand(lanes, -1)
    live = positions < length
    if body is not None:
        in_body = torch.arange(body.positions.shape[1], device=device) < upload(body.lengths, device)[:, None]
        positions = torch.cat([body.positions, positions], dim=1)
        live = torch.cat([in_body, live], dim=1)
    return Held(frames, own, positions, live)


def frames_wanted(held: Held, counts: IntArray, page_size: int) -> IntArray:
    """Frames that each lane lacks to hold `counts` `[lanes]` tokens in frames of its own."""
    lacking: IntArray = -(-counts // page_size) - held.is_own.sum(axis=1)
    return np.maximum(lacking, 0)


def plan_compaction(
    held: Held, keep: Tensor, counts: IntArray, fresh: IntArray, *, stop: Position, page_size: int
) -> Compaction:
    """Pack what is kept into frames of the row's own. Waits for the device once, to know how many tokens move.

    Args:
        held: the row's slots.
        keep: `[lanes, slots]` bool on the device, true for live slots only.
        counts: `[lanes]`, how many each lane keeps: those that `keep` says.
        fresh: `[sum(frames_wanted)]`, frames for the lanes that lack some, lane by lane.
        stop: where the tail begins afterwards.
        page_size: slots of a frame.
    """
    lanes = len(counts)
    needed = -(-counts // page_size)
    wanted = frames_wanted(held, counts, page_size)
    columns = int(needed.max(initial=0))
    rank = np.cumsum(held.is_own, axis=1) - 1
    stays = held.is_own & (rank < needed[:, None])
    frames = np.full((lanes, columns), NULL_BLOCK, dtype=np.int64)
    lane_of, column_of = np.nonzero(stays)
    frames[lane_of, rank[lane_of, column_of]] = held.frames[stays]
    at = np.arange(columns)
    own = held.is_own.sum(axis=1)[:, None]
    frames[(at >= own) & (at < needed[:, None])] = fresh
    assert len(fresh) == int(wanted.sum())

    device, total = keep.device, int(counts.sum())
    first = (np.cumsum(counts) - counts)[:, None]  # of the kept tokens of each lane
    table = upload(np.hstack([first, frames * page_size, held.frames * page_size]), device)
    offsets, after, before = table[:, 0], table[:, 1 : 1 + columns], table[:, 1 + columns :]
    lane, slot = keep.nonzero_static(size=total).unbind(1)
    order = torch.arange(total, device=device) - offsets[lane]
    sources = before[lane, slot // page_size] + slot % page_size
    targets = after[lane, order // page_size] + order % page_size
    is_moved = sources != targets
    moved_of_lane = table.new_zeros(lanes).scatter_add_(0, lane, is_moved.long()).cpu().numpy()
    moved = is_moved.nonzero_static(size=int(moved_of_lane.sum())).view(-1)
    positions = torch.zeros((lanes, columns * page_size), dtype=torch.int32, device=device)
    positions[lane, order] = held.positions[lane, slot]
    return Compaction(
        body=Body(frames=frames, lengths=counts, stop=stop, positions=positions),
        moves=Moves(counts=moved_of_lane, sources=sources[moved], targets=targets[moved]),
        freed=held.frames[held.is_own & ~stays],
        _kept=(lane, slot, order),
    )

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
        table: `frames`, on the device.
        positions: `[lanes, columns * page_size]` int32 on the device.
        live: the same shape, bool: what attention reads now.
    """

    frames: IntArray
    is_own: NDArray[np.bool_]
    table: Tensor
    positions: Tensor
    live: Tensor

    def first(self, columns: int, page_size: int) -> Held:
        """The first columns only."""
        slots = columns * page_size
        on_host = self.frames[:, :columns], self.is_own[:, :columns]
        return Held(*on_host, self.table[:, :columns], self.positions[:, :slots], self.live[:, :slots])


@dataclass(frozen=True, slots=True)
class Moves:
    """Tokens to copy. A lane's are copied together: all its sources are read before one of its targets is written.

    Those that stay where they are are among them: to leave them out, the host would have to wait for how many they are.

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
        known = before.first(frames.shape[1], page_size)
        is_same = np.array_equal(frames, known.frames)
        table = known.table if is_same else upload(frames, device)
        return Held(frames, own, table, known.positions, known.live)
    positions = torch.arange(start, start + len(blocks) * page_size, dtype=torch.int32, device=device)
    positions = positions.expand(lanes, -1)
    live = positions < length
    if body is not None:
        in_body = torch.arange(body.positions.shape[1], device=device) < upload(body.lengths, device)[:, None]
        positions = torch.cat([body.positions, positions], dim=1)
        live = torch.cat([in_body, live], dim=1)
    return Held(frames, own, upload(frames, device), positions, live)


def frames_wanted(held: Held, counts: IntArray, page_size: int) -> IntArray:
    """Frames that each lane lacks to hold `counts` `[lanes]` tokens in frames of its own."""
    lacking: IntArray = -(-counts // page_size) - held.is_own.sum(axis=1)
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
    needed = -(-counts // page_size)[:, None]
    stays = held.is_own & (np.cumsum(held.is_own, axis=1) <= needed)
    own = stays.sum(axis=1, keepdims=True)
    column = np.arange(needed.max(initial=0))
    frames = np.full((len(counts), len(column)), NULL_BLOCK, dtype=np.int64)
    frames[column < own] = held.frames[stays]
    is_lacking = (column >= own) & (column < needed)
    assert len(fresh) == np.count_nonzero(is_lacking)
    frames[is_lacking] = fresh
    first = np.cumsum(counts) - counts
    table = upload(np.column_stack([first, frames]), keep.device)
    order, sources, targets = pack(
        keep, held.table, table[:, 1:], table[:, 0], kept=int(counts.sum()), page_size=page_size
    )
    return Compaction(
        body=Body(frames=frames, lengths=counts, stop=stop, positions=held.positions.gather(1, order)),
        moves=Moves(counts=counts, sources=sources, targets=targets),
        freed=held.frames[held.is_own & ~stays],
        _order=order,
    )


def pack(
    keep: Tensor, before: Tensor, after: Tensor, first: Tensor, *, kept: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Where each kept slot goes, when those of a lane are packed in their order.

    Args:
        keep: `[lanes, slots]` bool.
        before: `[lanes, columns]` int64, the frames that the slots lie in.
        after: `[lanes, columns]` int64, the frames that they go to, enough for the lane that keeps most.
        first: `[lanes]` int64, how many the lanes before keep.
        kept: how many all lanes keep.
        page_size: slots of a frame.

    Returns:
        `[lanes, slots]` int64, the slot before of each slot after, 0 beyond a lane's last; and `Moves.sources` and
        `Moves.targets`.
    """
    if keep.is_cuda:
        from kvikk.memory.gpu.pack import pack as pack_on_gpu  # imports triton

        return pack_on_gpu(keep, before, after, first, kept=kept, page_size=page_size)
    lane, slot = keep.nonzero_static(size=kept).unbind(1)
    place = torch.arange(kept, device=keep.device) - first[lane]
    order = torch.zeros((len(after), after.shape[1] * page_size), dtype=torch.int64, device=keep.device)
    order[lane, place] = slot
    sources = before[lane, slot // page_size] * page_size + slot % page_size
    targets = after[lane, place // page_size] * page_size + place % page_size
    return order, sources, targets

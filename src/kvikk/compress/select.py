"""From scores and numbers to the slots that stay."""

from __future__ import annotations

import torch
from torch import Tensor

from kvikk.compress.policy import count_unscored
from kvikk.compress.slots import LayerSlots

FIRST, LAST = -(2**63), 2**63 - 1
"""Sorting keys before and after those of all scores."""


def ranking(scores: Tensor, slots: LayerSlots, first: Tensor) -> Tensor:
    """The place of each slot in its lane's order of keeping, from 0: those of `first`, then by score, then the dead.

    Of equal scores the lower position comes first, and of equal positions the earlier slot. A live slot of -inf is the
    last of the live ones.

    Args:
        scores: `[kv_heads, slots]` fp32; a live slot has a finite one or -inf.
        slots: which token each slot holds.
        first: `[kv_heads, slots]` bool, live slots only.

    Returns:
        `[kv_heads, slots]` int64.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0: they are equal
    ascending = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()  # integers in the order of the floats
    key = (-ascending << 32) | slots.positions  # one key for both: the best first, then the lower position
    key = torch.where(first, slots.positions + FIRST, key).masked_fill_(~slots.live, LAST)
    order = key.argsort(dim=-1, stable=True)
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter(-1, order, place)


def keep_mask(scores: Tensor, slots: LayerSlots, counts: Tensor | int, protected: Tensor) -> Tensor:
    """Which slots stay: those that are protected, and the best of the others.

    A lane keeps `counts` slots in all, or all that are alive where these are fewer. What is protected stays even where
    it is more than that.

    Args:
        scores: `[kv_heads, slots]` fp32, higher = keep; of equal ones the lower position stays.
        slots: which token each slot holds.
        counts: slots that each KV head keeps: `[kv_heads]` int64, or one number for all.
        protected: `[kv_heads, slots]` bool, live slots only: `slots.protected(sinks=4, window=32)`.

    Returns:
        `[kv_heads, slots]` bool, live slots only.
    """
    if scores.is_cuda:
        from kvikk.compress.gpu.best import keep_mask as on_gpu  # imports triton

        return on_gpu(scores, slots, counts, protected)
    wanted = protected.sum(-1).clamp(min=counts)
    return slots.live & (ranking(scores, slots, protected) < wanted[:, None])


def keep_best(scores: Tensor, slots: LayerSlots, count: int, *, sinks: int, window: int) -> tuple[Tensor, Tensor]:
    """`keep_mask` where all lanes keep as many, with the sinks and the window of `slots.protected`.

    Args:
        scores: `[lanes, slots]` fp32.
        slots: which token each slot holds.
        count: slots that each lane keeps.
        sinks: first positions of the row, which stay.
        window: last positions of the row, which stay.

    Returns:
        `[lanes, slots]` bool, what stays; `[lanes]` int64, live slots with NaN or +inf.
    """
    if scores.is_cuda:
        from kvikk.compress.gpu.best import keep_best as on_gpu  # imports triton

        return on_gpu(scores, slots, count, sinks=sinks, window=window)
    protected = slots.protected(sinks=sinks, window=window)
    return keep_mask(scores, slots, count, protected), count_unscored(scores, slots.live)

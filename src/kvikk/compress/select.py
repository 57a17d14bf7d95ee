"""From scores and numbers to the slots that stay."""

from __future__ import annotations

import torch
from torch import Tensor

from kvikk.compress.slots import LayerSlots


def best_first(scores: Tensor, slots: LayerSlots, protected: Tensor) -> Tensor:
    """Each lane's slots in the order in which they are kept: protected, then by score, then dead.

    Of equal scores the lower position comes first. A live slot of -inf is the last of the live ones.

    Args:
        scores: `[kv_heads, slots]` fp32; a live slot has a finite one or -inf.
        slots: which token each slot holds.
        protected: `[kv_heads, slots]` bool, live slots only.

    Returns:
        `[kv_heads, slots]` int64.
    """
    by_position = slots.order
    ranked = scores.masked_fill(protected, torch.inf).masked_fill(~slots.live, -torch.inf).gather(-1, by_position)
    # Stable: dead slots stand last in the order of positions, and so stay behind a live one of -inf.
    return by_position.gather(-1, ranked.argsort(dim=-1, descending=True, stable=True))


def keep_mask(scores: Tensor, slots: LayerSlots, counts: Tensor | int, *, sinks: int, window: int) -> Tensor:
    """Which slots stay: the first `sinks` and the last `window` positions, and the best of the others.

    A lane keeps `counts` slots in all, or all that are alive where these are fewer. What is protected stays even where
    it is more than that.

    Args:
        scores: `[kv_heads, slots]` fp32, higher = keep; of equal ones the lower position stays.
        slots: which token each slot holds.
        counts: slots that each KV head keeps: `[kv_heads]` int64, or one number for all.
        sinks: first positions of the row.
        window: last positions of the row.

    Returns:
        `[kv_heads, slots]` bool, live slots only.
    """
    protected = slots.protected(sinks=sinks, window=window)
    wanted = torch.as_tensor(counts, device=scores.device).expand(len(scores))
    order = best_first(scores, slots, protected)
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter(-1, order, place)
    return slots.live & (rank < torch.maximum(wanted, protected.sum(-1))[:, None])

"""How much keys repeat each other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kvikk.compress.slots import LayerSlots

CHUNK_ELEMENTS = 2**24
"""Cosines held at once: 64 MiB in fp32."""
CHUNK_KEYS = 256
"""Of the latest keys, so many are compared with all others at a time."""


def redundancy(keys: Tensor, slots: LayerSlots, *, similar: float) -> Tensor:
    """For each live slot, the mean cosine of the lane's other keys with its own, except those that it is to stand for.

    Of the keys that are like one key (cosine above `similar`), the latest in the text is to stay: that pair does not
    count. Where no key is alike, the pair with the lane's first key is left out, as in R-KV's code (arXiv 2505.24133).

    Args:
        keys: `[kv_heads, slots, head_dim]`; dead slots may hold anything.
        slots: which token each slot holds.
        similar: a cosine, 0 or more.

    Returns:
        `[kv_heads, slots]` fp32. Takes time with the square of the slots where few keys are alike, and waits for the
        device.
    """
    order, live = slots.order, slots.live
    units = F.normalize(torch.where(live[..., None], keys.float(), 0), dim=-1)
    units = units.gather(1, order[..., None].expand_as(units))  # in the order of the text; dead ones are zero
    total = (units @ units.sum(1)[..., None]).squeeze(-1) - units.square().sum(-1)
    place = torch.arange(live.shape[1], device=keys.device)
    is_open = place < live.sum(-1, keepdim=True)  # no key that is alike has been found
    at_once = max(1, min(CHUNK_KEYS, CHUNK_ELEMENTS // live.numel()))
    for columns in reversed(torch.split(place, at_once)):
        rows = is_open.any(0).nonzero().squeeze(-1)
        if not len(rows):
            break
        cosines = units[:, rows] @ units[:, columns].transpose(1, 2)
        is_alike = (cosines > similar) & is_open[:, rows, None] & (rows[:, None] != columns)
        latest = torch.where(is_alike, columns, -1).amax(-1, keepdim=True)
        total[:, columns] -= torch.where(columns == latest, cosines, 0).sum(1)
        is_open[:, rows] &= latest.squeeze(-1) < 0
    is_open[:, 0] = False
    total[:, 0] -= torch.where(is_open, (units @ units[:, 0, :, None]).squeeze(-1), 0).sum(-1)
    return torch.empty_like(total).scatter(-1, order, total / live.sum(-1, keepdim=True).clamp(min=1))

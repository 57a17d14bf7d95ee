"""How much keys repeat each other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kvikk.compress.slots import LayerSlots

CHUNK_ELEMENTS = 2**24
"""Cosines held at once: 64 MiB in fp32."""


def redundancy(keys: Tensor, slots: LayerSlots, *, similar: float) -> Tensor:
    """For each live slot, the mean cosine of the lane's other keys with its own, except those that it is to stand for.

    Of the keys that are like one key (cosine above `similar`), the latest in the text is to stay: that pair does not
    count. Where no key is alike, the pair with the lane's first key is left out, as in R-KV's code (arXiv 2505.24133).

    Args:
        keys: `[kv_heads, slots, head_dim]`; dead slots may hold anything.
        slots: which token each slot holds.
        similar: a cosine.

    Returns:
        `[kv_heads, slots]` fp32. Takes time with the square of the slots.
    """
    order, live = slots.order, slots.live
    units = F.normalize(torch.where(live[..., None], keys.float(), 0), dim=-1)
    units = units.gather(1, order[..., None].expand_as(units))  # in the order of the text; dead ones are zero
    total = torch.zeros(live.shape, device=keys.device)
    place = torch.arange(live.shape[1], device=keys.device)
    for rows in torch.split(place, max(1, CHUNK_ELEMENTS // live.numel())):
        cosines = units[:, rows] @ units.transpose(1, 2)
        cosines[:, rows - rows[0], rows] = 0
        latest = torch.where(cosines > similar, place.int(), 0).amax(-1, keepdim=True).long()
        cosines.scatter_(-1, latest, 0)
        total += cosines.sum(1)
    return torch.empty_like(total).scatter(-1, order, total / live.sum(-1, keepdim=True).clamp(min=1))

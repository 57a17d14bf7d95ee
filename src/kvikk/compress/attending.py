"""Attention weights as policies see them: exact, in fp32, over live slots only."""

from __future__ import annotations

import torch
from torch import Tensor

from kvikk.compress.slots import LayerSlots

CHUNK_ELEMENTS = 2**24
"""Attention weights that `accumulated_attention` holds at once: 64 MiB in fp32."""


def attention_logits(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Scaled products of queries and keys, `[q_heads, w, slots]` fp32; anything where a slot is dead.

    Args:
        queries: `[q_heads, w, head_dim]`.
        keys: `[kv_heads, slots, head_dim]`.
        scale: of the products.
    """
    kv_heads, slots, head_dim = keys.shape
    grouped = queries.float().reshape(kv_heads, -1, head_dim)
    products = grouped @ keys.float().transpose(1, 2) * scale
    return products.view(len(queries), -1, slots)


def attention_weights(logits: Tensor, query_positions: Tensor, slots: LayerSlots) -> Tensor:
    """What each query gives to each slot: softmax over the live slots up to its own position.

    Args:
        logits: `[q_heads, w, slots]` fp32.
        query_positions: `[w]` int64.
        slots: which token each slot holds.

    Returns:
        `[q_heads, w, slots]` fp32; a query that sees no slot gives nothing.
    """
    seen = slots.live[:, None] & (slots.positions[:, None] <= query_positions[:, None])
    return masked_softmax(logits, seen.repeat_interleave(len(logits) // len(seen), dim=0))


def masked_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last axis among what the mask admits; 0 elsewhere, also where it admits nothing."""
    hidden = ~mask
    return logits.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill_(hidden, 0.0)  # NaN where all is hidden


def accumulated_attention(
    queries: Tensor, query_positions: Tensor, keys: Tensor, slots: LayerSlots, *, scale: float
) -> Tensor:
    """The attention mass of each slot: probability that it was given by these queries, added up over them.

    The query heads of a KV head are averaged, so that a lane's mass adds up to the number of queries.

    Args:
        queries: `[q_heads, w, head_dim]`, any number of them: they are taken in chunks.
        query_positions: `[w]` int64.
        keys: `[kv_heads, slots, head_dim]`; dead slots may hold anything.
        slots: which token each slot holds.
        scale: of the logits.

    Returns:
        `[kv_heads, slots]` fp32, 0 where a slot is dead.
    """
    if keys.is_cuda:
        from kvikk.compress.gpu.mass import accumulated_attention as on_gpu  # imports triton

        return on_gpu(queries, query_positions, keys, slots, scale=scale)
    kv_heads, columns, _ = keys.shape
    mass = torch.zeros((kv_heads, columns), dtype=torch.float32, device=keys.device)
    chunk = max(1, CHUNK_ELEMENTS // (len(queries) * columns))
    for some, at in zip(torch.split(queries, chunk, dim=1), torch.split(query_positions, chunk), strict=True):
        weights = attention_weights(attention_logits(some, keys, scale), at, slots)
        mass += weights.sum(1).view(kv_heads, -1, columns).mean(1)
    return mass


def mean_attention(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    slots: LayerSlots,
    *,
    scale: float,
    only_older: bool = False,
) -> Tensor:
    """What each slot gets of a query, in the mean over the queries and over the query heads of a KV head.

    Takes and gives what `accumulated_attention` does, but that on a CPU it has the weights of all queries at once. With
    `only_older` slots that are not older than all queries, or dead, have 0.
    """
    if keys.is_cuda:
        from kvikk.compress.gpu.mass import accumulated_attention as on_gpu  # imports triton

        share = 1 / len(query_positions)
        return on_gpu(queries, query_positions, keys, slots, scale=scale, share=share, only_older=only_older)
    weights = attention_weights(attention_logits(queries, keys, scale), query_positions, slots)
    mean = weights.mean(1).view(len(keys), -1, keys.shape[1]).mean(1)
    return torch.where(slots.live & (slots.positions < query_positions[0]), mean, 0) if only_older else mean

"""The kernels in plain PyTorch, with the signatures of their wrappers: the statement of what is right.

They loop, and take sums in fp32 in another order, so numbers agree within rounding. `plan_twin` has the planner.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvikk.attention.gpu.attend import Bias, Partials, Tile
from kvikk.attention.gpu.planner import WorkList
from kvikk.attention.gpu.rows import DecodeRows, RunRows
from kvikk.memory.storage import KVStore
from kvikk.models.llama import rotate
from kvikk.models.protocol import HeadNorm


def attend_items(
    work: WorkList,
    partials: Partials,
    rows: DecodeRows | RunRows,
    store: KVStore,
    layer: int,
    q: Tensor,
    out: Tensor,
    *,
    tile: Tile,
    scale: float,
    lse: Tensor | None = None,
    bias: Bias | None = None,
) -> None:
    """Compute every item of a work list, as `attend.attend_items` does.

    Args:
        work: planned for these rows.
        partials: of the list's capacity.
        rows: as planned.
        store: the pool.
        layer: which layer.
        q: `[tokens, q_heads, head_dim]`.
        out: `[tokens, q_heads, head_dim]`.
        tile: not needed here: how the sums are ordered changes rounding alone.
        scale: factor on `q @ k`.
        lse: `[tokens, q_heads]` fp32 for the natural log-sum-exp; None: not wanted.
        bias: added to the logits.
    """
    group = q.shape[1] // store.geometry.kv_heads[layer]
    page = store.geometry.page_size
    plan = layer if work.items.shape[0] > 1 else 0
    for item in work.items[plan, : int(work.counts[plan, 0])].tolist():
        seat, head, token, queries, position, begin, end, _, splits, row, body, place = item[:12]
        keys, values = _read(store, layer, rows, seat, head, begin, end, body)
        heads = slice(head * group, (head + 1) * group)
        logits = q[token : token + queries, heads].float() @ keys.T * scale  # [queries, group, slots]
        if bias is not None and int(bias.offsets[row]) >= 0:
            first = int(bias.offsets[row]) + head * int(bias.strides[row])
            logits = logits + bias.values[first + begin : first + end]
        padded_body = -(-body // page) * page
        slot = torch.arange(begin, end, device=q.device)
        limit = padded_body + position + torch.arange(queries, device=q.device)
        seen = ((slot < body) | (slot >= padded_body)) & (slot <= limit[:, None])
        logits = logits.masked_fill(~seen[:, None], -math.inf)
        top = logits.amax(dim=2) if end > begin else logits.new_full(logits.shape[:2], -math.inf)
        weights = torch.exp(logits - top.nan_to_num(neginf=0.0)[:, :, None])
        sums, total = weights @ values, weights.sum(dim=2)
        if splits > 1:
            used = queries * group
            partials.sums[place, :used] = sums.flatten(0, 1)
            partials.states[place, :used, 0] = top.flatten() * math.log2(math.e)
            partials.states[place, :used, 1] = total.flatten()
            continue
        divisor = total.masked_fill(total == 0, 1.0)
        out[token : token + queries, heads] = (sums / divisor[:, :, None]).to(out.dtype)
        if lse is not None:
            lse[token : token + queries, heads] = top + divisor.log()


def _read(
    store: KVStore, layer: int, rows: DecodeRows | RunRows, seat: int, head: int, begin: int, end: int, body: int
) -> tuple[Tensor, Tensor]:
    """K and V of a lane's slots `begin..end-1`, `[slots, head_dim]` fp32 each; zeros where no slot is live."""
    geometry = store.geometry
    page = geometry.page_size
    lane = geometry.first_frame[layer] + head
    pages = []
    if rows.bodies is not None:
        first = int(rows.bodies.offsets[seat, lane])
        pages += rows.bodies.frames[first : first + -(-body // page)].tolist()
    padded_body = len(pages) * page
    blocks = rows.tables[seat, : max(-(-(end - padded_body) // page), 0)].tolist()
    pages += [block * geometry.frames_per_block + lane for block in blocks]
    kv = store.read(torch.tensor(pages, dtype=torch.int64, device=store.device)).float()  # [pages, 2, page, head_dim]
    slot = torch.arange(len(pages) * page, device=store.device)
    is_live = (slot < body) | ((slot >= padded_body) & (slot < end))
    keys, values = (kv[:, part].flatten(0, 1).where(is_live[:, None], 0.0) for part in range(2))
    return keys[begin:end], values[begin:end]


def merge_items(
    work: WorkList,
    partials: Partials,
    layer: int,
    out: Tensor,
    *,
    tile: Tile,
    group: int,
    lse: Tensor | None = None,
) -> None:
    """Write the outputs of all queries that have several items, as `merge.merge_items` does.

    Args:
        work: as computed by `attend_items`.
        partials: what it left.
        layer: which layer.
        out: `[tokens, q_heads, head_dim]`.
        tile: not needed here.
        group: query heads of a KV head.
        lse: `[tokens, q_heads]` fp32 for the natural log-sum-exp; None: not wanted.
    """
    plan = layer if work.merges.shape[0] > 1 else 0
    for merge in work.merges[plan, : int(work.counts[plan, 1])].tolist():
        first, token, head, queries, splits = merge[:5]
        used = queries * group
        largest, weights = partials.states[first : first + splits, :used].unbind(dim=2)  # [splits, used]
        top = largest.amax(dim=0)
        factors = torch.exp2(largest - top.nan_to_num(neginf=0.0))
        sums = (partials.sums[first : first + splits, :used] * factors[:, :, None]).sum(dim=0)
        total = (weights * factors).sum(dim=0)
        divisor = total.masked_fill(total == 0, 1.0)
        heads = slice(head * group, (head + 1) * group)
        out[token : token + queries, heads] = (sums / divisor[:, None]).unflatten(0, (queries, group)).to(out.dtype)
        if lse is not None:
            lse[token : token + queries, heads] = ((top + divisor.log2()) * math.log(2)).view(queries, group)


def store_heads(
    store: KVStore,
    layer: int,
    heads: Tensor,
    slots: Tensor,
    q_out: Tensor,
    *,
    rope: Tensor | None = None,
    positions: Tensor | None = None,
    norm: HeadNorm | None = None,
) -> None:
    """Normalise and rotate Q and K of a layer, store K and V, leave Q for attention, as `store.store_heads` does.

    Args:
        store: the pool.
        layer: which layer.
        heads: `[tokens, q_heads + 2 * kv_heads, head_dim]`, Q then K then V.
        slots: `[tokens]` int64, `block * page_size + offset`; -1: K and V of the token are not stored.
        q_out: `[tokens, q_heads, head_dim]`.
        rope: `[positions, 2, rotary_dim]`, cos and signed sin; None: the heads are rotated already.
        positions: `[tokens]` int64, needed with `rope`.
        norm: None: no norm of heads.
    """
    kv_heads = store.geometry.kv_heads[layer]
    q_heads = heads.shape[1] - 2 * kv_heads
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], dim=1)
    if norm is not None:
        q, k = _normed(q, norm.q_weight, norm), _normed(k, norm.k_weight, norm)
    if rope is not None and positions is not None:
        cos, sin = rope[positions].unsqueeze(2).unbind(1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    q_out.copy_(q)
    is_stored = slots >= 0
    store.write(layer, slots[is_stored], k[is_stored], v[is_stored])


def _normed(x: Tensor, weight: Tensor, norm: HeadNorm) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + norm.eps)
    if norm.wide:
        return (scaled * weight.float()).to(x.dtype)
    return (scaled.to(x.dtype).float() * weight.float()).to(x.dtype)


def keep_queries(q: Tensor, places: Tensor, target: Tensor) -> None:
    """Copy the queries that have a place, as `watch.keep_queries` does."""
    kept = places >= 0
    target[places[kept].long()] = q[kept]

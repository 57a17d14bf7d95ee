"""Attention over pages in plain PyTorch, on any device: the twin that every kernel is tested against.

Only live slots are ever read, maths is in fp32 whatever the storage is, and each run is computed by itself, so
that its result cannot depend on the other runs of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvikk.attention.plan import QueryRun, Schedule, plan_step
from kvikk.memory.storage import KVStore
from kvikk.types import Numerics

_QUERY_TILE = 256
"""Queries whose logits exist at one time: bounds memory, and changes no more than a product's rounding."""


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    start: int,
    scale: float,
    bias: Tensor | None = None,
    numerics: Numerics = "fast",
) -> tuple[Tensor, Tensor]:
    """Causal attention of consecutive queries over the whole KV of their row.

    Args:
        q: `[queries, q_heads, head_dim]`, the queries at slots `start` and on.
        k: `[kv_heads, slots, head_dim]`, `slots >= start + queries`.
        v: `[kv_heads, slots, head_dim]`.
        start: slot of the first query's own K and V, which sees the slots up to it: its position, in a uniform row.
        scale: factor on `q @ k`.
        bias: `[kv_heads, >= slots]`, added to the logits.
        numerics: `exact` computes each query by itself, over just the slots that it sees.

    Returns:
        Output `[queries, q_heads, head_dim]` and log-sum-exp `[queries, q_heads]`, both fp32; a query all of whose
        slots are biased by -inf gives (0, -inf).
    """
    queries, q_heads, head_dim = q.shape
    kv_heads = k.shape[0]
    group = _group(q_heads, kv_heads)
    if bias is not None and bias.shape[0] != kv_heads:
        raise ValueError(f"the bias is for {bias.shape[0]} KV heads, the layer has {kv_heads}")
    # A weight of 0 does not undo NaN: where the queries' own values are not finite, each takes just what it sees.
    is_finite = bool(v[:, start + 1 : start + queries].isfinite().all())
    tile_queries = 1 if numerics == "exact" or not is_finite else _QUERY_TILE
    out = torch.empty((queries, q_heads, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((queries, q_heads), dtype=torch.float32, device=q.device)
    for first in range(0, queries, tile_queries):
        tile = q[first : first + tile_queries].float()
        n, seen = tile.shape[0], start + min(first + tile_queries, queries)
        # The group is folded into the query axis: [kv_heads, n * group, head_dim].
        folded = tile.view(n, kv_heads, group, head_dim).permute(1, 0, 2, 3).reshape(kv_heads, n * group, head_dim)
        logits = torch.matmul(folded, k[:, :seen].float().transpose(1, 2)) * scale
        logits = logits.view(kv_heads, n, group, seen)
        if bias is not None:
            logits = logits + bias[:, None, None, :seen].to(logits)
        position = torch.arange(start + first, start + first + n, device=q.device)
        hidden = torch.arange(seen, device=q.device)[None, :] > position[:, None]
        logits = logits.masked_fill(hidden[None, :, None, :], float("-inf"))
        total = torch.logsumexp(logits, dim=-1, keepdim=True)
        weights = torch.exp(logits - total.masked_fill(total == float("-inf"), 0.0))
        part = torch.matmul(weights.view(kv_heads, n * group, seen), v[:, :seen].float())
        part = part.view(kv_heads, n, group, head_dim).permute(1, 0, 2, 3)
        out[first : first + n] = part.reshape(n, q_heads, head_dim)
        lse[first : first + n] = total.squeeze(-1).permute(1, 0, 2).reshape(n, q_heads)
    return out, lse


def _group(q_heads: int, kv_heads: int) -> int:
    """Query heads that share a KV head."""
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads cannot share {kv_heads} KV heads evenly: check the model's config")
    return q_heads // kv_heads


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint sets of slots into attention over their union.

    Parts are summed in the order given. A part that saw nothing is (0, -inf); when all parts are, so is the result.

    Args:
        outs: `[..., head_dim]` each.
        lses: `[...]` each, natural log.

    Returns:
        `[..., head_dim]` and `[...]`, both fp32.
    """
    lse = torch.stack([part.float() for part in lses])
    top = lse.amax(dim=0)
    top = torch.where(top == float("-inf"), torch.zeros_like(top), top)
    weights = torch.exp(lse - top)
    total = weights.sum(dim=0)
    share = weights / torch.where(total == 0, torch.ones_like(total), total)
    out = torch.zeros_like(outs[0], dtype=torch.float32)
    for part, factor in zip(outs, share, strict=True):
        out += part.float() * factor.unsqueeze(-1)
    return out, torch.log(total) + top


def read_row(store: KVStore, layer: int, table: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Gather one row's K and V of a layer, `[kv_heads, slots, head_dim]` each.

    Args:
        store: the pool.
        layer: which layer.
        table: `[blocks]` int64 on the pool's device, at least as many as hold `slots`.
        slots: live slots: what lies beyond is not returned.
    """
    geometry = store.geometry
    heads = torch.arange(geometry.kv_heads[layer], device=table.device) + geometry.first_frame[layer]
    pages = store.read(table * geometry.frames_per_block + heads[:, None])  # [kv_heads, blocks, 2, page, head_dim]
    kv = pages.permute(2, 0, 1, 3, 4).flatten(2, 3)  # [2, kv_heads, blocks * page_size, head_dim]
    return kv[0, :, :slots], kv[1, :, :slots]


def read_lane(store: KVStore, frames: Tensor, length: int) -> Tensor:
    """Gather one lane's K and V, `[2, length, head_dim]`.

    Args:
        store: the pool.
        frames: `[frames]` int64 on the pool's device, at least as many as hold `length`.
        length: live slots: what lies beyond is not returned.
    """
    pages = store.read(frames[: store.geometry.blocks_for(length)])  # [frames, 2, page_size, head_dim]
    return pages.transpose(0, 1).flatten(1, 2)[:, :length]


class ReferenceBackend:
    """PyTorch on whatever device the pool is: right for every shape, fast for none.

    A run's result does not depend on the other runs of its step, bit for bit; in `exact` numerics a position's does not
    depend on the other positions of its run either.
    """

    name = "reference"

    def __init__(self, store: KVStore, *, numerics: Numerics = "fast") -> None:
        self.store = store
        self.numerics = numerics

    def plan(self, runs: Sequence[QueryRun]) -> Schedule:
        """See `AttentionBackend.plan`."""
        return plan_step(runs, geometry=self.store.geometry, blocks=self.store.blocks)

    def begin(self, schedule: Schedule) -> ReferenceStep:
        """See `AttentionBackend.begin`."""
        device = self.store.device
        bodies = [run.body for run in schedule.runs]
        return ReferenceStep(
            backend=self,
            schedule=schedule,
            tables=[torch.from_numpy(schedule.table(r).copy()).to(device) for r in range(len(schedule.runs))],
            bodies=[None if body is None else torch.from_numpy(body.frames).to(device) for body in bodies],
            write_tokens=torch.from_numpy(schedule.write_tokens).to(device),
            write_slots=torch.from_numpy(schedule.write_slots).to(device),
        )

    def warm_up(self) -> None:
        """See `AttentionBackend.warm_up`: nothing is compiled here."""

    def attend_run(self, layer: int, run: QueryRun, q: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.attend_run`."""
        return self.begin(self.plan([run._replace(write=False)])).attend_run(layer, 0, q, scale)


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """One step of the reference backend; tables of its runs, and frames of those with a body, lie on the device."""

    backend: ReferenceBackend
    schedule: Schedule
    tables: list[Tensor]
    bodies: list[Tensor | None]
    write_tokens: Tensor
    write_slots: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """See `kvikk.models.protocol.AttentionStep.attend`."""
        plan = self.schedule
        if len(self.write_slots) == plan.tokens:
            self.backend.store.write(layer, self.write_slots, k, v)
        elif len(self.write_slots):
            at = self.write_tokens
            self.backend.store.write(layer, self.write_slots, k[at], v[at])
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for index, (run, offset) in enumerate(zip(plan.runs, plan.offsets.tolist(), strict=True)):
            span = slice(offset, offset + run.length)
            out[span] = self.attend_run(layer, index, q[span], scale)[0]
        return out

    def attend_run(self, layer: int, index: int, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attend one run to what the pool holds: output and log-sum-exp, both fp32."""
        store, numerics = self.backend.store, self.backend.numerics
        run, frames = self.schedule.runs[index], self.bodies[index]
        start = run.start - run.tail
        k, v = read_row(store, layer, self.tables[index], start + run.length)
        if run.body is None or frames is None:
            return attend_dense(q, k, v, start=start, scale=scale, bias=run.bias, numerics=numerics)
        # Lanes differ in length, so each KV head is a row of its own: its body, then the tail.
        group = _group(q.shape[1], k.shape[0])
        heads = []
        for head in range(k.shape[0]):
            lane = store.geometry.first_frame[layer] + head
            length = int(run.body.lengths[lane])
            body_k, body_v = read_lane(store, frames[lane], length)
            heads.append(
                attend_dense(
                    q[:, head * group : (head + 1) * group],
                    torch.cat((body_k, k[head]))[None],
                    torch.cat((body_v, v[head]))[None],
                    start=length + start,
                    scale=scale,
                    numerics=numerics,
                )
            )
        return torch.cat([out for out, _ in heads], dim=1), torch.cat([lse for _, lse in heads], dim=1)

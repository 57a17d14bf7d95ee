"""Steps of random rows over a poisoned pool, and dense attention that knows nothing of pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvikk.attention import QueryRun
from kvikk.geometry import KVGeometry
from kvikk.memory.storage import KVStore
from kvikk.types import BlockId, Position

LAYER = 1
"""The layer that tests run on: not the first, so that a forgotten layer offset shows."""


@dataclass
class Shape:
    """What a pool and a model look like."""

    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    page: int = 16
    dtype: torch.dtype = torch.float32
    blocks: int = 200
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def store(self) -> KVStore:
        geometry = KVGeometry(
            kv_heads=(self.kv_heads,) * 3, head_dim=self.head_dim, page_size=self.page, dtype=self.dtype
        )
        store = KVStore(geometry, self.blocks, self.device)
        store.poison()
        return store


@dataclass
class Row:
    """A row with its whole KV known: `k`, `v` are `[length, kv_heads, head_dim]`."""

    blocks: list[BlockId]
    k: Tensor
    v: Tensor


@dataclass
class World:
    """A pool with rows in it. Block tables are drawn in random order from the pool."""

    shape: Shape
    seed: int = 0
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.store = self.shape.store()
        self.free = [BlockId(b + 1) for b in torch.randperm(self.shape.blocks - 1, generator=self.random).tolist()]

    def draw(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.random).to(device=self.shape.device, dtype=self.shape.dtype)

    def row(self, length: int, stored: range) -> Row:
        """A new row of `length` positions, of which those in `stored` already lie in the pool."""
        s = self.shape
        blocks = [self.free.pop() for _ in range(-(-length // s.page))]
        k, v = self.draw(length, s.kv_heads, s.head_dim), self.draw(length, s.kv_heads, s.head_dim)
        row = Row(blocks, k, v)
        self.put(row, stored)
        self.rows.append(row)
        return row

    def put(self, row: Row, positions: range) -> None:
        at = torch.tensor(list(positions), dtype=torch.int64)
        blocks, offsets = torch.tensor(row.blocks)[at // self.shape.page], at % self.shape.page
        layer = self.store.layer(LAYER)
        layer[blocks, :, 0, offsets] = row.k[at]
        layer[blocks, :, 1, offsets] = row.v[at]


@dataclass
class Step:
    """Runs with the q, k and v of their tokens, as slices of one fused tensor, and what dense attention gives."""

    runs: list[QueryRun]
    q: Tensor
    k: Tensor
    v: Tensor
    expected: Tensor
    scale: float


def make_step(
    world: World,
    parts: list[tuple[Row, int, int]],
    *,
    write: list[bool] | None = None,
    biases: list[Tensor | None] | None = None,
) -> Step:
    """A step of runs (row, start, length). Its tokens' k and v are the rows' own."""
    s = world.shape
    scale = 1.0 / math.sqrt(s.head_dim)
    runs, fused, expected = [], [], []
    for index, (row, start, length) in enumerate(parts):
        bias = biases[index] if biases else None
        runs.append(
            QueryRun(
                blocks=row.blocks,
                start=Position(start),
                length=length,
                write=write[index] if write else True,
                bias=bias,
            )
        )
        q = world.draw(length, s.kv_heads * s.group, s.head_dim)
        span = slice(start, start + length)
        fused.append(torch.cat([q, row.k[span], row.v[span]], dim=1).flatten(1))
        expected.append(dense(q, row.k[: start + length], row.v[: start + length], start, scale, bias))
    qkv = torch.cat(fused).view(-1, s.kv_heads * (s.group + 2), s.head_dim)
    q, k, v = qkv.split([s.kv_heads * s.group, s.kv_heads, s.kv_heads], dim=1)
    return Step(runs, q, k, v, torch.cat(expected), scale)


def dense(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, bias: Tensor | None = None) -> Tensor:
    """Softmax attention in fp64, one query head at a time: `[queries, q_heads, head_dim]`."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).triu(start + 1)
    for h in range(q.shape[1]):
        logits = q[:, h].double() @ k[:, h // group].double().T * scale
        if bias is not None:
            logits = logits + bias[h // group, : k.shape[0]].double()
        weights = torch.softmax(logits.masked_fill(hidden, float("-inf")), dim=1)
        out[:, h] = weights @ v[:, h // group].double()
    return out

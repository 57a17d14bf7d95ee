"""Steps of random rows over a poisoned pool, and dense attention that knows nothing of pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvikk.attention import AttentionBackend, QueryRun
from kvikk.geometry import KVGeometry
from kvikk.memory.body import Body
from kvikk.memory.quantise import pack, unpack
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
    quantised: torch.dtype | None = None
    blocks: int = 200
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def store(self) -> KVStore:
        geometry = KVGeometry(
            kv_heads=(self.kv_heads,) * 3,
            head_dim=self.head_dim,
            page_size=self.page,
            dtype=self.dtype,
            quantised=self.quantised,
        )
        store = KVStore(geometry, self.blocks, self.device)
        store.poison()
        return store


def put_rows(store: KVStore, frames: Tensor, part: int, offsets: Tensor, rows: Tensor) -> None:
    """Store rows, `[rows, head_dim]`, of K (part 0) or V (1) at offsets in single frames."""
    if store.scales is None or store.geometry.quantised is None:
        store.frames[frames, part, offsets] = rows
    else:
        numbers, scales = pack(rows, part, store.geometry.quantised)
        store.frames[frames, part, offsets], store.scales[frames, part, offsets] = numbers, scales


def spoil(store: KVStore, frames: Sequence[int]) -> None:
    """Fill frames with what must never be read."""
    at = torch.tensor(frames)
    if store.scales is None:
        store.frames[at] = math.nan
    else:
        store.frames.view(torch.uint8)[at] = 128
        store.scales[at] = math.nan


@dataclass
class Row:
    """A row with its whole KV known: `k`, `v` are `[length, kv_heads, head_dim]`, before they are quantised, if so.

    Where it has a body, `blocks` are its tail's, and `kept` says which positions each KV head keeps, slot by slot.
    """

    blocks: list[BlockId]
    k: Tensor
    v: Tensor
    body: Body | None = None
    kept: Sequence[Tensor] = ()
    quantised: torch.dtype | None = None

    def held(self, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of the positions below `stop` as they are read from a pool."""
        k, v = self.k[:stop], self.v[:stop]
        if self.quantised is None:
            return k, v
        kv = [unpack(*pack(x, part, self.quantised), part, self.quantised) for part, x in enumerate((k, v))]
        return kv[0], kv[1]

    @property
    def tail(self) -> int:
        """The first position of its blocks."""
        return self.body.stop if self.body else 0

    def seen(self, head: int, stop: int) -> tuple[Tensor, Tensor]:
        """What a KV head has of the positions below `stop`: K and V, `[slots, 1, head_dim]` each."""
        tail = torch.arange(self.tail, stop)
        at = torch.cat((self.kept[head], tail)) if self.body else tail
        k, v = self.held(stop)
        return k[at, head, None], v[at, head, None]


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
        self.loose: list[int] = []

    def draw(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.random).to(device=self.shape.device, dtype=self.shape.dtype)

    def row(self, length: int, stored: range) -> Row:
        """A new row of `length` positions, of which those in `stored` already lie in the pool."""
        s = self.shape
        blocks = [self.free.pop() for _ in range(-(-length // s.page))]
        k, v = self.draw(length, s.kv_heads, s.head_dim), self.draw(length, s.kv_heads, s.head_dim)
        row = Row(blocks, k, v, quantised=s.quantised)
        self.put(row, stored)
        self.rows.append(row)
        return row

    def put(self, row: Row, positions: range) -> None:
        at = torch.tensor(list(positions), dtype=torch.int64)
        page = self.shape.page
        slots = torch.tensor(row.blocks, dtype=torch.int64)[(at - row.tail) // page] * page + at % page
        self.store.write(LAYER, slots.to(self.shape.device), row.k[at], row.v[at])

    def compacted(self, row: Row, stop: int, kept: Sequence[Tensor]) -> Row:
        """The row with a new body of `kept[head]` of the positions below `stop`; the blocks it leaves are poisoned.

        Other layers keep other numbers of slots, longer ones too, and what those are is never read.
        """
        page, heads = self.shape.page, self.shape.kv_heads
        lanes = self.store.geometry.frames_per_block
        lengths = torch.randint(0, max(map(len, kept)) + 3 * page, (lanes,), generator=self.random)
        lengths[LAYER * heads : (LAYER + 1) * heads] = torch.tensor([len(positions) for positions in kept])
        columns = -(-int(lengths.max()) // page) + 1
        frames = torch.zeros(lanes, columns, dtype=torch.int64)  # null frames behind each lane's last
        for lane, length in enumerate(lengths.tolist()):
            for column in range(-(-length // page)):
                frames[lane, column] = self._frame()
        left = (stop - row.tail) // page
        for block in row.blocks[:left]:
            spoil(self.store, [block * lanes + LAYER * heads + head for head in range(heads)])
        for head, positions in enumerate(kept):
            slots = torch.arange(len(positions))
            at = frames[LAYER * heads + head, slots // page]
            put_rows(self.store, at, 0, slots % page, row.k[positions, head])
            put_rows(self.store, at, 1, slots % page, row.v[positions, head])
        body = Body(
            frames=frames.numpy(),
            lengths=lengths.numpy().astype(np.int64),
            stop=Position(stop),
            positions=torch.zeros(lanes, columns * page, dtype=torch.int32),
        )
        shorter = Row(row.blocks[left:], row.k, row.v, body, kept, row.quantised)
        self.rows.append(shorter)
        return shorter

    def thinned(self, length: int, stop: int, lengths: Sequence[int]) -> Row:
        """A new row whose KV heads keep so many slots of the positions below `stop`, any and in any order.

        All of it lies in the pool, but its last position.
        """
        whole = self.row(length, range(length - 1))
        return self.compacted(whole, stop, [torch.randperm(stop, generator=self.random)[:n] for n in lengths])

    def _frame(self) -> int:
        """One frame of a block that is given out frame by frame; neighbours lie apart."""
        if not self.loose:
            lanes = self.store.geometry.frames_per_block
            taken = [self.free.pop() for _ in range(3)]
            self.loose = [block * lanes + lane for block in taken for lane in range(lanes)]
            self.loose = [self.loose[i] for i in torch.randperm(len(self.loose), generator=self.random).tolist()]
        return self.loose.pop()


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
                body=row.body,
            )
        )
        q = world.draw(length, s.kv_heads * s.group, s.head_dim)
        span = slice(start, start + length)
        fused.append(torch.cat([q, row.k[span], row.v[span]], dim=1).flatten(1))
        expected.append(expected_of(q, row, start, scale, bias))
    qkv = torch.cat(fused).view(-1, s.kv_heads * (s.group + 2), s.head_dim)
    q, k, v = qkv.split([s.kv_heads * s.group, s.kv_heads, s.kv_heads], dim=1)
    return Step(runs, q, k, v, torch.cat(expected), scale)


def assert_the_same_alone(made: AttentionBackend, step: Step, together: Tensor) -> None:
    """Each run of a step by itself gives the bits that it has among the others."""
    at = 0
    for run in step.runs:
        span = slice(at, at + run.length)
        alone = made.begin(made.plan([run])).attend(LAYER, step.q[span], step.k[span], step.v[span], scale=step.scale)
        assert torch.equal(alone, together[span])
        at += run.length


def expected_of(q: Tensor, row: Row, start: int, scale: float, bias: Tensor | None = None) -> Tensor:
    """Softmax attention in fp64 of queries at positions `start` and on, over what the row has."""
    stop = start + len(q)
    if row.body is None:
        return dense(q, *row.held(stop), start, scale, bias)
    outs = []
    for head, queries in enumerate(q.split(q.shape[1] // row.k.shape[1], dim=1)):
        k, v = row.seen(head, stop)
        outs.append(dense(queries, k, v, len(k) - len(q), scale))
    return torch.cat(outs, dim=1)


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

"""Cases of decode attention in GPU memory: random KV, blocks in random order, and what is right for a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvikk.attention.gpu.flashinfer import ADDRESSABLE, LayerKV, layer_views
from kvikk.attention.gpu.rows import Bodies, DecodeRows
from kvikk.attention.reference import attend_dense, read_lane, read_row
from kvikk.bench.attention_shape import AttentionShape
from kvikk.bench.traces import Trace, ragged_lengths
from kvikk.errors import ConfigError
from kvikk.geometry import KVGeometry
from kvikk.memory import KVStore, format_bytes

LAYERS: Final = (2, 8, 32, 128)
"""How many layers a case may have: the fewest that hold COLD_BYTES, so that the L2 cache never holds a layer's KV."""
COLD_BYTES: Final = 500_000_000
MOST_BYTES: Final = 60_000_000_000
LEAST_BYTES: Final = 2**30
TAIL_BLOCKS: Final = 1
"""Uniform blocks behind the body of a ragged row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured at one go.

    Args:
        trace, rows, seed: where the lengths are from.
        lengths: of each row, before compression.
        lanes: slots of each row by KV head.
        is_ragged: whether a row's heads differ.
    """

    trace: str
    rows: int
    seed: int
    lengths: list[int]
    lanes: list[list[int]]
    is_ragged: bool

    @staticmethod
    def draw(name: str, trace: Trace, rows: int, seed: int, kv_heads: int) -> Case:
        """The case of a trace, a number of rows and a seed."""
        lengths = trace.lengths(rows, seed)
        if trace.lanes == "whole":
            lanes = [[length] * kv_heads for length in lengths]
        else:
            lanes = [ragged_lengths(length, kv_heads) for length in lengths]
        if trace.lanes == "even":
            lengths = [round(sum(lane) / kv_heads) for lane in lanes]
            lanes = [[length] * kv_heads for length in lengths]
        return Case(
            trace=name, rows=len(lengths), seed=seed, lengths=lengths, lanes=lanes, is_ragged=trace.lanes == "ragged"
        )

    @staticmethod
    def of(name: str, lengths: list[int], kv_heads: int) -> Case:
        """Whole rows of these lengths."""
        lanes = [[length] * kv_heads for length in lengths]
        return Case(trace=name, rows=len(lengths), seed=0, lengths=lengths, lanes=lanes, is_ragged=False)

    def kv_bytes(self, shape: AttentionShape) -> int:
        """Bytes of KV that one layer reads."""
        return sum(map(sum, self.lanes)) * shape.lane_bytes

    def blocks(self, shape: AttentionShape) -> int:
        """Blocks that hold the case in a pool, the null block included; of a ragged one, tails and bodies."""
        page = shape.page_size
        if not self.is_ragged:
            return 1 + sum(-(-length // page) for length in self.lengths)
        frames = sum(-(-slots // page) for lane in self.lanes for slots in lane)
        return 1 + self.rows * TAIL_BLOCKS + -(-frames // shape.kv_heads)

    def layers(self, shape: AttentionShape) -> int:
        """How many layers it is measured with."""
        return next((n for n in LAYERS if n * self.kv_bytes(shape) >= COLD_BYTES), LAYERS[-1])

    def pool_bytes(self, shape: AttentionShape) -> int:
        """Bytes of the pool that it takes."""
        return self.blocks(shape) * shape.geometry(self.layers(shape)).block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Rows in memory.

    Args:
        store: one pool of all layers.
        rows: what is asked of it.
        lengths: of the rows, on the host.
        lanes: as of `Case`.
        is_ragged: as of `Case`.
        apart: the same memory as a pool for each layer, where one pool of all is more than FlashInfer's persistent
            kernel can address and these are not; else empty.
    """

    store: KVStore
    rows: DecodeRows
    lengths: list[int]
    lanes: list[list[int]]
    is_ragged: bool
    apart: list[KVStore]

    def pool_of(self, layer: int, *, apart: bool) -> tuple[KVStore, int]:
        """The pool that a layer lies in, and its number there."""
        return (self.apart[layer], 0) if apart else (self.store, layer)

    def views(self, *, apart: bool) -> list[LayerKV]:
        """K and V of each layer, for FlashInfer."""
        pools = self.apart if apart else [self.store]
        return [view for pool in pools for view in layer_views(pool)]

    def expected(self, layer: int, row: int, q: Tensor, *, scale: float, apart: bool = False) -> Tensor:
        """What is right for a row, `[q_heads, head_dim]` fp32, by the reference; `q` is `[q_heads, head_dim]`."""
        store, number = self.pool_of(layer, apart=apart)
        group = len(q) // len(self.lanes[row])
        if not self.is_ragged:
            slots = self.lengths[row]
            k, v = read_row(store, number, self.rows.tables[self.rows.seats[row]].long(), slots)
            return attend_dense(q[None], k, v, start=slots - 1, scale=scale)[0][0]
        parts = []
        for head in range(len(self.lanes[row])):
            k, v = self._ragged_lane(number, row, head)
            mine = q[None, head * group : (head + 1) * group]
            parts.append(attend_dense(mine, k[None], v[None], start=len(k) - 1, scale=scale)[0][0])
        return torch.cat(parts)

    def _ragged_lane(self, layer: int, row: int, head: int) -> tuple[Tensor, Tensor]:
        """K and V of one lane, `[slots, head_dim]` each: its body, then its tail."""
        bodies, page = self.rows.bodies, self.store.geometry.page_size
        assert bodies is not None
        lane = layer * len(self.lanes[row]) + head
        first, live = int(bodies.offsets[row, lane]), int(bodies.lengths[row, lane])
        body = read_lane(self.store, bodies.frames[first : first + -(-live // page)].long(), live)
        tail = read_row(self.store, layer, self.rows.tables[row].long(), self.lengths[row])
        return torch.cat((body[0], tail[0][head])), torch.cat((body[1], tail[1][head]))


class KVMemory:
    """One allocation of random numbers that all cases lie in, one after the other.

    Args:
        size_bytes: of the largest case.
        dtype: of KV.
        device: where.
    """

    def __init__(self, size_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.numbers = torch.empty(size_bytes // dtype.itemsize, dtype=dtype, device=device)

    @staticmethod
    def make(size_bytes: int, dtype: torch.dtype, device: torch.device) -> KVMemory:
        """Room for cases of so many bytes, and for measuring the copy rate.

        Raises:
            ConfigError: the device has not that much.
        """
        most = min(MOST_BYTES, int(torch.cuda.mem_get_info(device)[0] * 0.9))
        if size_bytes > most:
            raise ConfigError(
                f"the largest case takes {format_bytes(size_bytes)} of KV, {format_bytes(most)} may be used: "
                "give fewer rows, or shorter ones"
            )
        return KVMemory(max(size_bytes, LEAST_BYTES), dtype, device)

    def fill(self) -> None:
        """Draw all numbers from the normal distribution."""
        self.numbers.normal_(generator=torch.Generator(self.device).manual_seed(0))

    def place(self, case: Case, shape: AttentionShape) -> Placed:
        """Lay out a case, with the blocks of its rows in a seeded random order."""
        layers, blocks = case.layers(shape), case.blocks(shape)
        store = KVStore(shape.geometry(layers), blocks, self.device, memory=self.numbers)
        generator = torch.Generator().manual_seed(case.seed)
        if case.is_ragged:
            rows = ragged_case(store, case.lanes, generator)
            lengths = [_tail(lane, shape.page_size) for lane in case.lanes]
        else:
            rows, lengths = uniform_case(store, case.lengths, generator), case.lengths
        return Placed(
            store=store, rows=rows, lengths=lengths, lanes=case.lanes, is_ragged=case.is_ragged,
            apart=self.apart(store),
        )  # fmt: skip

    def apart(self, store: KVStore) -> list[KVStore]:
        """See `Placed.apart`."""
        g = store.geometry
        numbers = store.blocks * g.frame_elements * g.kv_heads[0]
        if numbers * g.layers <= ADDRESSABLE or numbers > ADDRESSABLE:
            return []
        geometry = KVGeometry(kv_heads=g.kv_heads[:1], head_dim=g.head_dim, page_size=g.page_size, dtype=g.dtype)
        return [
            KVStore(geometry, store.blocks, self.device, memory=self.numbers[layer * numbers :])
            for layer in range(g.layers)
        ]


def uniform_case(store: KVStore, lengths: Sequence[int], generator: torch.Generator) -> DecodeRows:
    """Rows of whole blocks, which lie in random order in the pool."""
    page = store.geometry.page_size
    counts = [-(-length // page) for length in lengths]
    order = torch.randperm(store.blocks - 1, generator=generator).to(torch.int32) + 1
    tables = torch.zeros((len(lengths), max(counts)), dtype=torch.int32)
    for row, blocks in enumerate(torch.split(order[: sum(counts)], counts)):
        tables[row, : len(blocks)] = blocks
    return DecodeRows(
        tables=tables.to(store.device),
        seats=torch.arange(len(lengths), dtype=torch.int32, device=store.device),
        lengths=torch.tensor(lengths, dtype=torch.int32, device=store.device),
    )


def ragged_case(store: KVStore, lanes: Sequence[Sequence[int]], generator: torch.Generator) -> DecodeRows:
    """Rows whose KV heads hold so many slots each: bodies of single frames in random order, and a block as the tail.

    Args:
        store: the pool; all layers get the same lengths.
        lanes: slots of each row by KV head.
        generator: of the order.
    """
    g, rows = store.geometry, len(lanes)
    tails = [_tail(lane, g.page_size) for lane in lanes]
    by_head = torch.tensor([[slots - tail for slots in lane] for lane, tail in zip(lanes, tails, strict=True)])
    lengths = by_head.repeat(1, g.layers)  # [rows, layers * kv_heads]
    counts = (lengths + g.page_size - 1) // g.page_size
    offsets = counts.flatten().cumsum(0).view(counts.shape) - counts
    first = (1 + rows * TAIL_BLOCKS) * g.frames_per_block
    free = store.blocks * g.frames_per_block - first
    frames = first + torch.randperm(free, generator=generator)[: int(counts.sum())]
    device = store.device
    return DecodeRows(
        tables=torch.arange(1, rows + 1, dtype=torch.int32, device=device)[:, None],
        seats=torch.arange(rows, dtype=torch.int32, device=device),
        lengths=torch.tensor(tails, dtype=torch.int32, device=device),
        bodies=Bodies(
            frames=frames.to(device, torch.int32),
            offsets=offsets.to(device, torch.int32),
            lengths=lengths.to(device, torch.int32),
        ),
    )


def _tail(lane: Sequence[int], page_size: int) -> int:
    """Slots of a ragged row's tail: a block, or what its smallest lane has."""
    return min(page_size * TAIL_BLOCKS, min(lane))

"""Attention by work list: plan once a step on the device, then one or two launches a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from kvikk.attention.gpu.attend import Bias, Partials, Tile, attend_items, row_width
from kvikk.attention.gpu.merge import merge_items
from kvikk.attention.gpu.planner import Chunking, WorkList, plan_items
from kvikk.attention.gpu.rows import DecodeRows, RunRows
from kvikk.geometry import INT4, KVGeometry
from kvikk.memory.storage import KVStore
from kvikk.types import Numerics

EXACT_ROWS = 64
EXACT_PART = 512
"""Tile and parts of exact numerics: the same for every query, however it is computed."""
SHORT_ROWS = (16, 32)
"""Rows of the tiles for runs that are computed as single queries are."""
LONG_RUNS = 256
"""Tokens of a step from which on larger tiles pay."""
RESIDENT_WARPS = {8: 16, 16: 12, 32: 8}
"""On a processor, by rows of a tile over a quantised pool: what its registers leave room for, at the least."""
WORDS_TILES: Final[dict[tuple[bool, int], dict[str, int]]] = {
    (False, 64): {"warps": 2, "slots": 128, "stages": 3},
    (False, 128): {"warps": 2, "slots": 64, "stages": 3},
    (True, 64): {"warps": 1, "slots": 64, "stages": 5},
    (True, 128): {"warps": 2, "slots": 64, "stages": 5},
}
"""The fastest tiles of 8 rows for single queries on an H200, by whether it is int4, and by the width of heads."""
RESIDENT_RUNS: Final = {(True, 16): 4, (True, 32): 3, (False, 32): 2}
"""Programs for short runs on a processor, by whether heads are narrow (128 bytes), and by the rows of a tile."""
PROCESSORS = 132
"""Of an H200, for which the numbers of programs at once were measured; on other devices they are a guess."""


class WorkListAttention:
    """Plans and attends rows of one kind; holds the buffers, so that a captured graph stays valid.

    Args:
        store: the pool.
        q_heads: of every layer.
        rows: the most rows (or runs) of a step.
        tokens: the most queries of a step.
        max_slots: the most slots of a row, body and tail.
        tile: how an item is computed.
        chunking: how lanes are cut.
        ragged: whether rows may have bodies, which need a plan for each layer.
        shared: partial results of lists that are not used at the same time: those that fit are taken, else new ones
            are made and added; None: new ones.
    """

    name = "worklist"

    def __init__(
        self,
        store: KVStore,
        q_heads: int,
        *,
        rows: int,
        tokens: int,
        max_slots: int,
        tile: Tile,
        chunking: Chunking,
        ragged: bool = False,
        shared: list[Partials] | None = None,
    ) -> None:
        geometry = store.geometry
        self.store = store
        self.kv_heads = max(geometry.kv_heads)
        self.group = q_heads // self.kv_heads
        self.tile = tile
        self.chunking = chunking
        tiles = self.kv_heads * (rows + (tokens - rows) // chunking.tile_queries)
        self.work = WorkList.make(
            chunking,
            plans=geometry.layers if ragged else 1,
            pairs=rows * self.kv_heads,
            tiles=tiles,
            slots=tiles * max_slots,
            device=store.device,
        )
        used = self.group if chunking.tile_queries == 1 else tile.rows
        shared = [] if shared is None else shared
        fitting = next((partials for partials in shared if partials.fits(self.work.cut_capacity, used)), None)
        if fitting is None:
            fitting = Partials.make(
                capacity=self.work.cut_capacity, rows=used, head_dim=geometry.head_dim, device=store.device
            )
            shared.append(fitting)
        self.partials = fitting
        self._rows: DecodeRows | RunRows | None = None

    def plan(self, rows: DecodeRows | RunRows) -> None:
        """See `DecodeRoute.plan`. Rows with bodies need `ragged`."""
        if rows.bodies is not None and self.work.items.shape[0] == 1 < self.store.geometry.layers:
            raise ValueError("rows have bodies: make the work list with ragged=True")
        self._rows = rows
        plan_items(self.work, rows, self.chunking, kv_heads=self.kv_heads, page_size=self.store.geometry.page_size)

    def attend(
        self, layer: int, q: Tensor, out: Tensor, *, scale: float, lse: Tensor | None = None, bias: Bias | None = None
    ) -> None:
        """See `DecodeRoute.attend`; q and out have a row for each token; `lse`, `bias`: see `attend_items`."""
        if self._rows is None:
            raise ValueError("attend comes after plan")
        attend_items(
            self.work, self.partials, self._rows, self.store, layer, q, out,
            tile=self.tile, scale=scale, lse=lse, bias=bias,
        )  # fmt: skip
        merge_items(self.work, self.partials, layer, out, tile=self.tile, group=self.group, lse=lse)


class WorkListDecode(WorkListAttention):
    """A `DecodeRoute` of our own kernels: rows with one query each.

    Args:
        store: the pool.
        q_heads: of every layer.
        rows: the most rows of a batch.
        max_slots: the most slots of a row; None: as many as the pool has.
        ragged: whether rows may have bodies.
        numerics: `exact`: a query's bits do not depend on the rows beside it, nor on how it is computed.
        shared: as of `WorkListAttention`.
    """

    def __init__(
        self,
        store: KVStore,
        q_heads: int,
        rows: int,
        *,
        max_slots: int | None = None,
        ragged: bool = False,
        numerics: Numerics = "fast",
        shared: list[Partials] | None = None,
    ) -> None:
        geometry = store.geometry
        group = q_heads // max(geometry.kv_heads)
        tile = exact_tile(group, store) if numerics == "exact" else decode_tile(group, store)
        super().__init__(
            store,
            q_heads,
            rows=rows,
            tokens=rows,
            max_slots=max_slots or store.blocks * geometry.page_size,
            tile=tile,
            chunking=Chunking(
                tile_queries=1,
                tile_slots=tile.slots,
                residents=decode_residents(store, tile),
                waves=decode_waves(tile),
                part=tile.part,
            ),
            ragged=ragged,
            shared=shared,
        )


class WorkListRuns(WorkListAttention):
    """Runs of several queries: chunks of prompts, holes, verification.

    Args:
        store: the pool.
        q_heads: of every layer.
        runs: the most runs of a step.
        tokens: the most queries of a step.
        max_slots: the most slots of a row.
        short: queries of the longest run, where all are so short that reading KV is most of the work: they are
            computed as single queries are; 0: they are not.
        ragged: whether rows may have bodies.
        numerics: as of `WorkListDecode`.
        shared: as of `WorkListAttention`.
    """

    def __init__(
        self,
        store: KVStore,
        q_heads: int,
        *,
        runs: int,
        tokens: int,
        max_slots: int,
        short: int = 0,
        ragged: bool = False,
        numerics: Numerics = "fast",
        shared: list[Partials] | None = None,
    ) -> None:
        group = q_heads // max(store.geometry.kv_heads)
        tile = run_tile(group, store, tokens)
        if numerics == "exact":
            tile = exact_tile(group, store)
        elif 0 < short * group <= SHORT_ROWS[-1]:
            tile = short_tile(group, store, short)
        is_short = tile.rows <= SHORT_ROWS[-1]
        chunking = Chunking(
            tile_queries=tile.queries(group),
            tile_slots=tile.slots,
            residents=short_residents(store, tile) if is_short else 2 * PROCESSORS,
            waves=decode_waves(tile) if is_short else 2,
            part=tile.part,
        )
        super().__init__(
            store, q_heads,
            rows=runs, tokens=tokens, max_slots=max_slots, tile=tile, chunking=chunking, ragged=ragged,
            shared=shared,
        )  # fmt: skip


def decode_tile(group: int, store: KVStore) -> Tile:
    """For single queries: as few rows as the matrix units take, as many slots as fit on chip three times."""
    geometry = store.geometry
    if geometry.quantised is not None:
        tile = _words_tile(_rows(8, group), store)
        fastest = WORDS_TILES.get((geometry.quantised is INT4, geometry.head_dim), {})
        return replace(tile, **fastest) if tile.rows == 8 else tile
    slots = 128 * 2 // geometry.dtype.itemsize
    if geometry.head_dim > 128:
        slots //= 2
    return Tile(rows=_rows(16, group), slots=slots, warps=4, stages=3)


def _words_tile(rows: int, store: KVStore) -> Tile:
    """For quantised pools, of which kernels take other shapes: what the registers of a thread just hold.

    There is a warp for every 16 words of a row, as many as a product takes of values, and 32 slots for a warp.
    """
    geometry = store.geometry
    warps = max(rows // 16, min(4, 1 << (-(-row_width(geometry) // 16) - 1).bit_length()))
    slots = 32 * warps
    if geometry.head_dim > 128:
        slots = min(slots, 1024 // rows)
    if geometry.dtype == torch.float32:  # whose products are no matrix units' work
        warps, slots = 4, 32
    return Tile(rows=rows, slots=slots, warps=warps, stages=3 if rows <= 16 else 2)


def short_tile(group: int, store: KVStore, queries: int) -> Tile:
    """For runs of few queries: that of single queries, with so many more rows."""
    tile = decode_tile(group, store)
    rows = _rows(tile.rows, queries * group)
    return replace(tile, rows=rows) if store.geometry.quantised is None else _words_tile(rows, store)


def short_run_sizes(group: int) -> list[int]:
    """Queries of the longest run of each tile that is meant for short runs, ascending."""
    return [rows // group for rows in SHORT_ROWS if rows // group > 1]


def decode_residents(store: KVStore, tile: Tile) -> int:
    """Programs with such tiles that run at once."""
    geometry = store.geometry
    if geometry.quantised is not None:
        return PROCESSORS * RESIDENT_WARPS.get(tile.rows, 8) // tile.warps
    return PROCESSORS * (5 if _is_narrow(geometry) else 3)


def short_residents(store: KVStore, tile: Tile) -> int:
    """The same for short runs, whose programs have two loops."""
    geometry = store.geometry
    if geometry.quantised is not None:
        return decode_residents(store, tile)
    return PROCESSORS * RESIDENT_RUNS.get((_is_narrow(geometry), tile.rows), 3)


def _is_narrow(geometry: KVGeometry) -> bool:
    return geometry.head_dim * geometry.dtype.itemsize <= 128


def decode_waves(tile: Tile) -> int:
    """Items of a full list, by what runs at once: small programs need fewer of them to end together.

    Parts of many rows take long to write and to join.
    """
    return 5 if tile.warps == 4 and tile.rows <= 16 else 2


def run_tile(group: int, store: KVStore, tokens: int) -> Tile:
    """For several queries; large tiles for long prompts. Measured on an H200 for heads of 64 and of 128.

    Those of quantised pools are counted, not measured.
    """
    geometry = store.geometry
    if geometry.quantised is not None:
        return _words_tile(_rows(16 if geometry.dtype == torch.float32 else 32, group), store)
    rows, slots, warps, stages = 64, 64, 4, 3
    if geometry.head_dim > 128 or geometry.dtype == torch.float32:
        slots, stages = 32, 2
    elif tokens >= LONG_RUNS:
        rows, slots, warps, stages = (64, 128, 4, 2) if geometry.head_dim <= 64 else (128, 128, 8, 3)
    return Tile(rows=_rows(rows, group), slots=slots, warps=warps, stages=stages)


def exact_tile(group: int, store: KVStore) -> Tile:
    """The one tile of exact numerics."""
    geometry = store.geometry
    if geometry.quantised is not None:  # of two sets of sums, registers hold few rows
        return replace(_words_tile(_rows(16, group), store), part=EXACT_PART)
    small = geometry.head_dim > 128 or geometry.dtype == torch.float32
    return Tile(
        rows=_rows(EXACT_ROWS, group), slots=32 if small else 64, warps=4, stages=2, part=EXACT_PART,
    )  # fmt: skip


def _rows(rows: int, group: int) -> int:
    return max(rows, 1 << (group - 1).bit_length())

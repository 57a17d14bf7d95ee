"""Work items of one step: what threads take from the shared counter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvikk.attention.plan import IntArray, Schedule


@dataclass(frozen=True, slots=True)
class Work:
    """Items of one step for one number of KV heads, in the layout of the kernels' table."""

    items: IntArray  # [items, 5]: run, kv_head, first, last, split (-1 for a tile): slots of a split, or positions
    merges: IntArray  # [runs, 2]: first split and splits of each run of one position
    done: IntArray  # [runs, kv_heads]: counts splits that have ended, back to 0 at the end of a layer
    splits: int
    size: int  # query positions times slots, over all KV heads


def plan_work(
    schedule: Schedule, kv_heads: int, split_slots: int, tile_positions: int, *, tiles_only: bool = False
) -> Work:
    """Cut the runs into items: the query tiles that see most keys first, then splits of single queries.

    Splits are those of a row's longest lane in any layer, so that one list serves all of them; tiles are positions in
    the runs' tails.

    Args:
        schedule: the step.
        kv_heads: of the layers that this is for.
        split_slots: slots of one split of a single query.
        tile_positions: positions of one tile of a longer run.
        tiles_only: a single query is a tile too, of one position.
    """
    singles = () if tiles_only else schedule.decode
    tail_stops = schedule.tail_starts + schedule.lengths
    slots = schedule.body_slots + tail_stops  # that a run's last query sees
    tiles = [
        (index, first, min(first + tile_positions, int(tail_stops[index])))
        for index in (range(len(schedule.runs)) if tiles_only else schedule.multi)
        for first in range(int(schedule.tail_starts[index]), int(tail_stops[index]), tile_positions)
    ]
    tiles.sort(key=lambda tile: -(tile[2] + int(schedule.body_slots[tile[0]])))
    decode = np.array(singles, dtype=np.int64)
    stops = slots[decode]
    counts = -(-stops // split_slots)
    firsts = np.zeros(len(decode), dtype=np.int64)
    np.cumsum(counts[:-1], out=firsts[1:])
    splits = int(counts.sum())
    within = np.arange(splits) - np.repeat(firsts, counts)
    items = np.empty((len(tiles) + splits, 5), dtype=np.int64)
    items[: len(tiles), (0, 2, 3)] = np.array(tiles, dtype=np.int64).reshape(-1, 3)
    items[: len(tiles), 4] = -1
    items[len(tiles) :, 0] = np.repeat(decode, counts)
    items[len(tiles) :, 2] = within * split_slots
    items[len(tiles) :, 3] = np.minimum((within + 1) * split_slots, np.repeat(stops, counts))
    items[len(tiles) :, 4] = np.arange(splits)
    every = np.repeat(items, kv_heads, axis=0)
    every[:, 1] = np.tile(np.arange(kv_heads), len(items))
    merges = np.zeros((len(schedule.runs), 2), dtype=np.int64)
    merges[decode, 0], merges[decode, 1] = firsts, counts
    return Work(
        items=every,
        merges=merges,
        done=np.zeros((len(schedule.runs), kv_heads), dtype=np.int64),
        splits=splits,
        size=kv_heads * int((schedule.lengths * slots).sum()),
    )

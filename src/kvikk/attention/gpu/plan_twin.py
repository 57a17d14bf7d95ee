"""The planner in plain Python: the statement of which items a step becomes, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvikk.attention.gpu.planner import TRIES_PER_WAVE, Chunking, WorkList
from kvikk.attention.gpu.rows import DecodeRows, RunRows

WHOLE = 1 << 30
"""A chunk that no lane is longer than."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One row and one KV head: a lane of the step.

    Args:
        row: of the batch.
        head: KV head of the layer.
        seat: whose table it has.
        token: of its first query.
        start: tail position of its first query.
        queries: how many; single queries are one each, padded ones too.
        body: slots of its body.
        padded_body: the same in whole frames.
    """

    row: int
    head: int
    seat: int
    token: int
    start: int
    queries: int
    body: int
    padded_body: int

    @property
    def slots(self) -> int:
        """Slots that its last query sees."""
        return self.padded_body + self.start + self.queries if self.queries else 0

    def tiles(self, tile_queries: int) -> int:
        """Query tiles, the last of which may be part full."""
        return -(-self.queries // tile_queries)


def plan_items(
    work: WorkList,
    rows: DecodeRows | RunRows,
    chunking: Chunking,
    *,
    kv_heads: int,
    page_size: int,
) -> None:
    """Fill a work list as `planner.plan_items` does, except its scratch.

    Args:
        work: of which items, merges and counts are overwritten as far as they are needed.
        rows: their number times `kv_heads` must fit the list's pairs.
        chunking: how lanes are cut.
        kv_heads: of each layer; where rows have bodies, layer l has the lanes `l * kv_heads` and on.
        page_size: slots of a frame.
    """
    for plan in range(work.items.shape[0]):
        pairs = _pairs(rows, plan, kv_heads, page_size)
        chunk = _chunk(pairs, chunking, work.cut_capacity)
        items, merges = _expand(pairs, chunk, chunking)
        work.items[plan, :, [3, 5, 6]] = 0  # spare items have no queries and no slots
        work.merges[plan, :, 3] = 0
        for numbers, target in ((items, work.items[plan]), (merges, work.merges[plan])):
            if numbers:
                target[: len(numbers), : len(numbers[0])] = target.new_tensor(numbers)
        work.counts[plan] = work.counts.new_tensor([len(items), len(merges)])


def _pairs(rows: DecodeRows | RunRows, layer: int, kv_heads: int, page_size: int) -> list[Pair]:
    lengths, seats = rows.lengths.tolist(), rows.seats.tolist()
    if isinstance(rows, RunRows):
        starts, tokens = rows.starts.tolist(), rows.offsets.tolist()
    else:  # a query sees `length` slots: its own position is the last of them
        starts, tokens = [length - 1 for length in lengths], list(range(len(lengths)))
        lengths = [1] * len(lengths)
    bodies = None if rows.bodies is None else rows.bodies.lengths.tolist()
    pairs = []
    for row, (seat, token, start, queries) in enumerate(zip(seats, tokens, starts, lengths, strict=True)):
        for head in range(kv_heads):
            body = 0 if bodies is None else bodies[seat][layer * kv_heads + head]
            pairs.append(Pair(row, head, seat, token, start, queries, body, -(-body // page_size) * page_size))
    return pairs


def _chunk(pairs: list[Pair], chunking: Chunking, cut_capacity: int) -> int:
    """The most slots of a piece: of all sizes tried, that after which the last of `residents` programs ends first."""
    c = chunking
    tiles = [pair.tiles(c.tile_queries) for pair in pairs]
    if c.part:
        parts = sum(n * -(-pair.slots // c.part) for n, pair in zip(tiles, pairs, strict=True))
        return c.part if parts <= cut_capacity else WHOLE
    total = np.float32(sum(n * pair.slots for n, pair in zip(tiles, pairs, strict=True)))
    residents = np.float32(c.residents)
    chunk, least = c.min_slots, np.float32("inf")
    for attempt in range(1, c.waves * TRIES_PER_WAVE + 1):
        share = int(total * np.float32(TRIES_PER_WAVE) / np.float32(c.residents * attempt))
        size = max((share + c.tile_slots) // c.tile_slots * c.tile_slots, c.min_slots)
        splits = [-(-pair.slots // size) for pair in pairs]
        pieces = [-(-pair.slots // n) for n, pair in zip(splits, pairs, strict=True) if n]
        longest = _up(max(pieces, default=0), c.tile_slots) + c.item_slots
        number = sum(n * m for n, m in zip(tiles, splits, strict=True))
        in_waves = np.float32(-(-number // c.residents) * longest)
        as_they_end = (total + np.float32(number * c.item_slots)) / residents + np.float32(longest)
        cost = min(in_waves, as_they_end)
        if cost < least:
            chunk, least = size, cost
    return chunk


def _expand(pairs: list[Pair], chunk: int, chunking: Chunking) -> tuple[list[list[int]], list[list[int]]]:
    """The items, pair by pair, of each the last queries, which see most, first; and the merges of what is cut."""
    items: list[list[int]] = []
    merges: list[list[int]] = []
    partials = 0
    for pair in pairs:
        splits = max(-(-pair.slots // chunk), 1)
        tiles = pair.tiles(chunking.tile_queries)
        for order, tile in enumerate(reversed(range(tiles))):
            place = partials + order * splits  # of an item that is not cut it is not used
            first = tile * chunking.tile_queries
            queries = min(pair.queries - first, chunking.tile_queries)
            slots = pair.padded_body + pair.start + first + queries
            piece = _up(-(-slots // splits), chunking.tile_slots)
            if chunking.part:
                piece = chunking.part if splits > 1 else WHOLE
            if splits > 1:
                merges.append([place, pair.token + first, pair.head, queries, splits])
            for part in range(splits):
                begin = min(part * piece, slots)
                end = min(begin + piece, slots)
                items.append(
                    [
                        pair.seat, pair.head, pair.token + first, queries, pair.start + first, begin, end,
                        part, splits, pair.row, pair.body, place + part,
                    ]
                )  # fmt: skip
        partials += tiles * splits if splits > 1 else 0
    return items, merges


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

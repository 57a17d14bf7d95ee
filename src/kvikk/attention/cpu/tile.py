"""Several query positions of a run: tiles of queries against packed tiles of keys, with a running softmax.

Keys and values are packed once for a tile of queries, into the layout that the register blocks want. All tiles of
keys begin at multiples of `KEY_TILE`, and a tile that a row cannot see leaves it as it is, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvikk.attention.cpu import table as t
from kvikk.attention.cpu.nibbles import is_packed, load_packed, turned_query
from kvikk.attention.cpu.products import (
    FLOOR,
    ROWS,
    softmax_row,
    softmax_scaled_row,
    tile_1,
    tile_4,
    tile_fresh,
    tile_hiding_1,
    tile_hiding_4,
)
from kvikk.attention.cpu.table import LOG2E, OPTIONS, bias_address, finish, lane_body, slot_place
from kvikk.attention.cpu.vector import (
    bias_row,
    bytes_of,
    get_f32,
    get_i64,
    half32,
    is_paired,
    is_quantised,
    move,
    move32,
    narrow_row,
    scale_row,
    set_f32,
    set_i64,
    widen_one,
    widen_row,
    zero,
    zip_rows,
)

KEY_TILE = 128
"""Keys of one tile. Fixed, so that a result does not depend on how a prompt was cut into runs."""


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _numbers(mark: Any, kv: Any, frame: int, row: int, rows: int, dim: int, wide: int, copy: int) -> Any:
    """Address of one row of a frame of so many as the model's numbers: its own, or where it is quantised, of a copy.

    The copy is exact where a scale is left to be applied, and rounded in int4, scales included.
    """
    stored = frame + row * dim * bytes_of(kv)
    if is_packed(kv):
        load_packed(wide, frame, row, rows, dim)
    elif is_quantised(kv):
        widen_row(kv, wide, stored, dim)
    else:
        return stored
    narrow_row(mark, copy, wide, dim, np.float32(1))
    return copy


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _pack_keys(
    mark: Any, kv: Any, table: int, run: int, head: int, first: int, slots: int, target: int, scales: int, spare: int
) -> None:
    """Turn a tile of keys on its side: word w of slot s goes to row w, column s; scales are gathered in a row."""
    dim, page, size = get_i64(table, t.HEAD_DIM), get_i64(table, t.PAGE), bytes_of(mark)
    row = dim * bytes_of(kv)
    frame = place = rest = np.int64(0)
    for s in range(slots):
        if rest == 0:
            frame, place, rest = slot_place(table, run, head, first + s)
        if is_quantised(kv):
            move32(scales + s * 4, frame + 2 * page * row + place * 4)
        k = _numbers(mark, kv, frame, place, 2 * page, dim, spare, spare + (dim + 15) // 16 * 64)
        if is_paired(mark):
            for w in range(dim // 2):
                move32(target + (w * KEY_TILE + s) * 4, k + w * 4)
            if dim % 2:
                half32(target + (dim // 2 * KEY_TILE + s) * 4, k + (dim - 1) * 2)
        else:
            for w in range(dim):
                widen_one(mark, target + (w * KEY_TILE + s) * 4, k + w * size)
        place += 1
        rest -= 1


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _pack_values(
    mark: Any,
    kv: Any,
    table: int,
    run: int,
    head: int,
    first: int,
    slots: int,
    target: int,
    scales: int,
    blank: int,
    spare: int,
) -> None:
    """Copy a tile of values: two slots zipped into each row of pairs, or one fp32 row for each slot; and the scales."""
    dim, page = get_i64(table, t.HEAD_DIM), get_i64(table, t.PAGE)
    row = dim * bytes_of(kv)
    row_bytes = (dim + 15) // 16 * 64
    frame = place = rest = before = np.int64(0)
    for s in range(slots):
        if rest == 0:
            frame, place, rest = slot_place(table, run, head, first + s)
        if is_quantised(kv):
            move32(scales + s * 4, frame + 2 * page * row + (page + place) * 4)
        value = _numbers(mark, kv, frame, page + place, 2 * page, dim, spare, spare + (1 + s % 2) * row_bytes)
        if not is_paired(mark):
            widen_row(mark, target + s * row_bytes, value, dim)
        elif s % 2:
            zip_rows(target + s // 2 * row_bytes, before, value, dim)
        elif s + 1 == slots:
            zip_rows(target + s // 2 * row_bytes, value, blank, dim)
        before = value
        place += 1
        rest -= 1


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def attend_tile(mark: Any, kv: Any, table: int, scratch: int, item: int) -> None:
    """Several query positions of a run, for the query heads of one KV head: a row for each position and head.

    An item's positions are those in the run's tail.
    """
    run, head, first, last = get_i64(item, 0), get_i64(item, 1), get_i64(item, 2), get_i64(item, 3)
    dim, q_heads = get_i64(table, t.HEAD_DIM), get_i64(table, t.Q_HEADS)
    group = q_heads // get_i64(table, t.KV_HEADS)
    rows = (last - first) * group
    padded_rows = (rows + ROWS - 1) // ROWS * ROWS
    words = (dim + 1) // 2 if is_paired(mark) else dim
    width = (dim + 15) // 16 * 16
    depth_step = 2 if is_paired(mark) else 1
    scale = get_f32(table + 8 * t.SCALE, 0) * LOG2E
    bias = bias_address(table, run, head)
    _, body = lane_body(table, run, head)

    # Scratch, in this order: packed values and keys, logits, weights, factors, what rows see, scales of keys and of
    # values, a blank row and spare ones, sums, queries, states.
    packed_v = scratch
    packed_k = packed_v + KEY_TILE * width * 4
    logits = packed_k + KEY_TILE * words * 4
    weights = logits + ROWS * KEY_TILE * 4
    factors = weights + ROWS * KEY_TILE * 4
    sights = factors + 64
    key_scales = sights + 64
    value_scales = key_scales + KEY_TILE * 4
    blank = value_scales + KEY_TILE * 4
    spare = blank + width * 4
    sums = spare + 3 * width * 4
    queries = sums + padded_rows * width * 4
    states = queries + padded_rows * words * 4
    zero(blank, width * 4)
    zero(sums, padded_rows * (width + words) * 4)
    token = get_i64(get_i64(table, t.OFFSETS), run) + first - get_i64(get_i64(table, t.STARTS), run)
    q = get_i64(table, t.Q) + token * get_i64(table, t.Q_TOKEN) + head * group * get_i64(table, t.Q_HEAD)
    for row in range(rows):
        source = q + row // group * get_i64(table, t.Q_TOKEN) + row % group * get_i64(table, t.Q_HEAD)
        if is_packed(kv):
            if is_paired(mark):
                turned_query(mark, mark, queries + row * words * 4, source, dim, spare)
            else:
                turned_query(mark, np.float32(0), queries + row * words * 4, source, dim, spare)
        elif is_paired(mark):
            move(queries + row * words * 4, source, dim * bytes_of(mark))
        else:
            for d in range(dim):
                widen_one(mark, queries + (row * words + d) * 4, source + d * bytes_of(mark))
    for row in range(padded_rows):
        set_f32(states, 2 * row, np.float32(FLOOR))
        set_f32(states, 2 * row + 1, np.float32(0))

    first, last = body + first, body + last  # from here on, slots
    for tile in range(0, last, KEY_TILE):
        slots = min(KEY_TILE, last - tile)
        _pack_keys(mark, kv, table, run, head, tile, slots, packed_k, key_scales, spare)
        _pack_values(mark, kv, table, run, head, tile, slots, packed_v, value_scales, blank, spare)
        for block in range(0, padded_rows, ROWS):
            seen = min(slots, first + min(block + ROWS - 1, rows - 1) // group + 1 - tile)
            if seen <= 0:
                continue
            for column in range(0, seen, 64):
                tile_fresh(
                    mark,
                    queries + block * words * 4,
                    words * 4,
                    packed_k + column * 4,
                    KEY_TILE * 4,
                    words,
                    logits + column * 4,
                    KEY_TILE * 4,
                    0,
                )
            # Values that not all rows of the block see may be anything: a weight of 0 does not undo NaN.
            depth = (seen + depth_step - 1) // depth_step
            all_see = max(0, min(slots, first + block // group + 1 - tile))
            clear = depth if all_see == slots else all_see // depth_step
            for r in range(ROWS):
                row = min(block + r, rows - 1)
                live = max(0, min(slots, first + row // group + 1 - tile))
                at = logits + r * KEY_TILE * 4
                factor = scale
                if is_quantised(kv):
                    scale_row(at, key_scales, live)
                if bias != 0:
                    bias_row(at, bias + tile * 4, live, scale, LOG2E)
                    factor = np.float32(1)
                to, padded, state = weights + r * KEY_TILE * 4, (seen + 15) // 16 * 16, states + (block + r) * 8
                if is_quantised(kv):
                    shrink = softmax_scaled_row(mark, at, to, live, padded, factor, state, value_scales)
                else:
                    shrink = softmax_row(mark, at, to, live, padded, factor, state)
                set_f32(factors, r, shrink)
                set_i64(sights + r * 8, live - clear * depth_step)
            column = 0
            while column < width:
                values, to = packed_v + column * 4, sums + (block * width + column) * 4
                hidden, a = values + clear * width * 4, weights + clear * 4
                if column + 64 <= width:
                    tile_4(mark, weights, KEY_TILE * 4, values, width * 4, clear, to, width * 4, factors)
                    if clear < depth:
                        tile_hiding_4(mark, a, KEY_TILE * 4, hidden, width * 4, depth - clear, to, width * 4, sights)
                    column += 64
                else:
                    tile_1(mark, weights, KEY_TILE * 4, values, width * 4, clear, to, width * 4, factors)
                    if clear < depth:
                        tile_hiding_1(mark, a, KEY_TILE * 4, hidden, width * 4, depth - clear, to, width * 4, sights)
                    column += 16
    for row in range(rows):
        finish(
            mark,
            table,
            token + row // group,
            head * group + row % group,
            sums + row * width * 4,
            get_f32(states, 2 * row),
            get_f32(states, 2 * row + 1),
        )

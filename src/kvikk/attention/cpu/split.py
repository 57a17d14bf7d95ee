"""One query position: splits of its slots, read from the pages where they lie, and their merging."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvikk.attention.cpu import table as t
from kvikk.attention.cpu.nibbles import is_packed, load_packed, turned_query
from kvikk.attention.cpu.products import (
    FLOOR,
    dot_keys_1,
    dot_keys_16,
    softmax_row,
    softmax_scaled_row,
    weigh_1x1,
    weigh_1x4,
    weigh_2x1,
    weigh_2x4,
    weigh_3x1,
    weigh_3x4,
    weigh_4x1,
    weigh_4x4,
)
from kvikk.attention.cpu.table import LOG2E, OPTIONS, bias_address, finish, lane_body, slot_place
from kvikk.attention.cpu.vector import (
    add_row,
    bias_row,
    bytes_of,
    exp2,
    get_f32,
    get_i64,
    is_paired,
    is_quantised,
    move,
    prefetch,
    scale_row,
    set_f32,
    widen_row,
    zero,
)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _weigh_page(
    mark: Any,
    group: int,
    p: int,
    p_stride: int,
    values: int,
    slots: int,
    dim: int,
    out: int,
    out_stride: int,
) -> None:
    """Add one page's weighted values to the sums of a group of query heads."""
    size = bytes_of(mark)
    stride = dim * size
    for g in range(0, group, 4):
        rows = min(4, group - g)
        weights, sums = p + g * p_stride, out + g * out_stride
        column = 0
        while column + 64 <= dim:
            at, to = values + column * size, sums + column * 4
            if rows == 4:
                weigh_4x4(mark, weights, p_stride, at, stride, slots, 16, to, out_stride)
            elif rows == 3:
                weigh_3x4(mark, weights, p_stride, at, stride, slots, 16, to, out_stride)
            elif rows == 2:
                weigh_2x4(mark, weights, p_stride, at, stride, slots, 16, to, out_stride)
            else:
                weigh_1x4(mark, weights, p_stride, at, stride, slots, 16, to, out_stride)
            column += 64
        while column < dim:
            at, to, lanes = values + column * size, sums + column * 4, dim - column
            if rows == 4:
                weigh_4x1(mark, weights, p_stride, at, stride, slots, lanes, to, out_stride)
            elif rows == 3:
                weigh_3x1(mark, weights, p_stride, at, stride, slots, lanes, to, out_stride)
            elif rows == 2:
                weigh_2x1(mark, weights, p_stride, at, stride, slots, lanes, to, out_stride)
            else:
                weigh_1x1(mark, weights, p_stride, at, stride, slots, lanes, to, out_stride)
            column += 16


@njit(**OPTIONS, forceinline=True)  # type: ignore[untyped-decorator]  # a call for each page costs 4 %
def _dot_page(
    kv: Any, group: int, q: int, q_stride: int, keys: int, slots: int, in_16s: bool, dim: int, wide: int,
    out: int, out_stride: int,
) -> None:  # fmt: skip
    """One page's keys times the queries of a group; quantised ones are made fp32 in `wide` first, once for all."""
    row = dim * bytes_of(kv)
    if is_quantised(kv):
        wide_row = (dim + 15) // 16 * 64
        for first in range(0, slots, 16):
            together = 16 if in_16s else min(16, slots - first)
            for step in range(together):
                widen_row(kv, wide + step * wide_row, keys + (first + step) * row, dim)
            for g in range(group):
                at = out + g * out_stride + first * 4
                if in_16s:
                    dot_keys_16(np.float32(0), q + g * q_stride, wide, wide_row, dim, at)
                else:
                    for step in range(together):
                        key = wide + step * wide_row
                        dot_keys_1(np.float32(0), q + g * q_stride, key, wide_row, dim, at + step * 4)
    elif in_16s:
        for step in range(0, slots, 16):  # what is beyond the live ones is overwritten, or beyond the last
            for g in range(group):
                dot_keys_16(kv, q + g * q_stride, keys + step * row, row, dim, out + g * out_stride + step * 4)
    else:
        for step in range(slots):
            for g in range(group):
                dot_keys_1(kv, q + g * q_stride, keys + step * row, row, dim, out + g * out_stride + step * 4)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _dot_packed(
    group: int, q: int, q_stride: int, frame: int, place: int, page: int, slots: int, dim: int, wide: int,
    out: int, out_stride: int,
) -> None:  # fmt: skip
    """`_dot_page` where keys are int4, scales included: `slots` of a frame from `place` on."""
    wide_row = (dim + 15) // 16 * 64
    for first in range(0, slots, 16):
        together = min(16, slots - first)
        for step in range(together):
            load_packed(wide + step * wide_row, frame, place + first + step, 2 * page, dim)
        for g in range(group):
            at, query = out + g * out_stride + first * 4, q + g * q_stride
            if together == 16:
                dot_keys_16(np.float32(0), query, wide, wide_row, dim, at)
            else:
                for step in range(together):
                    dot_keys_1(np.float32(0), query, wide + step * wide_row, wide_row, dim, at + step * 4)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _weigh_packed(
    group: int, p: int, p_stride: int, frame: int, place: int, page: int, slots: int, dim: int, wide: int,
    out: int, out_stride: int,
) -> None:  # fmt: skip
    """`_weigh_page` where values are int4: `slots` of a frame from `place` on."""
    for first in range(0, slots, 16):
        together = min(16, slots - first)
        for step in range(together):
            load_packed(wide + step * dim * 4, frame, page + place + first + step, 2 * page, dim)
        _weigh_page(np.float32(0), group, p + first * 4, p_stride, wide, together, dim, out, out_stride)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def attend_split(mark: Any, kv: Any, table: int, scratch: int, item: int) -> None:
    """One query position over one split of its slots, for the query heads of one KV head; pages read in place.

    Items are made for a row's longest lane: in a lane that ends before a split, the split is empty.
    """
    run, head, first, last, split = (
        get_i64(item, 0),
        get_i64(item, 1),
        get_i64(item, 2),
        get_i64(item, 3),
        get_i64(item, 4),
    )
    dim, page, q_heads = get_i64(table, t.HEAD_DIM), get_i64(table, t.PAGE), get_i64(table, t.Q_HEADS)
    group = q_heads // get_i64(table, t.KV_HEADS)
    lanes = (dim + 31) // 32 * 32
    partial_bytes = ((dim + 15) // 16 * 16 + 16) * 4
    _, body = lane_body(table, run, head)
    last = min(last, body + get_i64(get_i64(table, t.STARTS), run) + 1)
    partial = get_i64(table, t.PARTIALS) + (split * q_heads + head * group) * partial_bytes
    for g in range(group):
        sums = partial + g * partial_bytes
        zero(sums, partial_bytes)
        set_f32(sums + partial_bytes - 64, 0, np.float32(FLOOR))
    if first >= last:
        return
    logit_bytes = get_i64(table, t.LOGITS) * 4
    scale = get_f32(table + 8 * t.SCALE, 0) * LOG2E
    q = get_i64(table, t.Q) + get_i64(get_i64(table, t.OFFSETS), run) * get_i64(table, t.Q_TOKEN)
    # Scratch, in this order: queries, logits, scales of values, a few keys made wide.
    logits = scratch + group * lanes * 4
    value_scales = logits + group * logit_bytes
    wide = value_scales + logit_bytes
    row, frame_bytes = dim * bytes_of(kv), get_i64(table, t.FRAME_BYTES)
    for g in range(group):
        source, target = q + (head * group + g) * get_i64(table, t.Q_HEAD), scratch + g * lanes * 4
        zero(target, lanes * 4)
        if is_packed(kv):
            turned_query(mark, np.float32(0), target, source, dim, wide)
        elif is_paired(kv):
            move(target, source, dim * bytes_of(mark))
        else:
            widen_row(mark, target, source, dim)
    slot = first
    ahead, next_place, rest = slot_place(table, run, head, slot)
    while slot < last:
        frame, place, live = ahead, next_place, min(rest, last - slot)
        at = logits + (slot - first) * 4
        if is_quantised(kv):
            scales = frame + 2 * page * row + place * 4
            move(value_scales + (slot - first) * 4, scales + page * 4, live * 4)
        slot += live
        if slot < last:  # frames lie apart, so no machine guesses the next: fp32 gains 10 % by this, bf16 nothing
            ahead, next_place, rest = slot_place(table, run, head, slot)
            prefetch(ahead, frame_bytes)
        if is_packed(kv):
            _dot_packed(group, scratch, lanes * 4, frame, place, page, live, dim, wide, at, logit_bytes)
            continue
        _dot_page(kv, group, scratch, lanes * 4, frame + place * row, live, page % 16 == 0, dim, wide, at, logit_bytes)
        if is_quantised(kv):
            for g in range(group):
                scale_row(at + g * logit_bytes, frame + 2 * page * row + place * 4, live)
    bias = bias_address(table, run, head)
    for g in range(group):
        at, factor = logits + g * logit_bytes, scale
        if bias != 0:
            bias_row(at, bias + first * 4, last - first, scale, LOG2E)
            factor = np.float32(1)
        state = partial + (g + 1) * partial_bytes - 64
        if is_quantised(kv):
            softmax_scaled_row(np.float32(0), at, at, last - first, 0, factor, state, value_scales)
        else:
            softmax_row(np.float32(0), at, at, last - first, 0, factor, state)
    slot = first
    while slot < last:
        frame, place, rest = slot_place(table, run, head, slot)
        live = min(rest, last - slot)
        at = logits + (slot - first) * 4
        if is_packed(kv):
            _weigh_packed(group, at, logit_bytes, frame, place, page, live, dim, wide, partial, partial_bytes)
        else:
            values = frame + (page + place) * row
            _weigh_page(kv, group, at, logit_bytes, values, live, dim, partial, partial_bytes)
        slot += live


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def merge(mark: Any, table: int, scratch: int, run: int, head: int) -> None:
    """Join the splits of one run, for the query heads of one KV head, in the order of their slots."""
    first, splits = get_i64(get_i64(table, t.MERGES), 2 * run), get_i64(get_i64(table, t.MERGES), 2 * run + 1)
    dim, q_heads = get_i64(table, t.HEAD_DIM), get_i64(table, t.Q_HEADS)
    group = q_heads // get_i64(table, t.KV_HEADS)
    width = (dim + 15) // 16 * 16
    partial_bytes = (width + 16) * 4
    step = q_heads * partial_bytes
    for q_head in range(head * group, (head + 1) * group):
        base = get_i64(table, t.PARTIALS) + (first * q_heads + q_head) * partial_bytes
        top = np.float32(FLOOR)
        for i in range(splits):
            top = max(top, get_f32(base + i * step + width * 4, 0))
        total = np.float32(0)
        zero(scratch, width * 4)
        for i in range(splits):
            part = base + i * step
            factor = exp2(get_f32(part + width * 4, 0) - top)
            add_row(scratch, part, width, factor)
            total += factor * get_f32(part + width * 4, 1)
        finish(mark, table, get_i64(get_i64(table, t.OFFSETS), run), q_head, scratch, top, total)

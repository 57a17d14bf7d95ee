"""One query position: splits of its slots, read from the pages where they lie, and their merging."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from kvikk.attention.cpu import table as t
from kvikk.attention.cpu.products import (
    FLOOR,
    dot_keys_1,
    dot_keys_16,
    softmax_row,
    weigh_1x1,
    weigh_1x4,
    weigh_2x1,
    weigh_2x4,
    weigh_3x1,
    weigh_3x4,
    weigh_4x1,
    weigh_4x4,
)
from kvikk.attention.cpu.table import LOG2E, OPTIONS, bias_address, finish, lane_body, slot_address
from kvikk.attention.cpu.vector import (
    add_row,
    bias_row,
    exp2,
    get_f32,
    get_i64,
    is_paired,
    move,
    prefetch,
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
    size: int,
    out: int,
    out_stride: int,
) -> None:
    """Add one page's weighted values to the sums of a group of query heads."""
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


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def attend_split(mark: Any, table: int, scratch: int, item: int, size: int) -> None:
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
    logits = scratch + group * lanes * 4
    for g in range(group):
        source, target = q + (head * group + g) * get_i64(table, t.Q_HEAD), scratch + g * lanes * 4
        zero(target, lanes * 4)
        if is_paired(mark):
            move(target, source, dim * size)
        else:
            widen_row(mark, target, source, dim)
    slot = first
    ahead, rest = slot_address(table, run, head, slot, size)
    while slot < last:
        k, live = ahead, min(rest, last - slot)
        at = logits + (slot - first) * 4
        slot += live
        if slot < last:  # frames lie apart, so no machine guesses the next: fp32 gains 10 % by this, bf16 nothing
            ahead, rest = slot_address(table, run, head, slot, size)
            prefetch(ahead, 2 * page * dim * size)
        if page % 16 == 0:
            for step in range(0, live, 16):  # what is beyond the live ones is overwritten, or beyond the last
                for g in range(group):
                    dot_keys_16(
                        mark,
                        scratch + g * lanes * 4,
                        k + step * dim * size,
                        dim * size,
                        dim,
                        at + g * logit_bytes + step * 4,
                    )
        else:
            for step in range(live):
                for g in range(group):
                    dot_keys_1(
                        mark,
                        scratch + g * lanes * 4,
                        k + step * dim * size,
                        dim * size,
                        dim,
                        at + g * logit_bytes + step * 4,
                    )
    bias = bias_address(table, run, head)
    for g in range(group):
        row, factor = logits + g * logit_bytes, scale
        if bias != 0:
            bias_row(row, bias + first * 4, last - first, scale, LOG2E)
            factor = np.float32(1)
        state = partial + (g + 1) * partial_bytes - 64
        softmax_row(np.float32(0), row, row, last - first, 0, factor, state)
    slot = first
    while slot < last:
        k, rest = slot_address(table, run, head, slot, size)
        live = min(rest, last - slot)
        _weigh_page(
            mark,
            group,
            logits + (slot - first) * 4,
            logit_bytes,
            k + page * dim * size,
            live,
            dim,
            size,
            partial,
            partial_bytes,
        )
        slot += live


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def merge(mark: Any, table: int, scratch: int, run: int, head: int, size: int) -> None:
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
        finish(mark, table, get_i64(get_i64(table, t.OFFSETS), run), q_head, scratch, top, total, size)

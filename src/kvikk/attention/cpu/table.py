"""The table of numbers that a layer's kernels work from, and what all of them need: where a slot is, how a row ends.

The table is made by `backend`, entry by entry as here; kernels read it by `get_i64`. The slots of a lane are numbered
through its body, if it has one, and then its tail: pages of the tail may begin at any slot.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numba import njit

from kvikk.attention.cpu.vector import bytes_of, get_i64, log2, narrow_row, set_f32

# The table's entries, 8 bytes each: addresses, strides in bytes, and counts. First what changes with the layer.
Q, Q_TOKEN, Q_HEAD, K, K_TOKEN, K_HEAD, V, V_TOKEN, V_HEAD = range(9)
OUT = 9  # [tokens, q_heads, head_dim], contiguous
LSE = 10  # [tokens, q_heads] fp32, or 0
SCALE = 11  # fp32, then 4 unused bytes
POOL = 12  # the layer's first frame in block 0
FIRST_LANE = 13  # the layer's
NEXT = 14  # the shared counter: 0 before a layer
LAYER = struct.Struct("=11q2f3q")

# What stays for a step: the work,
ITEMS = 15  # [items, 5]: run, kv_head, first, last, split (-1 for a tile)
ITEM_COUNT = 16
MERGES = 17  # [runs, 2] of single-query runs: first split, splits
DONE = 18  # [runs, kv_heads]: splits that have ended, 0 before and after a layer
WRITE_TOKENS, WRITE_SLOTS, WRITE_COUNT = 19, 20, 21
# the geometry and the runs,
Q_HEADS, KV_HEADS, HEAD_DIM, PAGE, BLOCK_BYTES, FRAME_BYTES = 22, 23, 24, 25, 26, 27
STARTS, OFFSETS, TABLES, TABLE_OFFSETS = 28, 29, 30, 31  # starts are those in the tails
BODIES = 32  # [runs, 3]: addresses of frames (or 0) and lengths of its body, columns; 0 where no run has one
BIAS = 33  # [runs, 2]: address of fp32 (or 0) and stride of a head; 0 where no run has one
# memory to work in,
PARTIALS, LOGITS, SCRATCH, SCRATCH_BYTES = 34, 35, 36, 37  # logits: those that a split has room for, per query head
# and the threads: how many, what they run, and functions of the OpenMP that torch uses.
THREADS, BODY, TEAM_START, THREAD, TEAM, BARRIER = 38, 39, 40, 41, 42, 43
STEP = struct.Struct("=29q")

OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True}
"""How kernels are compiled: nothing raises, nothing holds the interpreter. Only the entry is cached on disk."""

LOG2E = np.float32(1.4426950408889634)
LN2 = np.float32(0.6931471805599453)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def lane_body(table: int, run: int, head: int) -> Any:
    """Address of the frame ids of a lane's body, and its slots; none where the run has no body."""
    bodies = get_i64(table, BODIES)
    if bodies == 0:
        return 0, 0
    frames = get_i64(bodies, 3 * run)
    if frames == 0:
        return 0, 0
    lane = get_i64(table, FIRST_LANE) + head
    return frames + lane * get_i64(bodies, 3 * run + 2) * 8, get_i64(get_i64(bodies, 3 * run + 1), lane)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def slot_place(table: int, run: int, head: int, slot: int) -> Any:
    """Address of the frame of one slot of a lane, the slot's place in it, and how many follow it there, itself too.

    The slot must be live.
    """
    page, frame_bytes = get_i64(table, PAGE), get_i64(table, FRAME_BYTES)
    frames, body = lane_body(table, run, head)
    if slot < body:
        frame = get_i64(frames, slot // page) - get_i64(table, FIRST_LANE)
        at = slot % page
        return get_i64(table, POOL) + frame * frame_bytes, at, min(page - at, body - slot)
    slot -= body
    index = get_i64(get_i64(table, TABLE_OFFSETS), run) + slot // page
    block = get_i64(get_i64(table, TABLES), index)
    at = slot % page
    return get_i64(table, POOL) + block * get_i64(table, BLOCK_BYTES) + head * frame_bytes, at, page - at


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def bias_address(table: int, run: int, head: int) -> Any:
    """Address of a lane's bias, 0 when the run has none."""
    base = get_i64(table, BIAS)
    if base == 0:
        return 0
    address = get_i64(base, 2 * run)
    if address == 0:
        return 0
    return address + head * get_i64(base, 2 * run + 1)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def finish(mark: Any, table: int, token: int, q_head: int, sums: int, top: Any, total: Any) -> None:
    """Normalise one query head's sums into the output, and note its log-sum-exp."""
    dim, q_heads = get_i64(table, HEAD_DIM), get_i64(table, Q_HEADS)
    index = token * q_heads + q_head
    empty = total == np.float32(0)
    factor = np.float32(0) if empty else np.float32(1) / total
    narrow_row(mark, get_i64(table, OUT) + index * dim * bytes_of(mark), sums, dim, factor)
    lse = get_i64(table, LSE)
    if lse != 0:
        set_f32(lse, index, np.float32(-np.inf) if empty else (top + log2(total)) * LN2)

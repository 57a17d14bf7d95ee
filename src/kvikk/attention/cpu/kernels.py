"""The compiled CPU attention of one layer: every thread of a team works through one shared table of numbers.

First the step's K and V are stored: by the caller when they are few, else by all threads, with a barrier after it.
Then each thread takes items from a shared counter until none is left, so threads that are disturbed do less; who
computes an item changes nothing in it. Whoever ends the last split of a single query merges its splits, in their
order. So a decode step has no barrier but the team's end: on a busy machine each barrier can cost a time slice.
All memory is the caller's: the table (see `table`) holds addresses and sizes.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from kvikk.attention.cpu import table as t
from kvikk.attention.cpu.nibbles import is_packed, store_packed
from kvikk.attention.cpu.products import ROWS
from kvikk.attention.cpu.split import attend_split, merge
from kvikk.attention.cpu.table import OPTIONS
from kvikk.attention.cpu.tile import KEY_TILE, attend_tile
from kvikk.attention.cpu.vector import (
    bytes_of,
    call_body,
    call_int,
    call_team,
    call_void,
    get_i64,
    is_quantised,
    move,
    next_index,
    quantise_row,
    set_f32,
    set_i64,
)

_LOG = logging.getLogger(__name__)

_FEW_WRITES = 64
"""Up to here the calling thread stores K and V faster than a barrier ends."""


def scratch_bytes(head_dim: int, group: int, logits: int, tile_rows: int) -> int:
    """Scratch that one thread needs: the larger of a split's, with its logits of each query head, and a tile's."""
    lanes, words = _round_up(head_dim, 32), _round_up(head_dim, 2)
    split = (group * (lanes + logits + 16) + logits + 16 * lanes) * 4
    tile = tile_rows * (words + lanes + 2) + 2 * (ROWS + 1) * KEY_TILE + 2 * KEY_TILE * lanes + 4 * lanes + 64
    return _round_up(max(split, tile * 4) + 4096, 4096)


def partial_floats(head_dim: int) -> int:
    """fp32 numbers of one query head's partial result: sums in whole vectors, then maximum and sum of weights."""
    return _round_up(head_dim, 16) + 16


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _store_row(
    mark: Any, kv: Any, frame: int, row: int, rows: int, source: int, dim: int, is_key: bool, spare: int
) -> None:
    """Store one row of K or V in a frame of so many."""
    target = frame + row * dim * bytes_of(kv)
    if is_packed(kv):
        store_packed(mark, frame, row, rows, source, dim, is_key, spare)
    elif is_quantised(kv):
        set_f32(frame + rows * dim * bytes_of(kv), row, quantise_row(mark, target, source, dim))
    else:
        move(target, source, dim * bytes_of(kv))


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _store_kv(mark: Any, kv: Any, table: int, thread: int, team: int) -> None:
    """This thread's share of the tokens that are stored."""
    page, dim, heads = get_i64(table, t.PAGE), get_i64(table, t.HEAD_DIM), get_i64(table, t.KV_HEADS)
    block_bytes, pool = get_i64(table, t.BLOCK_BYTES), get_i64(table, t.POOL)
    k, k_token, k_head = get_i64(table, t.K), get_i64(table, t.K_TOKEN), get_i64(table, t.K_HEAD)
    v, v_token, v_head = get_i64(table, t.V), get_i64(table, t.V_TOKEN), get_i64(table, t.V_HEAD)
    tokens, slots = get_i64(table, t.WRITE_TOKENS), get_i64(table, t.WRITE_SLOTS)
    count = get_i64(table, t.WRITE_COUNT)
    spare = get_i64(table, t.SCRATCH) + thread * get_i64(table, t.SCRATCH_BYTES)
    for i in range(count * thread // team, count * (thread + 1) // team):
        token, slot = get_i64(tokens, i), get_i64(slots, i)
        frame, at = pool + slot // page * block_bytes, slot % page
        for head in range(heads):
            key, value = k + token * k_token + head * k_head, v + token * v_token + head * v_head
            _store_row(mark, kv, frame, at, 2 * page, key, dim, True, spare)
            _store_row(mark, kv, frame, page + at, 2 * page, value, dim, False, spare)
            frame += get_i64(table, t.FRAME_BYTES)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _work(mark: Any, kv: Any, table: int) -> None:
    """What each thread of the team does."""
    thread, team = call_int(get_i64(table, t.THREAD)), call_int(get_i64(table, t.TEAM))
    scratch = get_i64(table, t.SCRATCH) + thread * get_i64(table, t.SCRATCH_BYTES)
    if get_i64(table, t.WRITE_COUNT) > _FEW_WRITES:
        _store_kv(mark, kv, table, thread, team)
        call_void(get_i64(table, t.BARRIER))
    items, count = get_i64(table, t.ITEMS), get_i64(table, t.ITEM_COUNT)
    index = next_index(table + 8 * t.NEXT)
    while index < count:
        item = items + index * 40
        if get_i64(item, 4) < 0:
            attend_tile(mark, kv, table, scratch, item)
        else:
            attend_split(mark, kv, table, scratch, item)
            run, head = get_i64(item, 0), get_i64(item, 1)
            done = get_i64(table, t.DONE) + (run * get_i64(table, t.KV_HEADS) + head) * 8
            if next_index(done) == get_i64(get_i64(table, t.MERGES), 2 * run + 1) - 1:
                set_i64(done, 0)
                merge(mark, table, scratch, run, head)
        index = next_index(table + 8 * t.NEXT)


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _attend_layer(mark: Any, kv: Any, table: int) -> None:
    """What the caller does: store a few tokens, then set the team to work, or work alone where that is quicker."""
    if get_i64(table, t.WRITE_COUNT) <= _FEW_WRITES:
        _store_kv(mark, kv, table, 0, 1)
    if get_i64(table, t.THREADS) == 1:
        call_body(get_i64(table, t.BODY), table)
    else:
        call_team(get_i64(table, t.TEAM_START), get_i64(table, t.BODY), table, get_i64(table, t.THREADS))


def compile_kernels(numbers: str, stored: str) -> tuple[Any, Any]:
    """The kernels of a model's numbers and a pool's, as C functions `void (int64 table)`.

    Takes seconds the first time on a machine, then comes from numba's cache on disk. The results own the code: keep
    them as long as an `.address` is in use.

    Args:
        numbers: 'bfloat16', 'float16' or 'float32': of Q, K, V and outputs.
        stored: the same, or 'int8' or 'int4'.

    Returns:
        What the caller runs for each layer, and what it hands to the team.
    """
    marks = {"bfloat16": np.uint16(0), "float16": np.int16(0), "float32": np.float32(0)}
    kinds = {**marks, "int8": np.int8(0), "int4": np.uint8(0)}
    mark, kv, version = marks[numbers], kinds[stored], _source_version()
    return _compile(_layer(mark, kv, version)), _compile(_body(mark, kv, version))


def _layer(mark: Any, kv: Any, version: int) -> Any:
    def layer(table: int) -> None:
        if version:  # part of numba's cache key, which would not see an edit of what is called
            _attend_layer(mark, kv, table)

    return layer


def _body(mark: Any, kv: Any, version: int) -> Any:
    def body(table: int) -> None:
        if version:
            _work(mark, kv, table)

    return body


def _source_version() -> int:
    """A number that changes with the source of any kernel; never 0."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest(), "little") | 1


def _compile(function: Any) -> Any:
    kind = types.void(types.int64)
    try:
        return cfunc(kind, cache=True)(function)
    except RuntimeError as error:  # no folder that can be written
        _LOG.warning("compiled attention is not kept on disk (%s): set NUMBA_CACHE_DIR to a writable folder", error)
        return cfunc(kind)(function)

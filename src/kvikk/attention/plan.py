"""What attention is asked to do in one step, and the plan made of it: once for all layers.

`QueryRun` is the question: consecutive positions of one row. `Schedule` is the plan: the runs, where their tokens
lie in the flattened step, which slots are written, and every block table packed into one array. Bodies are not packed:
they change at compaction only, and are read where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvikk.geometry import KVGeometry
from kvikk.memory.body import Body
from kvikk.types import NULL_BLOCK, BlockId, Position

IntArray = NDArray[np.int64]


class QueryRun(NamedTuple):
    """Consecutive positions of one row, computed in one step.

    A decode row is one run of one position; a chunk of a prompt is one run; a prompt with holes is several.
    The query at position p attends to the row's positions 0..p. Every position below `start` must already be in
    the pool, or be written by an earlier run of the same row in the same step: all K and V of a step are stored
    before any query attends, so that runs of one row see each other. Where the row has a body, the query sees what is
    live of it, in each lane, and the positions from the body's `stop` to its own.

    Args:
        blocks: the row's block table, up to position `start + length - 1` at least. Block i holds the positions from
            `i * page_size` on, counted from the body's `stop` where there is a body. Packing is cheapest when it is an
            `array.array('q')` or an int64 numpy array, which are copied whole.
        start: the first position, not below the body's `stop`.
        length: how many positions, at least 1.
        write: False when K and V of these positions already lie in the pool (a shared block): they are computed
            for their query only, and not stored.
        bias: optional, added to the logits: `[kv_heads, >= start + length]` fp32, one value for each KV slot of
            the row, the same in all layers. Not together with a body.
        body: what the row keeps of the positions before its block table; None: the table holds all of them.
    """

    blocks: Sequence[BlockId]
    start: Position
    length: int
    write: bool = True
    bias: Tensor | None = None
    body: Body | None = None

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + self.length

    @property
    def tail(self) -> int:
        """The position at which the block table begins: 0 without a body."""
        return 0 if self.body is None else self.body.stop


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step, planned: valid for every layer, and for as long as the runs' bodies do not change.

    Token t of run r is token `offsets[r] + t` of the flattened step.

    Args:
        runs: as they were given.
        tokens: tokens of the step, over all runs.
        offsets: `[runs]`, each run's first token.
        starts: `[runs]`, each run's first position.
        tail_starts: `[runs]`, the same counted from where the run's block table begins: `start - tail`.
        lengths: `[runs]`, positions of each run.
        tables: `[blocks of all runs]`, the block tables one after another, as long as the runs need them.
        table_offsets: `[runs + 1]`, where each run's table begins.
        body_slots: `[runs]`, slots of the longest lane of each run's body: 0 where there is none.
        with_body: indices of the runs that have a body.
        decode: indices of the runs of one position.
        multi: indices of the longer runs.
        write_tokens: `[written]`, the tokens whose K and V are stored.
        write_slots: `[written]`, where: `block * page_size + offset`.
    """

    runs: tuple[QueryRun, ...]
    tokens: int
    offsets: IntArray
    starts: IntArray
    tail_starts: IntArray
    lengths: IntArray
    tables: IntArray
    table_offsets: IntArray
    body_slots: IntArray
    with_body: tuple[int, ...]
    decode: tuple[int, ...]
    multi: tuple[int, ...]
    write_tokens: IntArray
    write_slots: IntArray

    def table(self, run: int) -> IntArray:
        """The block table of one run, no longer than the run needs."""
        return self.tables[self.table_offsets[run] : self.table_offsets[run + 1]]


def plan_step(runs: Sequence[QueryRun], *, geometry: KVGeometry, blocks: int) -> Schedule:
    """Check the runs of a step and pack them.

    Args:
        runs: at least one. Their tokens are flattened in this order.
        geometry: of the pool.
        blocks: blocks in the pool: every block id must be below it.

    Raises:
        ValueError: a run that is empty, starts below 0 or in its body, has too short a table or bias, names a block or
            a frame outside the pool, would write to the null block, or has a body of another geometry.
    """
    if not runs:
        raise ValueError("a step of 0 runs cannot be planned: skip steps that have no work")
    page_size = geometry.page_size
    for index, run in enumerate(runs):
        _check(index, run, page_size)
    starts = np.array([run.start for run in runs], dtype=np.int64)
    lengths = np.array([run.length for run in runs], dtype=np.int64)
    with_body = [i for i, run in enumerate(runs) if run.body is not None]
    tail_starts, body_slots = starts, np.zeros(len(runs), dtype=np.int64)
    if with_body:
        tail_starts = starts - np.array([run.tail for run in runs], dtype=np.int64)
        body_slots[with_body] = _check_bodies(runs, with_body, geometry, blocks)
    needed = -(-(tail_starts + lengths) // page_size)
    packed = [np.asarray(run.blocks, dtype=np.int64)[:n] for run, n in zip(runs, needed.tolist(), strict=True)]
    tables = np.concatenate(packed)
    if int(tables.min()) < 0 or int(tables.max()) >= blocks:
        wrong = int(tables.min()) if int(tables.min()) < 0 else int(tables.max())
        raise ValueError(f"block {wrong} is outside the pool of {blocks} blocks (0..{blocks - 1})")
    offsets, table_offsets = _exclusive_sum(lengths), _exclusive_sum(needed)
    tokens = int(offsets[-1])
    multi = tuple(np.flatnonzero(lengths > 1).tolist()) if tokens > len(runs) else ()
    write_tokens, write_runs = _writers(runs, tokens, lengths)
    at = tail_starts[write_runs]
    if tokens > len(runs):
        at += write_tokens - offsets[write_runs]
    written = tables[table_offsets[write_runs] + at // page_size]
    if bool((written == NULL_BLOCK).any()):
        first = int(np.argmax(written == NULL_BLOCK))
        raise ValueError(
            f"position {at[first] + runs[write_runs[first]].tail} would be written to the null block: give its row a "
            "block, or set write=False"
        )
    return Schedule(
        runs=tuple(runs),
        tokens=tokens,
        offsets=offsets[:-1],
        starts=starts,
        tail_starts=tail_starts,
        lengths=lengths,
        tables=tables,
        table_offsets=table_offsets,
        body_slots=body_slots,
        with_body=tuple(with_body),
        decode=tuple(np.flatnonzero(lengths == 1).tolist()) if multi else tuple(range(len(runs))),
        multi=multi,
        write_tokens=write_tokens,
        write_slots=written * page_size + at % page_size,
    )


def _check(index: int, run: QueryRun, page_size: int) -> None:
    if run.length < 1 or run.start < 0:
        raise ValueError(f"run {index} covers positions {run.start}..{run.stop - 1}: a run needs 1 position or more")
    first = 0 if run.body is None else run.body.stop
    if run.start < first:
        raise ValueError(
            f"run {index} starts at position {run.start}, inside its row's body, which stops at {first}: "
            "what a body holds cannot be computed again"
        )
    if len(run.blocks) * page_size < run.stop - first:
        raise ValueError(
            f"run {index} reaches position {run.stop - 1}, its {len(run.blocks)} blocks of {page_size} hold "
            f"{len(run.blocks) * page_size}{f' from {first} on' if first else ''}: take blocks before planning"
        )
    if run.bias is None:
        return
    if run.body is not None:
        raise ValueError(f"run {index} has a bias and its row a body, whose slots have no order: give it one of them")
    if run.bias.dim() != 2 or run.bias.shape[1] < run.stop:
        raise ValueError(
            f"run {index} has a bias of shape {tuple(run.bias.shape)}: it must be [kv_heads, >= {run.stop}]"
        )


def _check_bodies(runs: Sequence[QueryRun], with_body: Sequence[int], geometry: KVGeometry, blocks: int) -> list[int]:
    """The longest lane of each of these runs' bodies; a body that several runs share is checked once."""
    longest: dict[int, int] = {}
    for index in with_body:
        body = runs[index].body
        assert body is not None
        if id(body) not in longest:
            longest[id(body)] = _check_body(index, body, geometry, blocks)
    return [longest[id(runs[index].body)] for index in with_body]


def _check_body(index: int, body: Body, geometry: KVGeometry, blocks: int) -> int:
    """Slots of the body's longest lane, or a ValueError that says what would be read amiss."""
    page, lanes = geometry.page_size, geometry.frames_per_block
    frames, lengths = body.frames, body.lengths
    if frames.ndim != 2 or len(frames) != lanes or lengths.shape != (lanes,):
        raise ValueError(
            f"run {index} has a body of frames {frames.shape} and lengths {lengths.shape}, the pool has {lanes} lanes: "
            f"they must be ({lanes}, columns) and ({lanes},)"
        )
    if any(part.dtype != np.int64 or not part.flags.c_contiguous for part in (frames, lengths)):
        raise ValueError(f"run {index} has a body whose frames and lengths are not contiguous int64")
    if body.stop < 0 or body.stop % page:
        raise ValueError(f"run {index} has a body that stops at {body.stop}: it must be a multiple of the page, {page}")
    columns, longest = frames.shape[1], int(lengths.max())
    if int(lengths.min()) < 0 or longest > columns * page:
        wrong = longest if longest > columns * page else int(lengths.min())
        raise ValueError(
            f"run {index} has a body with a lane of {wrong} slots, its {columns} frames of {page} hold {columns * page}"
        )
    if not longest:
        return 0
    is_outside = frames < lanes  # the null block's
    if int(frames.max()) >= blocks * lanes:
        is_outside |= frames >= blocks * lanes
    first = is_outside.argmax(axis=1)
    is_wrong = is_outside[np.arange(lanes), first] & (first * page < lengths)
    if is_wrong.any():
        lane = int(is_wrong.argmax())
        raise ValueError(
            f"run {index} has a body with frame {int(frames[lane, first[lane]])} in lane {lane}: live frames are "
            f"{lanes}..{blocks * lanes - 1}, those before are the null block's"
        )
    return longest


def _writers(runs: Sequence[QueryRun], tokens: int, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """The tokens that are stored, and the run of each."""
    index = np.arange(len(runs))
    if tokens == len(runs) and all(run.write for run in runs):  # a pure decode step
        return index, index
    run_of = np.repeat(index, lengths)
    stored = np.flatnonzero(np.array([run.write for run in runs])[run_of])
    return stored, run_of[stored]


def _exclusive_sum(counts: IntArray) -> IntArray:
    sums = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums

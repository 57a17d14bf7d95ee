"""What attention is asked to do in one step, and the plan made of it: once for all layers.

`QueryRun` is the question: consecutive positions of one row. `Schedule` is the plan: the runs, where their tokens
lie in the flattened step, which slots are written, and every block table packed into one array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvikk.types import NULL_BLOCK, BlockId, Position

IntArray = NDArray[np.int64]


class QueryRun(NamedTuple):
    """Consecutive positions of one row, computed in one step.

    A decode row is one run of one position; a chunk of a prompt is one run; a prompt with holes is several.
    The query at position p attends to the row's positions 0..p. Every position below `start` must already be in
    the pool, or be written by an earlier run of the same row in the same step: all K and V of a step are stored
    before any query attends, so that runs of one row see each other.

    Args:
        blocks: the row's block table, up to position `start + length - 1` at least. Packing is cheapest when it
            is an `array.array('q')` or an int64 numpy array, which are copied whole.
        start: the first position.
        length: how many positions, at least 1.
        write: False when K and V of these positions already lie in the pool (a shared block): they are computed
            for their query only, and not stored.
        bias: optional, added to the logits: `[kv_heads, >= start + length]` fp32, one value for each KV slot of
            the row, the same in all layers.
    """

    blocks: Sequence[BlockId]
    start: Position
    length: int
    write: bool = True
    bias: Tensor | None = None

    @property
    def stop(self) -> int:
        """One past the last position: the KV length that the last query sees."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step, planned: valid for every layer, and for as long as the runs' block tables do not change.

    Token t of run r is token `offsets[r] + t` of the flattened step.

    Args:
        runs: as they were given.
        tokens: tokens of the step, over all runs.
        offsets: `[runs]`, each run's first token.
        starts: `[runs]`, each run's first position.
        lengths: `[runs]`, positions of each run.
        tables: `[blocks of all runs]`, the block tables one after another, as long as the runs need them.
        table_offsets: `[runs + 1]`, where each run's table begins.
        decode: indices of the runs of one position.
        multi: indices of the longer runs.
        write_tokens: `[written]`, the tokens whose K and V are stored.
        write_slots: `[written]`, where: `block * page_size + offset`.
    """

    runs: tuple[QueryRun, ...]
    tokens: int
    offsets: IntArray
    starts: IntArray
    lengths: IntArray
    tables: IntArray
    table_offsets: IntArray
    decode: tuple[int, ...]
    multi: tuple[int, ...]
    write_tokens: IntArray
    write_slots: IntArray

    def table(self, run: int) -> IntArray:
        """The block table of one run, no longer than the run needs."""
        return self.tables[self.table_offsets[run] : self.table_offsets[run + 1]]


def plan_step(runs: Sequence[QueryRun], *, page_size: int, blocks: int) -> Schedule:
    """Check the runs of a step and pack them.

    Args:
        runs: at least one. Their tokens are flattened in this order.
        page_size: slots of one block.
        blocks: blocks in the pool: every block id must be below it.

    Raises:
        ValueError: a run that is empty, starts below 0, has too short a table or bias, names a block outside the
            pool, or would write to the null block.
    """
    if not runs:
        raise ValueError("a step of 0 runs cannot be planned: skip steps that have no work")
    for index, run in enumerate(runs):
        _check(index, run, page_size)
    packed = [np.asarray(run.blocks, dtype=np.int64)[: -(-run.stop // page_size)] for run in runs]
    tables = np.concatenate(packed)
    starts = np.array([run.start for run in runs], dtype=np.int64)
    lengths = np.array([run.length for run in runs], dtype=np.int64)
    if int(tables.min()) < 0 or int(tables.max()) >= blocks:
        wrong = int(tables.min()) if int(tables.min()) < 0 else int(tables.max())
        raise ValueError(f"block {wrong} is outside the pool of {blocks} blocks (0..{blocks - 1})")
    offsets = _exclusive_sum(lengths)
    table_offsets = _exclusive_sum(np.array([len(table) for table in packed], dtype=np.int64))
    write_tokens, write_slots = _writes(runs, offsets, tables, table_offsets, page_size)
    return Schedule(
        runs=tuple(runs),
        tokens=int(offsets[-1]),
        offsets=offsets[:-1],
        starts=starts,
        lengths=lengths,
        tables=tables,
        table_offsets=table_offsets,
        decode=tuple(i for i, run in enumerate(runs) if run.length == 1),
        multi=tuple(i for i, run in enumerate(runs) if run.length > 1),
        write_tokens=write_tokens,
        write_slots=write_slots,
    )


def _check(index: int, run: QueryRun, page_size: int) -> None:
    if run.length < 1 or run.start < 0:
        raise ValueError(f"run {index} covers positions {run.start}..{run.stop - 1}: a run needs 1 position or more")
    if len(run.blocks) * page_size < run.stop:
        raise ValueError(
            f"run {index} reaches position {run.stop - 1}, its {len(run.blocks)} blocks of {page_size} hold "
            f"{len(run.blocks) * page_size}: take blocks before planning"
        )
    if run.bias is not None and (run.bias.dim() != 2 or run.bias.shape[1] < run.stop):
        raise ValueError(
            f"run {index} has a bias of shape {tuple(run.bias.shape)}: it must be [kv_heads, >= {run.stop}]"
        )


def _exclusive_sum(counts: IntArray) -> IntArray:
    sums = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums


def _writes(
    runs: Sequence[QueryRun], offsets: IntArray, tables: IntArray, table_offsets: IntArray, page_size: int
) -> tuple[IntArray, IntArray]:
    """The tokens that are stored, and their slots."""
    writers = [i for i, run in enumerate(runs) if run.write]
    if not writers:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    if len(writers) == len(runs) == int(offsets[-1]):  # a pure decode step: no loop over the rows
        positions = np.array([run.start for run in runs], dtype=np.int64)
        tokens, where = offsets[:-1], table_offsets[:-1]
    else:
        tokens = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in writers])
        positions = np.concatenate([np.arange(runs[i].start, runs[i].stop) for i in writers])
        where = np.repeat(table_offsets[writers], [runs[i].length for i in writers])
    block = tables[where + positions // page_size]
    if bool((block == NULL_BLOCK).any()):
        position = int(positions[int(np.argmax(block == NULL_BLOCK))])
        raise ValueError(
            f"position {position} would be written to the null block: give its row a block, or set write=False"
        )
    return tokens, block * page_size + positions % page_size

"""What the device knows of each seat: block table, next position, last token, sampling parameters.

The host sends commands, kernels derive from them and from the seats what a step's tokens are: ids, positions, slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.engine.gpu.descriptor import (
    COMMAND,
    FROM_DEVICE,
    HEADER,
    IS_ROW,
    IS_STORED,
    OUTPUT,
    RUN,
    SINGLE,
    WRITE,
    StepShape,
)

BLOCK = 256
SAID = 64
"""Sampled tokens that are kept of a seat, by their positions: more than a draft and the ones ahead of it."""
APPLIERS = 32
"""Programs that apply a step's commands."""


class SeatState:
    """All seats, and one more for padded rows, whose table names the null block and whose sampling is greedy.

    Args:
        seats: rows that can be known at once.
        max_blocks: of a row.
        device: where it lies.
    """

    def __init__(self, seats: int, max_blocks: int, device: torch.device) -> None:
        def numbers(dtype: torch.dtype) -> Tensor:
            return torch.zeros(seats + 1, dtype=dtype, device=device)

        self.seats = seats
        self.tables = torch.zeros((seats + 1, max_blocks), dtype=torch.int32, device=device)
        self.tail_starts, self.watch_starts, self.watch_stops = (numbers(torch.int32) for _ in range(3))
        self.positions = numbers(torch.int32)
        self.tokens = numbers(torch.int32)
        self.said = torch.zeros((seats + 1, SAID), dtype=torch.int32, device=device)
        self.temperature, self.top_p, self.min_p = (numbers(torch.float32) for _ in range(3))
        self.top_k, self.choice = numbers(torch.int32), numbers(torch.int32)
        self.seed = numbers(torch.int64)


class StepInputs:
    """What the kernels derive for one shape of step, in buffers whose addresses stay.

    Args:
        shape: of the step.
        device: where they lie.
    """

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        def numbers(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self.shape = shape
        self.token_ids = numbers(shape.all_tokens, torch.int64)
        self.positions = numbers(shape.all_tokens, torch.int64)
        self.slots = numbers(shape.all_tokens, torch.int64)
        self.places = numbers(shape.all_tokens, torch.int32)
        self.single_seats = numbers(shape.singles, torch.int32)
        self.single_lengths = numbers(shape.singles, torch.int32)
        self.run_seats, self.run_starts, self.run_lengths, self.run_offsets = (
            numbers(shape.runs, torch.int32) for _ in range(4)
        )
        self.outputs_at = numbers(shape.outputs, torch.int64)
        self.output_seats = numbers(shape.outputs, torch.int32)
        self.output_positions = numbers(shape.outputs, torch.int64)


def derive(words: Tensor, state: SeatState, inputs: StepInputs, *, page_size: int, watch_window: int = 0) -> None:
    """Carry out a descriptor's commands, and fill a step's inputs from it and the seats.

    Args:
        words: the descriptor, on the device.
        state: of which tables and sampling parameters change.
        inputs: overwritten.
        page_size: slots of a block.
        watch_window: queries that are kept of a seat, at the most.
    """
    shape = inputs.shape
    _apply[(APPLIERS,)](
        words, state.tables, state.temperature, state.top_k, state.top_p, state.min_p, state.seed, state.choice,
        state.tail_starts, state.watch_starts, state.watch_stops,
        inputs.token_ids, inputs.positions, inputs.slots, inputs.places, shape.singles, shape.all_tokens,
        PROGRAMS=APPLIERS, BLOCK=BLOCK, COMMAND=COMMAND, WRITE=WRITE, num_warps=4,
    )  # fmt: skip
    _derive_rows[(triton.cdiv(max(shape.singles, 1), BLOCK),)](
        words, state.tables, state.tables.stride(0), state.tail_starts, state.positions, state.tokens, state.seats,
        state.watch_starts, state.watch_stops, watch_window,
        inputs.token_ids, inputs.positions, inputs.slots, inputs.places,
        inputs.single_seats, inputs.single_lengths, shape.singles,
        HEADER=HEADER, SINGLE=SINGLE, IS_ROW=IS_ROW, FROM_DEVICE=FROM_DEVICE, IS_STORED=IS_STORED,
        PAGE=page_size, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    if shape.runs:
        _derive_runs[(shape.runs, triton.cdiv(shape.tokens, BLOCK))](
            words, state.tables, state.tables.stride(0), state.tail_starts, state.said, state.seats,
            state.watch_starts, state.watch_stops, watch_window,
            inputs.token_ids, inputs.positions, inputs.slots, inputs.places,
            inputs.run_seats, inputs.run_starts, inputs.run_lengths, inputs.run_offsets,
            shape.runs_at, shape.tokens_at, shape.singles, RUN=RUN, PAGE=page_size, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    _derive_outputs[(triton.cdiv(shape.outputs, BLOCK),)](
        words, inputs.positions, inputs.outputs_at, inputs.output_seats, inputs.output_positions,
        shape.outputs_at, shape.outputs, state.seats, OUTPUT=OUTPUT, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def finish(state: SeatState, inputs: StepInputs, tokens: Tensor, is_bad: Tensor, result: Tensor) -> None:
    """Take sampled tokens into the seats, and leave them for the host.

    Args:
        state: of which positions and tokens change.
        inputs: of the step.
        tokens: `[outputs]` int64.
        is_bad: `[outputs]` int32: not 0 where there can be no token.
        result: `[outputs]` int32: the token, or -1.
    """
    outputs = inputs.shape.outputs
    _finish[(triton.cdiv(outputs, BLOCK),)](
        tokens, is_bad, result, state.positions, state.tokens, state.said,
        inputs.output_seats, inputs.output_positions, outputs, state.seats, SAID=SAID, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def said_by(seat: int, position: int) -> int:
    """How a descriptor names the token that a seat has sampled for a position, where the host does not know it yet."""
    return -1 - (seat * SAID + position % SAID)


@triton.jit
def _apply(
    words, tables, temperature, top_k, top_p, min_p, seed, choice, tail_starts, watch_starts, watch_stops,
    token_ids, positions, slots, places, singles, all_tokens,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, COMMAND: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    writes = tl.load(words)
    at = words + tl.load(words + 1)
    for base in range(0, writes, PROGRAMS * BLOCK):
        index = base + lane
        mask = index < writes
        place = tl.load(at + index * WRITE, mask=mask, other=0)
        block = tl.load(at + index * WRITE + 1, mask=mask, other=0)
        tl.store(tables + place, block, mask=mask)
    commands = tl.load(words + 2)
    at = words + tl.load(words + 3)
    for base in range(0, commands, PROGRAMS * BLOCK):
        index = base + lane
        mask = index < commands
        record = at + index * COMMAND
        seat = tl.load(record, mask=mask, other=0)
        tl.store(temperature + seat, tl.load(record + 1, mask=mask, other=0).to(tl.float32, bitcast=True), mask=mask)
        tl.store(top_k + seat, tl.load(record + 2, mask=mask, other=0), mask=mask)
        tl.store(top_p + seat, tl.load(record + 3, mask=mask, other=0).to(tl.float32, bitcast=True), mask=mask)
        tl.store(min_p + seat, tl.load(record + 4, mask=mask, other=0).to(tl.float32, bitcast=True), mask=mask)
        low = tl.load(record + 5, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(record + 6, mask=mask, other=0).to(tl.int64) << 32
        tl.store(seed + seat, high | low, mask=mask)
        tl.store(choice + seat, tl.load(record + 7, mask=mask, other=0), mask=mask)
        tl.store(tail_starts + seat, tl.load(record + 8, mask=mask, other=0), mask=mask)
        tl.store(watch_starts + seat, tl.load(record + 9, mask=mask, other=0), mask=mask)
        tl.store(watch_stops + seat, tl.load(record + 10, mask=mask, other=0), mask=mask)
    for base in range(singles, all_tokens, PROGRAMS * BLOCK):  # what no run fills is padding
        index = base + lane
        mask = index < all_tokens
        tl.store(token_ids + index, tl.zeros((BLOCK,), dtype=tl.int64), mask=mask)
        tl.store(positions + index, tl.zeros((BLOCK,), dtype=tl.int64), mask=mask)
        tl.store(slots + index, tl.full((BLOCK,), -1, dtype=tl.int64), mask=mask)
        tl.store(places + index, tl.full((BLOCK,), -1, dtype=tl.int32), mask=mask)


@triton.jit
def _derive_rows(
    words, tables, table_stride, tail_starts, seat_positions, seat_tokens, spare_seat,
    watch_starts, watch_stops, watch_window,
    token_ids, positions, slots, places, single_seats, single_lengths, singles,
    HEADER: tl.constexpr, SINGLE: tl.constexpr, IS_ROW: tl.constexpr, FROM_DEVICE: tl.constexpr,
    IS_STORED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < singles
    record = words + HEADER + row * SINGLE
    flags = tl.load(record + 1, mask=mask, other=0)
    is_row = (flags & IS_ROW) != 0
    seat = tl.where(is_row, tl.load(record, mask=mask, other=0), spare_seat)
    token = tl.load(record + 2, mask=mask, other=0)
    position = tl.load(record + 3, mask=mask, other=0)
    is_known = (flags & FROM_DEVICE) != 0
    token = tl.where(is_known, tl.load(seat_tokens + seat, mask=mask, other=0), token)
    position = tl.where(is_known, tl.load(seat_positions + seat, mask=mask, other=0), position)
    is_stored = is_row & ((flags & IS_STORED) != 0)
    tail = position - tl.load(tail_starts + seat, mask=mask, other=0)
    block = tl.load(tables + seat.to(tl.int64) * table_stride + tail // PAGE, mask=mask & is_stored, other=0)
    slot = block.to(tl.int64) * PAGE + tail % PAGE
    tl.store(token_ids + row, token.to(tl.int64), mask=mask)
    tl.store(positions + row, position.to(tl.int64), mask=mask)
    tl.store(slots + row, tl.where(is_stored, slot, -1), mask=mask)
    place = _watch_place(seat, position, is_row & mask, watch_starts, watch_stops, watch_window)
    tl.store(places + row, place, mask=mask)
    tl.store(single_seats + row, seat, mask=mask)
    tl.store(single_lengths + row, tl.where(is_row, tail + 1, 0), mask=mask)


@triton.jit
def _watch_place(seat, position, mask, watch_starts, watch_stops, watch_window):
    """Where the query of a token is kept; -1: it is not."""
    start = tl.load(watch_starts + seat, mask=mask, other=0)
    stop = tl.load(watch_stops + seat, mask=mask, other=0)
    is_watched = mask & (position >= start) & (position < stop)
    return tl.where(is_watched, seat * watch_window + position - start, -1)


@triton.jit
def _derive_runs(
    words, tables, table_stride, tail_starts, said, spare_seat, watch_starts, watch_stops, watch_window,
    token_ids, positions, slots, places, run_seats, run_starts, run_lengths, run_offsets, runs_at, tokens_at, singles,
    RUN: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    run = tl.program_id(0)
    record = words + runs_at + run * RUN
    is_run = run < tl.load(words + 4)
    seat = tl.where(is_run, tl.load(record), spare_seat)
    start = tl.load(record + 1)
    length = tl.where(is_run, tl.load(record + 2), 0)
    signed = tl.load(record + 3)
    is_stored = signed >= 0
    offset = tl.where(is_stored, signed, -1 - signed)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < length
    position = start + index
    tail_start = start - tl.load(tail_starts + seat)
    tail = tail_start + index
    block = tl.load(tables + seat.to(tl.int64) * table_stride + tail // PAGE, mask=mask, other=0)
    slot = block.to(tl.int64) * PAGE + tail % PAGE
    token = tl.load(words + tokens_at + offset + index, mask=mask, other=0)
    token = tl.where(token < 0, tl.load(said - 1 - token, mask=mask & (token < 0), other=0), token)
    at = singles + offset + index
    tl.store(token_ids + at, token.to(tl.int64), mask=mask)
    tl.store(positions + at, position.to(tl.int64), mask=mask)
    tl.store(slots + at, tl.where(is_stored, slot, -1), mask=mask)
    seats = tl.full((BLOCK,), 0, dtype=tl.int32) + seat
    tl.store(places + at, _watch_place(seats, position, mask, watch_starts, watch_stops, watch_window), mask=mask)
    if tl.program_id(1) == 0:
        tl.store(run_seats + run, seat)
        tl.store(run_starts + run, tail_start)
        tl.store(run_lengths + run, length)
        tl.store(run_offsets + run, offset)


@triton.jit
def _derive_outputs(
    words, positions, outputs_at, output_seats, output_positions, words_at, outputs, spare_seat,
    OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < outputs
    record = words + words_at + index * OUTPUT
    token = tl.maximum(tl.load(record, mask=mask, other=0), 0)
    seat = tl.load(record + 1, mask=mask, other=-1)
    tl.store(outputs_at + index, token.to(tl.int64), mask=mask)
    tl.store(output_seats + index, tl.where(seat < 0, spare_seat, seat), mask=mask)
    tl.store(output_positions + index, tl.load(positions + token, mask=mask, other=0) + 1, mask=mask)


@triton.jit
def _finish(
    tokens, is_bad, result, seat_positions, seat_tokens, said, output_seats, output_positions, outputs, spare_seat,
    SAID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < outputs
    token = tl.load(tokens + index, mask=mask, other=0).to(tl.int32)
    seat = tl.load(output_seats + index, mask=mask, other=0)
    is_row = mask & (seat != spare_seat)
    tl.store(seat_tokens + seat, token, mask=is_row)
    position = tl.load(output_positions + index, mask=mask, other=0).to(tl.int32)
    tl.store(seat_positions + seat, position, mask=is_row)
    tl.store(said + seat * SAID + position % SAID, token, mask=is_row)
    tl.store(result + index, tl.where(tl.load(is_bad + index, mask=mask, other=0) != 0, -1, token), mask=mask)

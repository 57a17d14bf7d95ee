"""Where a GPU finds the bodies of compressed rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvikk.engine.gpu.bodies import BodyArena
from kvikk.memory import Body
from kvikk.types import Position

PAGE, LANES, FRAMES = 4, 2, 24


def row_with(first_frame: int, columns: int) -> Any:
    """A row whose lanes have so many full frames each."""
    frames = np.arange(first_frame, first_frame + LANES * columns).reshape(LANES, columns)
    slots = np.full((LANES,), columns * PAGE)
    positions = torch.arange(columns * PAGE).repeat(LANES, 1)
    body = Body(frames=frames, lengths=slots, stop=Position(columns * PAGE), positions=positions)
    return SimpleNamespace(is_running=True, body=body)


def found(arena: BodyArena, seat: int) -> list[list[int]]:
    """The frames of each lane, as a kernel finds them."""
    bodies = arena.bodies
    both = zip(bodies.offsets[seat].tolist(), bodies.lengths[seat].tolist(), strict=True)
    return [bodies.frames[at : at + length // PAGE].tolist() for at, length in both]


def test_bodies_of_rows_that_have_ended_take_no_room_from_others() -> None:
    arena = BodyArena(8, LANES, FRAMES, PAGE, torch.device("cpu"))
    stays = row_with(0, 2)
    arena.put(0, stays)
    for seat in range(1, 8):  # each has nearly all frames of the pool, one after the other
        row = row_with(4, 9)
        arena.put(seat, row)
        assert found(arena, 0) == stays.body.frames.tolist()
        assert found(arena, seat) == row.body.frames.tolist()
        row.is_running = False
    assert 1 not in arena
    assert found(arena, 1) == [[], []]


def test_a_body_that_was_compacted_counts_with_what_is_left_of_it() -> None:
    arena = BodyArena(2, LANES, FRAMES, PAGE, torch.device("cpu"))
    first, second = row_with(0, 10), row_with(4, 9)
    arena.put(0, first)
    first.body = row_with(0, 2).body  # the device has not been told of it when the other comes
    arena.put(1, second)
    assert found(arena, 0) == first.body.frames.tolist()
    assert found(arena, 1) == second.body.frames.tolist()

"""Blocks cross the link whole, whatever order the device does things in that events allow."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvikk.geometry import KVGeometry
from kvikk.memory.crossing import PIECE_BYTES, Crossing, plan_pieces, staging_bytes
from kvikk.memory.runs import RunPool
from memory.sim_device import SimEvent, SimStream, copy_by_index, run

WIDTH = 3
BLOCKS = 24
ROOM = 4


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Blocks and slots with runs in them, on one side or both."""
    parts = draw(st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.booleans()), max_size=6))
    rng = random.Random(draw(st.integers(0, 99)))
    blocks, slots = rng.sample(range(200), 100), rng.sample(range(200), 100)
    found: list[tuple[int, int]] = []
    for count, runs_here, runs_there in parts:
        here = [blocks[0] + n for n in range(count)] if runs_here else [blocks.pop() for _ in range(count)]
        there = [slots[0] + n for n in range(count)] if runs_there else [slots.pop() for _ in range(count)]
        taken = {slot for _, slot in found}
        found += [(a, b) for a, b in zip(here, there, strict=True) if b not in taken]
        del blocks[0], slots[0]
    rng.shuffle(found)
    both = np.array(found, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


@given(pairs(), st.integers(1, 9), st.none() | st.integers(1, 9))
def test_every_pair_crosses_once_in_pieces_that_fit_and_no_more_calls_than_runs(
    both: tuple[np.ndarray, np.ndarray], room: int, direct_from: int | None
) -> None:
    blocks, slots = both
    crossed: list[tuple[int, int]] = []
    pieces = plan_pieces(blocks, slots, room=room, direct_from=direct_from)
    for piece in pieces:
        if piece.blocks is None:
            assert direct_from is not None
            ((row, slot, count),) = piece.calls
            assert count <= room
            crossed += [(row + n, slot + n) for n in range(count)]
            continue
        assert len(piece.blocks) <= room
        assert [row for row, _, count in piece.calls for row in range(row, row + count)] == list(
            range(len(piece.blocks))
        )
        for (_, slot, count), (_, following, _) in zip(piece.calls, piece.calls[1:], strict=False):
            assert slot + count < following, "two calls for what one could copy"
        crossed += [(int(piece.blocks[row + n]), slot + n) for row, slot, count in piece.calls for n in range(count)]
    assert sorted(crossed) == sorted(zip(blocks.tolist(), slots.tolist(), strict=True))
    if direct_from is None:
        assert len(pieces) == -(-len(slots) // room)


def test_blocks_that_follow_each_other_on_both_sides_are_not_staged_from_a_length_on() -> None:
    blocks = np.array([9, 5, 6, 7, 3, 1, 2], dtype=np.int64)
    slots = np.array([0, 1, 2, 3, 4, 6, 7], dtype=np.int64)
    direct, staged = plan_pieces(blocks, slots, room=10, direct_from=3)
    assert (direct.blocks, direct.calls) == (None, [(5, 1, 3)])
    assert staged.blocks is not None
    assert staged.blocks.tolist() == [9, 3, 1, 2]
    assert staged.calls == [(0, 0, 1), (1, 4, 1), (2, 6, 2)]


class Sim:
    """A pool and slots with a crossing in each direction, and the steps' stream."""

    def __init__(self, slots: int) -> None:
        self.pool = torch.arange(BLOCKS, dtype=torch.int32)[:, None].repeat(1, WIDTH)
        self.host = torch.full((slots, WIDTH), -1, dtype=torch.int32)
        self.main, self.near_out, self.near_in, self.link_out, self.link_in = (SimStream() for _ in range(5))
        self.out, self.back = (
            Crossing(
                self.pool, self.host, is_out=is_out, link=link, copy_rows=copy_by_index,
                piece_bytes=ROOM * WIDTH * 4,
            )
            for is_out, link in ((True, self.link_out), (False, self.link_in))
        )  # fmt: skip

    def write(self, blocks: list[int], value: int) -> None:
        """As a step does."""
        self.main.do(lambda: self.pool.__setitem__(torch.tensor(blocks), value))

    def run(self, choose: Callable[[int], int]) -> None:
        run([self.main, self.near_out, self.near_in, self.link_out, self.link_in], choose)


@given(st.lists(st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=BLOCKS), max_size=4), st.randoms())
def test_what_the_steps_gather_may_be_overwritten_by_the_next_step(asked: list[list[int]], rng: random.Random) -> None:
    sim = Sim(4 * BLOCKS)
    expected = sim.host.clone()
    slots = iter(rng.sample(range(4 * BLOCKS), 4 * BLOCKS))
    held = list(range(BLOCKS))
    for number, blocks in enumerate(asked):
        places = [next(slots) for _ in blocks]
        sim.out.copy(blocks, places, sim.main, direct=False)
        for block, place in zip(blocks, places, strict=True):
            expected[place] = held[block]
            held[block] = 100 + number
        if blocks:
            sim.write(blocks, 100 + number)
    sim.run(rng.randrange)
    assert torch.equal(sim.host, expected)


@given(st.lists(st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=BLOCKS), max_size=4), st.randoms())
def test_what_the_steps_scatter_is_seen_by_the_next_step_and_not_by_the_one_before(
    asked: list[list[int]], rng: random.Random
) -> None:
    sim = Sim(BLOCKS)
    sim.host[:] = 1000 + torch.arange(BLOCKS, dtype=torch.int32)[:, None]
    held, seen, expected = list(range(BLOCKS)), [], []
    for blocks in asked:
        expected.append(list(held))
        sim.main.do(lambda: seen.append(sim.pool[:, -1].tolist()))
        places = rng.sample(range(BLOCKS), len(blocks))
        sim.back.copy(blocks, places, sim.main, direct=False)
        for block, place in zip(blocks, places, strict=True):
            held[block] = 1000 + place
    sim.run(rng.randrange)
    assert seen == expected
    assert sim.pool[:, -1].tolist() == held


class Rests(Sim):
    """Saves and loads beside the steps, as rows of the engine ask for them."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(40)
        self.rng = rng
        self.free = RunPool(40)
        self.saved: list[tuple[list[int], list[int], SimEvent]] = []
        """Slots, what they hold, and when they do."""
        self.loading: list[tuple[list[int], SimEvent]] = []
        self.under_way: dict[int, list[SimEvent]] = {}
        """Copies that a block takes part in."""
        self.holds = self.pool[:, 0].tolist()
        self.value = 100

    def blocks(self, count: int) -> list[int]:
        first = self.rng.randrange(BLOCKS - count + 1)
        return self.rng.choice([self.rng.sample(range(BLOCKS), count), list(range(first, first + count))])

    def settle(self, blocks: list[int]) -> None:
        for block in blocks:
            for event in self.under_way.pop(block, []):
                self.main.wait(event)

    def begin(self, near: SimStream, link: SimStream) -> None:
        asked = self.main.record()
        near.wait(asked)
        link.wait(asked)

    def note(self, blocks: list[int], event: SimEvent) -> None:
        for block in blocks:
            self.under_way.setdefault(block, []).append(event)

    def save(self) -> None:
        if not self.free.free:
            return
        blocks = self.blocks(self.rng.randint(1, min(self.free.free, 12)))
        self.settle(blocks)
        for block in blocks:
            self.value += 1
            self.holds[block] = self.value
            self.write([block], self.value)
        slots = self.free.take(len(blocks))
        self.begin(self.near_out, self.link_out)
        _, ended = self.out.copy(blocks, slots, self.near_out, direct=True)
        self.note(blocks, ended)  # type: ignore[arg-type]
        self.saved.append((slots, [self.holds[block] for block in blocks], ended))  # type: ignore[arg-type]

    def load(self) -> None:
        if not self.saved:
            return
        slots, values, filled = self.rng.choice(self.saved)
        blocks = self.blocks(len(slots))
        self.settle(blocks)
        self.begin(self.near_in, self.link_in)
        self.link_in.wait(filled)
        _, ended = self.back.copy(blocks, slots, self.near_in, direct=True)
        self.note(blocks, ended)  # type: ignore[arg-type]
        self.loading.append((slots, ended))  # type: ignore[arg-type]
        for block, value in zip(blocks, values, strict=True):
            self.holds[block] = value

    def end(self) -> None:
        """A save may still be under way; a load is settled."""
        if not self.saved:
            return
        slots, _, _ = self.saved.pop(self.rng.randrange(len(self.saved)))
        for read, ended in self.loading:
            if set(read) & set(slots):
                self.main.wait(ended)
        self.free.give_back(slots)


@given(st.lists(st.sampled_from(["save", "save", "load", "end"]), max_size=10), st.randoms())
def test_saves_and_loads_beside_the_steps_find_what_was_there_when_they_were_asked_for(
    asked: list[str], rng: random.Random
) -> None:
    """Slots of rows that ended are filled again while a save to them is under way; halves, ever again."""
    rests = Rests(rng)
    for each in asked:
        getattr(rests, each)()
    rests.run(rng.randrange)
    assert rests.pool[:, -1].tolist() == rests.holds
    for slots, values, _ in rests.saved:
        assert rests.host[slots, 0].tolist() == values


def test_one_half_is_gathered_while_the_other_is_on_the_link() -> None:
    sim = Sim(BLOCKS)
    sim.out.copy(range(3 * ROOM), range(3 * ROOM), sim.main, direct=False)
    while sim.main.can_step:
        sim.main.step()
    assert [half[:, 0].tolist() for half in sim.out._halves] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (sim.host == -1).all()


def test_what_is_booked_is_what_a_crossing_in_each_direction_takes() -> None:
    geometry = KVGeometry(kv_heads=(3,) * 30, head_dim=64, page_size=16, dtype=torch.bfloat16)
    booked = staging_bytes(geometry, torch.device("cuda"))
    assert 4 * (PIECE_BYTES - geometry.block_bytes) < booked <= 4 * PIECE_BYTES
    assert staging_bytes(geometry, torch.device("cpu")) == 0
    words = geometry.block_bytes // 4
    memory = torch.empty(1000, words, dtype=torch.int32, device="meta")
    crossing = Crossing(memory, memory, is_out=True, link=SimStream(), copy_rows=copy_by_index)
    assert 2 * sum(half.nbytes for half in crossing._halves) == booked


@pytest.mark.parametrize("slots", [1, 3])
def test_no_half_is_larger_than_the_hosts_memory(slots: int) -> None:
    crossing = Sim(slots).out
    assert [len(half) for half in crossing._halves] == [slots, slots]

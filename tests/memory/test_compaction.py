"""Compaction: the same kept positions and bytes before and after, in fewer frames of the row's own."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from kvikk.geometry import KVGeometry
from kvikk.memory import BlockPool, Body, FramePool, KVStore, frames_wanted, held_by, plan_compaction
from kvikk.memory import storage as storage_module
from kvikk.types import BlockId, Position

GEOMETRY = KVGeometry(kv_heads=(2, 1, 3), head_dim=4, page_size=4, dtype=torch.float32)
LANES, PAGE = GEOMETRY.frames_per_block, GEOMETRY.page_size
CPU = torch.device("cpu")


def value(lane: int, position: int) -> float:
    return float(lane * 10_000 + position + 1)


@dataclass
class Row:
    """A row in a pool: what it holds is a function of lane and position, so that every slot can be checked."""

    pool: BlockPool
    frames: FramePool
    store: KVStore
    length: int = 0
    body: Body | None = None

    def __post_init__(self) -> None:
        self.blocks: list[BlockId] = []
        self.shared: set[BlockId] = set()
        self.kept = [set[int]() for _ in range(LANES)]

    @property
    def start(self) -> int:
        return 0 if self.body is None else self.body.stop

    def grow(self, tokens: int, share: random.Random | None = None) -> None:
        for position in range(self.length, self.length + tokens):
            index = (position - self.start) // PAGE
            if index == len(self.blocks):
                self.blocks += self.pool.take(1)
                if share is not None and share.random() < 0.4:
                    self.pool.share(self.blocks[-1:])
                    self.shared.add(self.blocks[-1])
            for lane in range(LANES):
                self.store.frames[self.blocks[index] * LANES + lane, :, position % PAGE] = value(lane, position)
                self.kept[lane].add(position)
        self.length += tokens

    def compact(self, draw: random.Random, share: float) -> None:
        held = held_by(
            self.body, self.blocks, [block not in self.shared for block in self.blocks],
            length=self.length, lanes=LANES, page_size=PAGE, device=CPU,
        )  # fmt: skip
        folded = (self.length - self.start) // PAGE
        held = held.first(folded)
        drawn = [[draw.random() < share for _ in range(held.live.shape[1])] for _ in range(LANES)]
        keep = held.live & torch.tensor(drawn, dtype=torch.bool)
        counts = keep.sum(1).numpy()
        fresh = self.frames.take(int(frames_wanted(held, counts).sum()))
        stop = Position(self.start + folded * PAGE)
        plan = plan_compaction(held, counts, fresh, stop=stop)
        packed = self.store.pack(held, keep, plan, wants_order=True)
        marks = packed.gather(torch.where(held.live, held.positions, -1).float() * 2)
        used = {block for block, is_used in zip(self.blocks[:folded], plan.is_used, strict=True) if is_used}
        assert not used & self.shared
        self.frames.split(sorted(used))
        self.frames.release(plan.freed)
        self.pool.release(block for block in self.blocks[:folded] if block not in used)
        for lane in range(LANES):
            dropped = set(held.positions[lane][held.live[lane] & ~keep[lane]].tolist())
            self.kept[lane] -= dropped
        self.blocks, self.body = self.blocks[folded:], plan.body(packed)
        for lane in range(LANES):
            length = int(counts[lane])
            assert (marks[lane, :length] == 2 * self.body.positions[lane, :length]).all()

    def check(self) -> None:
        if self.body is not None:
            for lane in range(LANES):
                positions = self.body.positions[lane, : int(self.body.lengths[lane])].tolist()
                assert positions == sorted(position for position in self.kept[lane] if position < self.start)
                for slot, position in enumerate(positions):
                    frame = self.body.frames[lane, slot // PAGE]
                    assert frame >= LANES, "the null frame is nobody's"
                    assert (self.store.frames[frame, :, slot % PAGE] == value(lane, position)).all()
        for position in range(self.start, self.length):
            for lane in range(LANES):
                slot = self.store.frames[
                    self.blocks[(position - self.start) // PAGE] * LANES + lane, :, position % PAGE
                ]
                assert (slot == value(lane, position)).all()


def row(blocks: int = 60) -> Row:
    pool = BlockPool(blocks)
    store = KVStore(GEOMETRY, blocks + 1, CPU)
    store.poison()
    return Row(pool, FramePool(pool, LANES), store)


def check_pool(rows: list[Row], others: list[list[BlockId]]) -> None:
    pool, frames = rows[0].pool, rows[0].frames
    frames.check([r.body for r in rows if r.body is not None], PAGE)
    pool.check([*(r.blocks for r in rows), *others, *frames.holders()])


@pytest.mark.parametrize("seed", range(40))
def test_any_evictions_keep_positions_and_bytes_and_own_every_frame_once(seed: int) -> None:
    draw = random.Random(seed)
    r = row()
    for _ in range(6):
        r.grow(draw.randrange(1, 30), draw if seed % 2 else None)
        r.compact(draw, draw.choice([0.0, 0.2, 0.5, 0.9, 1.0]))
        r.check()
        check_pool([r], [sorted(r.shared)])


def test_what_is_shared_is_copied_out_and_stays_as_it_was() -> None:
    draw = random.Random(3)
    r = row()
    r.grow(40)
    r.pool.share(r.blocks[:6])
    shared = list(r.blocks[:6])
    r.shared = set(shared)
    before = r.store.frames[[b * LANES + lane for b in shared for lane in range(LANES)]].clone()
    r.compact(draw, 0.5)
    r.check()
    after = r.store.frames[[b * LANES + lane for b in shared for lane in range(LANES)]]
    assert torch.equal(before, after)
    check_pool([r], [shared])


def test_compacting_private_frames_lowers_their_number_to_what_the_kept_tokens_fill() -> None:
    r = row()
    r.grow(160)
    r.compact(random.Random(1), 0.25)
    assert r.body is not None
    assert len(r.body.held(PAGE)) == sum(-(-int(length) // PAGE) for length in r.body.lengths)
    assert r.frames.used < 0.4 * 40 * LANES


def test_the_order_of_slots_does_not_depend_on_what_was_shared() -> None:
    bodies = []
    for shared in (set(), {1, 4}, {0, 2, 3, 9}):
        r = row()
        r.grow(44)
        r.shared = {r.blocks[index] for index in shared}
        r.pool.share(r.shared)
        r.compact(random.Random(8), 0.4)
        r.check()
        assert r.body is not None
        bodies.append([r.body.positions[lane, : r.body.lengths[lane]].tolist() for lane in range(LANES)])
    assert bodies[0] == bodies[1] == bodies[2]


def test_large_moves_in_pieces_do_what_one_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "BYTES_IN_THE_AIR", 256)
    r = row()
    r.grow(160)
    r.compact(random.Random(2), 0.5)
    r.check()


def test_rows_that_compact_by_turns_in_one_pool_stay_apart_through_joins() -> None:
    draw = random.Random(11)
    first = row(80)
    rows = [first, *(Row(first.pool, first.frames, first.store) for _ in range(3))]
    for _ in range(12):
        r = draw.choice(rows)
        r.grow(draw.randrange(1, 25))
        r.compact(draw, draw.choice([0.3, 0.6]))
        sources, targets = first.frames.join(draw.randrange(first.frames.joinable + 1))
        first.store.copy_frames(sources, targets)
        for other in rows:
            if other.body is not None:
                other.body.relocate(sources, targets)
        for other in rows:
            other.check()
        check_pool(rows, [])


def test_what_is_saved_comes_back_to_other_frames() -> None:
    r = row()
    r.grow(42)
    r.compact(random.Random(4), 0.5)
    body = r.body
    assert body is not None
    saved = r.store.save(body.held(PAGE), r.blocks)
    r.frames.release(body.held(PAGE))
    r.pool.release(r.blocks)
    r.store.poison()
    r.pool.take(7)
    fresh = r.frames.take(len(body.held(PAGE)))
    body.frames[body.live_columns(PAGE)] = fresh
    r.blocks = r.pool.take(len(r.blocks))
    r.store.restore(saved, fresh, r.blocks)
    r.check()

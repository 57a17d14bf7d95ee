"""Frames given out one by one: owned once, and joined into blocks again."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvikk.errors import OutOfBlocks, PoolCorrupt
from kvikk.memory import BlockPool, Body, FramePool
from kvikk.types import Position

LANES, PAGE = 6, 4


def body_of(frames: np.ndarray, lanes: int = LANES) -> Body:
    """A body that owns these frames, dealt out to its lanes."""
    columns = -(-len(frames) // lanes)
    table = np.zeros((lanes, columns), dtype=np.int64)
    lengths = np.zeros(lanes, dtype=np.int64)
    for index, frame in enumerate(frames):
        table[index % lanes, index // lanes] = frame
        lengths[index % lanes] += PAGE
    return Body(table, lengths, Position(0), torch.zeros(lanes, columns * PAGE, dtype=torch.int32))


def checked(pool: BlockPool, frames: FramePool, bodies: list[Body]) -> None:
    frames.check(bodies, PAGE)
    pool.check(frames.holders())
    assert pool.held == frames.split_blocks


def test_frames_are_taken_all_or_none_and_come_back_as_whole_blocks() -> None:
    pool = BlockPool(3)
    frames = FramePool(pool, LANES)
    taken = frames.take(LANES + 1)
    assert len(set(taken.tolist())) == LANES + 1
    assert (pool.free, frames.free, frames.used) == (1, LANES - 1, LANES + 1)
    with pytest.raises(OutOfBlocks, match="12 frames asked for, 5 are free in split blocks and 6"):
        frames.take(2 * LANES)
    checked(pool, frames, [body_of(taken)])
    assert frames.release(taken) == 2
    assert (pool.free, frames.free, frames.used) == (3, 0, 0)
    checked(pool, frames, [])


def test_the_null_frames_are_never_given_out() -> None:
    frames = FramePool(BlockPool(4), LANES)
    assert (frames.take(4 * LANES) >= LANES).all()


def test_frames_come_from_the_fullest_split_block_first() -> None:
    pool = BlockPool(3)
    frames = FramePool(pool, LANES)
    blocks = pool.take(2)
    frames.split(blocks)
    first, second = (np.arange(block * LANES, (block + 1) * LANES) for block in blocks)
    frames.release(first[:4])
    frames.release(second[:2])
    assert set((frames.take(2) // LANES).tolist()) == {blocks[1]}


def test_a_shared_or_indexed_block_is_not_split() -> None:
    pool = BlockPool(2)
    frames = FramePool(pool, LANES)
    shared, indexed = pool.take(2)
    pool.share([shared])
    pool.keep(indexed)
    for block in (shared, indexed):
        with pytest.raises(PoolCorrupt, match="cannot be split"):
            frames.split([block])
    assert frames.used == 0


def test_a_frame_that_is_released_twice_is_an_error_and_changes_nothing() -> None:
    frames = FramePool(BlockPool(2), LANES)
    taken = frames.take(4)
    frames.release(taken[:1])
    for wrong in (taken[:1], taken[[1, 1]]):
        with pytest.raises(PoolCorrupt, match="not owned"):
            frames.release(wrong)
    assert frames.used == 3


def test_check_finds_a_frame_that_two_bodies_own_and_one_that_none_does() -> None:
    frames = FramePool(BlockPool(2), LANES)
    taken = frames.take(4)
    with pytest.raises(PoolCorrupt):
        frames.check([body_of(taken), body_of(taken[:1])], PAGE)
    with pytest.raises(PoolCorrupt):
        frames.check([body_of(taken[:3])], PAGE)


def test_joining_frees_blocks_and_every_body_keeps_its_frames_contents() -> None:
    draw = random.Random(5)
    for _ in range(200):
        pool = BlockPool(draw.randrange(2, 12))
        frames = FramePool(pool, LANES)
        bodies: list[Body] = []
        content = np.zeros((pool.total + 1) * LANES, dtype=np.int64)
        while draw.random() < 0.9:
            room = frames.free + pool.free * LANES
            if bodies and (draw.random() < 0.4 or not room):
                gone = bodies.pop(draw.randrange(len(bodies)))
                frames.release(gone.held(PAGE))
            elif room:
                body = body_of(frames.take(draw.randrange(1, min(room, 15) + 1)))
                content[body.held(PAGE)] = draw.randrange(1, 2**40)
                bodies.append(body)
        before = [content[body.held(PAGE)].tolist() for body in bodies]
        free, joinable = pool.free, frames.joinable
        wanted = draw.randrange(joinable + 1)
        sources, targets = frames.join(wanted)
        assert not set(sources.tolist()) & set(targets.tolist())
        content[targets] = content[sources]
        for body in bodies:
            body.relocate(sources, targets)
        assert pool.free == free + wanted
        assert [content[body.held(PAGE)].tolist() for body in bodies] == before
        checked(pool, frames, bodies)
        with pytest.raises(OutOfBlocks):
            frames.join(frames.joinable + 1)


def test_joining_all_that_can_be_leaves_no_more_blocks_than_the_frames_fill() -> None:
    pool = BlockPool(20)
    frames = FramePool(pool, LANES)
    taken = frames.take(20 * LANES)
    frames.release(np.delete(taken, np.arange(0, 20 * LANES, LANES)))
    assert (pool.free, frames.joinable) == (0, 20 - 4)
    frames.join(frames.joinable)
    assert pool.free == 16

"""Blocks leave the pool and come back as they were, while steps go on writing to it."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from kvikk.memory import BlockTransfer, KVStore
from kvikk.memory import transfer as module
from kvikk.types import BlockId
from memory.pools import BLOCKS, content, numbered_pool


def test_what_leaves_is_what_the_block_held_when_it_was_asked_for(store: KVStore) -> None:
    transfer = BlockTransfer(store, BLOCKS)
    expected = [content(store, block) for block in (3, 1)]
    leaving = transfer.copy_out([BlockId(3), BlockId(1)])
    store.words.fill_(7)  # as a step that was given the blocks would
    assert [bytes(copy.wait()) for copy in leaving] == expected


def test_what_comes_in_is_what_was_staged_and_the_other_blocks_stay(store: KVStore) -> None:
    transfer = BlockTransfer(store, BLOCKS)
    before = [content(store, block) for block in range(BLOCKS + 1)]
    staged = [transfer.stage(memoryview(before[block]), 1.0) for block in (1, 2)]
    transfer.copy_in(list(zip(staged, [BlockId(5), BlockId(6)], strict=True)))  # type: ignore[arg-type]
    after = [content(store, block) for block in range(BLOCKS + 1)]
    assert after == [*before[:5], before[1], before[2], *before[7:]]


@pytest.mark.parametrize("layers", [1, pytest.param(40, marks=pytest.mark.gpu)])
def test_more_blocks_than_the_staging_holds_leave_as_they_are_and_come_before_the_next_step(
    store: KVStore, layers: int
) -> None:
    if layers > 1 and store.device.type == "cpu":
        pytest.skip("copies on a CPU are over at once, however long they are")
    store = numbered_pool(store.device, 60, layers=layers)
    words = store.words.view(store.blocks, -1)
    transfer = BlockTransfer(store, 60, piece_bytes=3 * store.geometry.block_bytes)
    rng = random.Random(layers)
    expected = {block: content(store, block) for block in range(1, 61)}
    for _ in range(4):
        gone = rng.sample(range(1, 61), 40)
        leaving = transfer.copy_out([BlockId(block) for block in gone])
        words[torch.tensor(gone, device=store.device)] = -7
        fetched = [bytes(copy.wait()) for copy in leaving]
        assert fetched == [expected[block] for block in gone]
        for copy in leaving:
            copy.release()
        staged = [transfer.stage(memoryview(data), 1.0) for data in fetched]
        before = words.clone()
        transfer.copy_in([(block, BlockId(to)) for block, to in zip(staged, gone, strict=True) if block is not None])
        after = words.clone()
        assert (before[gone] == -7).all()
        assert [after[block].cpu().numpy().tobytes() for block in gone] == fetched
        assert {block: content(store, block) for block in expected} == expected


def test_there_is_room_for_so_many_blocks_until_some_are_released(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OUT_BYTES", 3 * store.geometry.block_bytes)
    monkeypatch.setattr(module, "IN_BYTES", 2 * store.geometry.block_bytes)
    transfer = BlockTransfer(store, BLOCKS)
    blocks = [BlockId(block) for block in range(1, 6)]
    leaving = transfer.copy_out(blocks)
    assert [bytes(copy.wait()) for copy in leaving] == [content(store, block) for block in (1, 2, 3)]
    assert transfer.copy_out(blocks) == []
    for copy in leaving:
        copy.release()
    assert len(transfer.copy_out(blocks[:2])) == 2
    data = memoryview(content(store, 1))
    first, second = transfer.stage(data, 0.0), transfer.stage(data, 0.0)
    assert first is not None
    assert second is not None
    begun_s = time.monotonic()
    assert transfer.stage(data, 0.05) is None
    assert time.monotonic() - begun_s > 0.04
    first.release()
    transfer.copy_in([(second, BlockId(2))])
    assert transfer.stage(data, 1.0) is not None
    assert transfer.stage(data, 1.0) is not None, "what has been copied in is room again"


def test_a_thread_that_waits_for_room_gets_it_when_the_engine_makes_some(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IN_BYTES", store.geometry.block_bytes)
    transfer = BlockTransfer(store, BLOCKS)
    data = memoryview(content(store, 1))
    staged = transfer.stage(data, 0.0)
    assert staged is not None
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(transfer.stage(data, 10.0)))
    waiting.start()
    transfer.copy_in([(staged, BlockId(2))])
    waiting.join(10)
    assert found != [None]
    assert len(found) == 1


def test_blocks_come_and_go_from_many_threads_unharmed(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IN_BYTES", 3 * store.geometry.block_bytes)
    transfer = BlockTransfer(store, BLOCKS)
    sources = [content(store, block) for block in range(1, 5)]
    staged: list[list[object]] = [[] for _ in sources]

    def stage(number: int) -> None:
        for _ in range(50):
            staged[number].append(transfer.stage(memoryview(sources[number]), 10.0))

    threads = [threading.Thread(target=stage, args=(number,)) for number in range(len(sources))]
    for thread in threads:
        thread.start()
    taken = 0
    while taken < 200:
        for number, queue in enumerate(staged):
            while queue:
                transfer.copy_in([(queue.pop(0), BlockId(5 + number))])  # type: ignore[list-item]
                assert content(store, 5 + number) == sources[number]
                (leaving,) = transfer.copy_out([BlockId(5 + number)])
                assert bytes(leaving.wait()) == sources[number]
                leaving.release()
                taken += 1
    for thread in threads:
        thread.join()

"""Blocks stay in the host's memory for as long as someone wants them, and come back as they were."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from kvikk.errors import ConfigError
from kvikk.memory import Copying, KVStore, RestStore
from kvikk.types import BlockId
from memory.pools import BLOCKS, content, numbered_pool


def rest_of(store: KVStore, blocks: int, piece_blocks: int = 100) -> RestStore:
    size_bytes = store.geometry.block_bytes
    return RestStore(store, blocks * size_bytes + 1, piece_bytes=piece_blocks * size_bytes)


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def test_what_was_saved_comes_back_to_any_blocks_and_the_others_stay(store: KVStore) -> None:
    rest = rest_of(store, 4)
    before = [content(store, block) for block in range(BLOCKS + 1)]
    slots, saving = rest.save(ids(3, 1, 8))
    saving.wait()
    assert saving.is_done
    assert saving.seconds > 0
    loading = rest.load(slots[:2], ids(5, 6), saving)
    loading.wait()
    after = [content(store, block) for block in range(BLOCKS + 1)]
    assert after == [*before[:5], before[3], before[1], *before[7:]]


def test_a_load_comes_after_the_save_that_filled_its_slots_and_what_settles_for_it_after_both(store: KVStore) -> None:
    rest = rest_of(store, BLOCKS)
    expected = [content(store, block) for block in range(1, 5)]
    slots, saving = rest.save(ids(1, 2, 3, 4))
    loading = rest.load(slots, ids(6, 7, 8, 9), saving)
    loading.settle()
    copies = store.words.view(torch.int32).view(BLOCKS + 1, -1)[6:10].cpu()
    assert [copy.numpy().tobytes() for copy in copies] == expected


def test_slots_are_counted_and_used_again(store: KVStore) -> None:
    rest = rest_of(store, 3)
    assert (rest.total, rest.free) == (3, 3)
    first, saving = rest.save(ids(1, 2))
    saving.wait()
    assert rest.free == 1
    rest.give_back(first)
    expected = [content(store, block) for block in (7, 8, 9)]
    second, saving = rest.save(ids(7, 8, 9))
    assert (rest.free, set(second)) == (0, {0, 1, 2})
    rest.load(second, ids(1, 2, 3), saving).wait()
    assert [content(store, block) for block in (1, 2, 3)] == expected


def test_a_save_gets_slots_that_follow_each_other_where_there_are_so_many(store: KVStore) -> None:
    rest = rest_of(store, 8)
    first, _ = rest.save(ids(4, 2, 9))
    second, _ = rest.save(ids(1, 3))
    rest.save(ids(5, 6))[1].wait()
    assert (first, second) == ([0, 1, 2], [3, 4])
    rest.give_back(first)
    rest.give_back(second)
    assert rest.save(ids(9, 1, 8, 2))[0] == [0, 1, 2, 3]


@pytest.mark.parametrize("layers", [1, pytest.param(40, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(4))
def test_saves_loads_and_rows_that_end_among_each_other_mix_up_no_block(store: KVStore, layers: int, seed: int) -> None:
    """More blocks than the staging holds, strewn or in runs, and slots that are used again while they are filled."""
    if layers > 1 and store.device.type == "cpu":
        pytest.skip("copies on a CPU are over at once, however long they are")
    rng = random.Random(seed)
    store = numbered_pool(store.device, 60, layers=layers)
    words = store.words.view(store.blocks, -1)
    rest = rest_of(store, 50, piece_blocks=3)
    values = list(range(store.blocks))
    words[1:] = torch.arange(1, store.blocks, dtype=torch.int32, device=store.device)[:, None]
    copies: list[tuple[set[int], Copying]] = []
    """Blocks, and what they take part in."""
    loads: list[tuple[set[int], Copying]] = []
    """Slots, and what reads them."""
    saved: list[tuple[list[int], list[int], Copying]] = []
    """Slots, what they hold, and from when on."""

    def settle(numbers: Sequence[int], among: list[tuple[set[int], Copying]]) -> None:
        for touched, copying in among:
            if touched & set(numbers):
                copying.settle()

    def some(count: int) -> list[BlockId]:
        first = rng.randint(1, store.blocks - count)
        strewn = rng.sample(range(1, store.blocks), count)
        blocks = ids(*rng.choice([strewn, range(first, first + count)]))
        settle(blocks, copies)
        return blocks

    for number in range(60):
        kind = rng.choice(["save", "save", "load", "load", "end"])
        if kind == "save" and rest.free:
            blocks = some(rng.randint(1, min(20, rest.free)))
            for block in blocks:
                values[block] = 1000 * number + block
                words[block] = values[block]
            slots, saving = rest.save(blocks)
            saved.append((slots, [values[block] for block in blocks], saving))
            copies.append((set(blocks), saving))
        elif kind == "load" and saved:
            slots, held, saving = rng.choice(saved)
            which = rng.sample(range(len(slots)), rng.randint(1, len(slots)))
            blocks = some(len(which))
            loading = rest.load([slots[index] for index in which], blocks, saving)
            copies.append((set(blocks), loading))
            loads.append((set(slots), loading))
            for index, block in zip(which, blocks, strict=True):
                values[block] = held[index]
        elif kind == "end" and saved:
            slots, _, _ = saved.pop(rng.randrange(len(saved)))
            settle(slots, loads)
            rest.give_back(slots)
    settle(range(store.blocks), copies)
    assert torch.equal(words.cpu(), torch.tensor(values, dtype=torch.int32)[:, None].expand(*words.shape))
    assert rest.free == 50 - sum(len(slots) for slots, _, _ in saved)


def test_memory_for_less_than_a_block_is_refused_with_both_sizes(store: KVStore) -> None:
    with pytest.raises(ConfigError, match=f"100 bytes is less than a block, of {store.geometry.block_bytes:,}"):
        RestStore(store, 100)

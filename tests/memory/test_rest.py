"""Blocks stay in the host's memory for as long as someone wants them, and come back as they were."""

from __future__ import annotations

import pytest
import torch

from kvikk.errors import ConfigError
from kvikk.memory import KVStore, RestStore
from kvikk.types import BlockId
from memory.pools import BLOCKS, content


def rest_of(store: KVStore, blocks: int) -> RestStore:
    return RestStore(store, blocks * store.geometry.block_bytes + 1)


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


def test_memory_for_less_than_a_block_is_refused_with_both_sizes(store: KVStore) -> None:
    with pytest.raises(ConfigError, match=f"100 bytes is less than a block, of {store.geometry.block_bytes:,}"):
        RestStore(store, 100)

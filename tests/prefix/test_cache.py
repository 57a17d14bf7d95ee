from __future__ import annotations

import pytest

from kvikk.errors import PinRefused
from kvikk.memory import BlockPool
from kvikk.prefix import LRU, KeySpace, PrefixCache, extend_keys
from kvikk.types import BlockId, BlockKey

SPACE = KeySpace(model="m", rope="r", kv_format="k", page_size=4, numerics="fast")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make(blocks: int, *, pinnable: int = 3, enabled: bool = True) -> PrefixCache:
    return PrefixCache(BlockPool(blocks), LRU(), Clock(), pinnable_blocks=pinnable, enabled=enabled)


def chain(family: int, blocks: int) -> list[BlockKey]:
    keys = [SPACE.root()]
    extend_keys(keys, [family] * (4 * blocks), 4)
    return keys[1:]


def fill(cache: PrefixCache, keys: list[BlockKey]) -> list[BlockId]:
    """Compute a sequence and let it go: all its blocks are cached then."""
    assert cache.make_room(len(keys))
    blocks = cache.pool.take(len(keys))
    for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
        cache.insert(key, block, index)
    cache.release(blocks)
    return blocks


def test_look_up_goes_on_behind_a_miss() -> None:
    cache = make(10)
    keys = chain(1, 5)
    blocks = fill(cache, keys)
    cache.discard([blocks[2]])
    assert cache.lookup(keys) == [blocks[0], blocks[1], None, blocks[3], blocks[4]]


def test_the_end_of_the_sequence_used_longest_ago_goes_first() -> None:
    cache = make(6)
    old, young = chain(1, 3), chain(2, 3)
    fill(cache, old)
    fill(cache, young)
    assert cache.make_room(2)
    assert [hit is not None for hit in cache.lookup(old)] == [True, False, False]
    assert None not in cache.lookup(young)


def test_a_hit_makes_a_block_young_again() -> None:
    cache = make(6)
    old, young = chain(1, 3), chain(2, 3)
    blocks = fill(cache, old)
    fill(cache, young)
    cache.acquire(blocks)
    cache.release(blocks)
    assert cache.make_room(3)
    assert None not in cache.lookup(old)


def test_free_blocks_are_used_before_anything_is_evicted() -> None:
    cache = make(6)
    fill(cache, chain(1, 3))
    assert cache.make_room(3)
    assert cache.counters.evicted_blocks == 0


def test_a_block_in_use_is_never_evicted_and_room_that_cannot_be_made_evicts_nothing() -> None:
    cache = make(4)
    keys = chain(1, 4)
    blocks = fill(cache, keys)
    cache.acquire(blocks[:2])
    assert not cache.make_room(3)
    assert None not in cache.lookup(keys)
    assert cache.make_room(2)
    assert [hit is not None for hit in cache.lookup(keys)] == [True, True, False, False]
    cache.pool.check([blocks[:2]])
    cache.check()


def test_two_rows_that_computed_the_same_block_leave_one_in_the_index() -> None:
    cache = make(4)
    (key,) = chain(1, 1)
    first, second = cache.pool.take(2)
    cache.insert(key, first, 0)
    cache.insert(key, second, 0)
    cache.release([first])
    cache.release([second])
    assert cache.lookup([key]) == [first]
    assert (cache.pool.free, cache.pool.cached) == (3, 1)


def test_a_cache_that_is_off_finds_and_keeps_nothing() -> None:
    cache = make(4, enabled=False)
    keys = chain(1, 2)
    fill(cache, keys)
    cache.claim(keys, "row")
    assert cache.lookup(keys) == [None, None]
    assert not cache.is_claimed(keys)
    assert cache.pool.free == 4


def test_a_claim_ends_only_by_its_owner() -> None:
    cache = make(4)
    keys = chain(1, 2)
    cache.claim(keys, "first")
    cache.claim(keys, "second")
    cache.unclaim(keys, "second")
    assert cache.is_claimed(keys)
    cache.unclaim(keys, "first")
    assert not cache.is_claimed(keys)


def test_reset_empties_the_index_but_leaves_held_blocks_to_their_rows() -> None:
    cache = make(4)
    keys = chain(1, 3)
    blocks = fill(cache, keys)
    cache.acquire(blocks[:1])
    assert cache.reset() == 3
    assert cache.lookup(keys) == [None] * 3
    assert (cache.pool.free, cache.pool.held) == (3, 1)
    cache.release(blocks[:1])
    assert cache.pool.free == 4
    cache.check()


def test_a_pin_over_the_limit_is_refused_and_changes_nothing() -> None:
    cache = make(8, pinnable=3)
    keys, others = chain(1, 3), chain(2, 3)
    fill(cache, keys)
    fill(cache, others)
    assert cache.pin("a", keys[:2]) == 2
    with pytest.raises(PinRefused, match="to 5, the limit is 3"):
        cache.pin("b", others)
    assert cache.pinned == 2
    assert cache.pin("a", keys) == 3, "the same name again replaces the pin"
    assert not cache.make_room(8)
    assert cache.unpin("a")
    assert not cache.unpin("a")
    assert cache.make_room(8)
    cache.pool.check([])

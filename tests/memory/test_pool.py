from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvikk.errors import OutOfBlocks, PoolCorrupt
from kvikk.geometry import KVGeometry
from kvikk.memory import BlockPool, KVStore
from kvikk.types import NULL_BLOCK, BlockId


def test_taking_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    held = pool.take(3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 4 are free"):
        pool.take(2)
    assert pool.free == 1
    pool.check([held])


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert NULL_BLOCK not in pool.take(5)


def test_a_shared_block_is_free_only_when_its_last_holder_has_gone() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.share([block])
    pool.release([block])
    assert pool.held == 1
    pool.release([block])
    assert pool.free == 2


def test_a_double_release_is_an_error_and_not_a_second_free() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.release([block])
    with pytest.raises(PoolCorrupt, match="more often than it was taken"):
        pool.release([block])


def test_a_kept_block_falls_to_cached_and_comes_back_when_shared() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.keep(block)
    assert pool.release([block]) == [block]
    assert (pool.free, pool.cached, pool.held) == (1, 1, 0)
    pool.share([block])
    assert (pool.free, pool.cached, pool.held) == (1, 0, 1)
    pool.forget(block)
    pool.release([block])
    assert (pool.free, pool.cached, pool.held) == (2, 0, 0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool, held: pool._free.append(held[0]),
        lambda pool, held: pool._free.pop(),
        lambda pool, held: pool._references.__setitem__(held[0], 7),
        lambda pool, held: setattr(pool, "_cached", 3),
        lambda pool, held: held.pop(),
    ],
)
def test_check_finds_every_kind_of_damage(damage: object) -> None:
    pool = BlockPool(6)
    held = pool.take(3)
    pool.check([held])
    damage(pool, held)  # type: ignore[operator]
    with pytest.raises(PoolCorrupt):
        pool.check([held])


@given(seed=st.integers(0, 2**32))
def test_any_history_of_holders_checks_out(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(12)
    holders: list[list[BlockId]] = []
    for _ in range(60):
        what = rng.random()
        if what < 0.4:
            try:
                holders.append(pool.take(rng.randrange(0, 5)))
            except OutOfBlocks:
                assert pool.free < 5
        elif what < 0.6 and holders:
            copy = list(rng.choice(holders))
            pool.share(copy)
            holders.append(copy)
        elif what < 0.8 and holders:
            pool.release(holders.pop(rng.randrange(len(holders))))
        elif holders and (victims := [b for b in rng.choice(holders) if not pool.is_kept(b)]):
            pool.keep(victims[0])
        elif kept := [BlockId(b) for b in range(1, 13) if pool.is_kept(BlockId(b))]:
            pool.forget(rng.choice(kept))
        pool.check(holders)
        assert pool.free + pool.held + pool.cached == pool.total


def test_the_store_is_one_tensor_whose_layer_views_share_its_memory() -> None:
    geometry = KVGeometry(kv_heads=(2, 3, 1), head_dim=8, page_size=16, dtype=torch.float32)
    store = KVStore(geometry, 5, torch.device("cpu"))
    store.poison()
    for layer in range(3):
        view = store.layer(layer)
        assert view.shape == (5, geometry.kv_heads[layer], 2, 16, 8)
        view[3, 0, 1, 7] = float(layer)
        frame = geometry.frame(BlockId(3), layer, 0)
        assert store.frames[frame, 1, 7, 0] == layer
    assert torch.equal(store.layer(1)[0], torch.zeros(3, 2, 16, 8)), "the null block is zero"
    assert store.size_bytes == store.frames.numel() * 4


def test_copies_are_made_in_order() -> None:
    store = KVStore(KVGeometry(kv_heads=(1,), head_dim=2, page_size=16, dtype=torch.float32), 4, torch.device("cpu"))
    for block in (1, 2, 3):
        store.layer(0)[block] = float(block)
    store.copy_blocks([(BlockId(1), BlockId(2)), (BlockId(2), BlockId(3))])
    assert store.layer(0)[3].unique().item() == 1.0

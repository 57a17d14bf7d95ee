"""The engine with a prefix tier that fails at random: every text is right, and nothing is lost."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest

from engine.shadow_tier import Memory, RandomTier, ShadowCopy, ShadowTransfer
from engine.simulation import PAGE, AheadShadowRunner, Clock, ShadowRunner, World, random_event
from kvikk.engine.kv import KVMemory
from kvikk.engine.tier import EngineTier
from kvikk.tier import Arrival, Ticket
from kvikk.types import BlockKey

STEPS = int(os.environ.get("KVIKK_SIMULATED_STEPS", "100000")) // 20
TIMEOUT_S = 0.1
"""Ten steps of the world."""


class TieredWorld(World):
    def __init__(self, blocks: int, runner: ShadowRunner, rng: random.Random) -> None:
        def make(kv: KVMemory, clock: Clock, memory: Memory) -> EngineTier:
            self.transfer = ShadowTransfer(memory, rng)
            self.tier = RandomTier(rng, self.transfer)
            return EngineTier(self.tier, self.transfer, kv, timeout_s=TIMEOUT_S, clock=clock)  # type: ignore[arg-type]

        super().__init__(blocks, runner=runner, tier=make)  # type: ignore[arg-type]


@pytest.mark.parametrize("runner", [ShadowRunner, AheadShadowRunner])
@pytest.mark.parametrize("blocks", [15, 30])
def test_a_tier_that_loses_delays_and_never_answers_changes_no_text(blocks: int, runner: type[ShadowRunner]) -> None:
    rng = random.Random(blocks)
    world = TieredWorld(blocks, runner(), rng)
    for _ in range(STEPS):
        random_event(world, rng, plain_share=0.8)
        world.tier.answer()
        world.step()
    world.drain()
    stats = world.engine.tier.stats  # type: ignore[union-attr]
    assert world.finished > STEPS // 25
    assert stats.host_hits > 0
    assert stats.store_hits > 0
    assert world.tier.arrived * PAGE > stats.host_hits + stats.store_hits, "some came too late, or were there already"
    assert stats.late > 0
    assert stats.dropped > 0
    assert not world.transfer.alive, "every copy was released"


class SoundTier(RandomTier):
    """Keeps all that it is offered, and answers whole when it is told to."""

    def __init__(self, transfer: ShadowTransfer) -> None:
        super().__init__(random.Random(0), transfer)
        self.asked: list[Ticket] = []

    def wants(self, key: BlockKey) -> bool:
        return key not in self.kept

    def offer(self, key: BlockKey, leaving: ShadowCopy) -> None:
        self.kept[key] = leaving.content
        leaving.release()

    def fetch(self, keys: Sequence[BlockKey], timeout_s: float) -> Ticket:
        self.asked.append(Ticket(keys, timeout_s, self.news))
        return self.asked[-1]

    def wait(self, timeout_s: float) -> None:
        """Nothing comes by itself."""

    def answer(self) -> None:
        for ticket in self.asked:
            for key in ticket.left(100):
                if key not in self.kept:
                    break
                ticket.add(Arrival(key, ShadowCopy(self.kept[key], self._transfer.alive), False))
            ticket.finish()


class SoundWorld(World):
    def __init__(self, blocks: int = 40, *, timeout_s: float = 10.0, **options: Any) -> None:
        def make(kv: KVMemory, clock: Clock, memory: Memory) -> EngineTier:
            self.transfer = ShadowTransfer(memory, None)
            self.tier = SoundTier(self.transfer)
            return EngineTier(self.tier, self.transfer, kv, timeout_s=timeout_s, clock=clock)  # type: ignore[arg-type]

        super().__init__(blocks, tier=make, **options)  # type: ignore[arg-type]

    def evict_all(self) -> None:
        pool = self.engine.pool
        assert self.engine.prefix.make_room(pool.free + pool.cached)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def warmed(self, prompt: list[int]) -> SoundWorld:
        """The prompt's blocks are in the tier, and there alone."""
        self.add(prompt, max_tokens=1)
        self.step()
        self.tier.answer()
        self.drain()
        self.evict_all()
        self.tier.asked.clear()
        return self


def prompt_of(length: int, family: int = 0) -> list[int]:
    return [(family * 7 + i * 3) % 50 for i in range(length)]


def test_blocks_that_come_back_are_not_computed_and_count_as_cached() -> None:
    world = SoundWorld().warmed(prompt_of(22))
    before = world.engine.computed_tokens
    request = world.add(prompt_of(22), max_tokens=1)
    world.step()
    assert request.rows[0] in world.engine.scheduler.waiting, "it waits for the tier"
    world.tier.answer()
    world.drain()
    assert request.cached_tokens == 20
    assert world.engine.computed_tokens - before == 2
    assert world.engine.tier.stats.host_hits == 20  # type: ignore[union-attr]


def test_what_the_device_still_has_is_not_asked_for() -> None:
    world = SoundWorld().warmed(prompt_of(22))
    prefix = world.engine.prefix
    world.add(prompt_of(9), max_tokens=1)
    world.step()
    world.tier.answer()
    world.drain()
    assert len(prefix) == 2
    request = world.add(prompt_of(22), max_tokens=1)
    world.step()
    assert len(world.tier.asked[-1].left(100)) == 3
    world.tier.answer()
    world.drain()
    assert request.cached_tokens == 20


def test_others_pass_a_row_that_waits_for_the_tier_and_it_is_computed_when_time_is_up() -> None:
    world = SoundWorld(timeout_s=3.0).warmed(prompt_of(22))
    silent = world.add(prompt_of(22), max_tokens=1)
    world.step()
    other = world.add([1, 2, 3], max_tokens=4)
    while world.engine.is_active(other.id):
        world.step()
    assert world.engine.is_active(silent.id)
    world.steps(250)
    assert world.engine.is_active(silent.id), "waiting for the tier is no stall"
    world.steps(60)
    assert not world.engine.is_active(silent.id)
    assert silent.cached_tokens == 0
    assert world.engine.tier.stats.late == 1  # type: ignore[union-attr]


def test_two_rows_over_one_document_ask_for_it_once() -> None:
    world = SoundWorld().warmed(prompt_of(22))
    requests = [world.add([*prompt_of(20), last, 1], max_tokens=1) for last in (3, 4)]
    world.steps(2)
    assert len(world.tier.asked) == 1
    world.tier.answer()
    world.drain()
    assert [request.cached_tokens for request in requests] == [20, 20]


def test_a_row_that_is_aborted_while_it_waits_leaves_no_claim_and_is_not_late() -> None:
    world = SoundWorld().warmed(prompt_of(22))
    first = world.add(prompt_of(22), max_tokens=1)
    world.step()
    second = world.add(prompt_of(22), max_tokens=1)
    world.step()
    world.tier.answer()
    world.abort(first.id)
    assert not world.transfer.alive, "what had come for it is released"
    world.step()
    world.tier.answer()
    world.drain()
    assert second.cached_tokens == 20
    assert world.engine.tier.stats.late == 0  # type: ignore[union-attr]


def test_what_may_be_wrong_is_deleted_in_the_tier_too() -> None:
    world = SoundWorld().warmed(prompt_of(22))
    assert len(world.tier.kept) == 5
    world.runner.nan_next = True
    world.add(prompt_of(22), max_tokens=1)
    world.step()
    world.tier.answer()
    world.steps(3)
    assert not world.tier.kept


def test_a_reset_leaves_the_tier_what_it_has() -> None:
    world = SoundWorld().warmed(prompt_of(22))
    world.engine.prefix.reset()
    assert len(world.tier.kept) == 5


def test_blocks_that_come_for_a_row_take_room_from_cached_blocks_and_never_from_running_rows() -> None:
    world = SoundWorld(25, max_len=60).warmed(prompt_of(40))
    running = world.add(prompt_of(40, family=3), max_tokens=15, ignore_eos=True)
    world.step()
    world.tier.answer()
    world.steps(4)
    waiting = world.add(prompt_of(40), max_tokens=1)
    world.step()
    world.tier.answer()
    world.drain()
    assert running.rows[0].preemptions == 0
    assert waiting.cached_tokens > 0

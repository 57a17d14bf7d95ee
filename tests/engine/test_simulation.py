"""The scheduler, the pool and the prefix cache together, over random histories, without a model."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.simulation import PAGE, VOCABULARY, AheadShadowRunner, ShadowRunner, World, random_event
from kvikk.engine.request import FinishReason
from kvikk.errors import PinRefused
from kvikk.prefix import extend_keys

STEPS = int(os.environ.get("KVIKK_SIMULATED_STEPS", "100000"))


@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(15, 40),
    seqs=st.integers(1, 8),
    budget=st.integers(8, 40),
    caching=st.booleans(),
    runner=st.sampled_from([ShadowRunner, AheadShadowRunner]),
    plain_share=st.sampled_from([0.0, 0.8, 1.0]),
    wrong_drafts=st.sampled_from([0.0, 0.15, 1.0]),
    rest_blocks=st.sampled_from([0, 0, 12, 100]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_history_gives_every_request_its_text_and_every_block_back(
    seed: int,
    blocks: int,
    seqs: int,
    budget: int,
    caching: bool,
    runner: type[ShadowRunner],
    plain_share: float,
    wrong_drafts: float,
    rest_blocks: int,
) -> None:
    rng = random.Random(seed)
    world = World(
        blocks,
        seqs=max(seqs, 3),
        budget=max(budget, seqs),
        caching=caching,
        runner=runner(wrong_drafts),
        rest_blocks=rest_blocks,
    )
    for _ in range(120):
        random_event(world, rng, plain_share=plain_share)
        world.step()
    world.drain()
    assert not world.stalled


@pytest.mark.parametrize("runner", [ShadowRunner, AheadShadowRunner])
@pytest.mark.parametrize("blocks", [15, 18, 30, 80])
def test_a_long_run_never_stalls_and_always_checks_out(blocks: int, runner: type[ShadowRunner]) -> None:
    steps, rng = STEPS // 8, random.Random(blocks)
    world = World(blocks, runner=runner(), rest_blocks={18: 15, 30: 100}.get(blocks, 0))
    for _ in range(steps):
        random_event(world, rng, plain_share=0.8 if runner is AheadShadowRunner else 0.0)
        world.step()
    world.drain()
    engine = world.engine
    assert world.finished > steps // 25
    assert not world.stalled
    assert engine.prefix.counters.hits > 0
    assert engine.prefix.counters.evicted_blocks > 0
    assert world.runner.largest_step <= 16
    assert engine.computed_tokens == world.runner.computed_tokens
    drafts = engine.scheduler.rounds.counters
    assert drafts.rounds > steps // 1000
    assert drafts.drafted > drafts.accepted > steps // 1000
    if isinstance(world.runner, AheadShadowRunner):
        assert world.runner.launched_over_another > steps // 4
    else:
        assert world.completed > steps // 500
        assert world.stuck > steps // 500
        assert len(world.scored) > steps // 125
        assert world.runner.compressor.chosen > steps // 50
        assert world.runner.memory.moved > steps
    if engine.kv.rests is not None and world.rest is not None:
        assert engine.kv.rests.counters.partings > steps // 2500
        assert world.rest.loads > steps // 2500
        assert (engine.kv.rests.counters.refused > 0) == (world.rest.total < blocks)
    if blocks < 30:
        assert engine.scheduler.preemptions > 0
        assert engine.prefix.counters.recomputed > 0
        if not isinstance(world.runner, AheadShadowRunner):
            assert world.runner.memory.restored > 0
            assert world.runner.memory.copied_frames > 0


def prompt_of(length: int, family: int = 0) -> list[int]:
    return [(family * 7 + i * 3) % VOCABULARY for i in range(length)]


def computed(world: World) -> int:
    return world.engine.computed_tokens


def test_a_repeated_prompt_hits_all_its_full_blocks_and_computes_the_rest() -> None:
    world = World(40)
    for tail, cached in [(3, 4 * PAGE), (0, 4 * PAGE - 1)]:
        prompt = prompt_of(4 * PAGE + tail, family=tail)
        world.add(prompt, max_tokens=1)
        world.drain()
        before = computed(world)
        request = world.add(prompt, max_tokens=1)
        world.drain()
        assert request.cached_tokens == cached
        assert computed(world) - before == len(prompt) - cached


def test_a_batch_over_one_document_computes_it_once() -> None:
    world = World(60, budget=8)
    document = prompt_of(8 * PAGE)
    for question in range(3):
        world.add([*document, question, question + 1], max_tokens=3, ignore_eos=True)
    world.drain()
    assert computed(world) == 8 * PAGE + 3 * 2 + 3 * 2  # document once, questions, two decode steps each


def test_a_waiting_row_takes_over_when_the_one_that_computes_its_blocks_is_aborted() -> None:
    world = World(60, budget=8)
    document = prompt_of(8 * PAGE)
    first = world.add([*document, 1], max_tokens=3)
    world.add([*document, 2], max_tokens=3)
    world.step()
    assert len(world.engine.scheduler.running) == 1
    world.abort(first.id)
    world.drain()
    assert FinishReason.ERROR not in world.ends.values()


@pytest.mark.parametrize("tail", [0, 2])
def test_holes_are_computed_and_what_lies_behind_them_is_hit(tail: int) -> None:
    world = World(40, max_len=90)
    prompt = prompt_of(10 * PAGE + tail)
    world.add(prompt, max_tokens=1)
    world.drain()
    chain = [world.engine._keyspace.root("")]
    extend_keys(chain, prompt, PAGE)
    blocks = world.engine.prefix.lookup(chain[1:])
    assert world.engine.prefix.discard([blocks[3], blocks[4], blocks[8]]) == 3  # type: ignore[list-item]
    request = world.add(prompt, max_tokens=1)
    world.drain()
    last = (len(prompt) - 1, len(prompt)) if tail == 0 else (10 * PAGE, len(prompt))  # its logits are needed always
    assert request.cached_tokens == 7 * PAGE - (tail == 0)
    scheduled = world.runner.last_plan.rows[0]  # type: ignore[union-attr]
    assert [(run.start, run.stop) for run in scheduled.runs] == [(3 * PAGE, 5 * PAGE), (8 * PAGE, 9 * PAGE), last]
    assert [run.write for run in scheduled.runs] == [True, True, tail != 0]


def test_forks_share_the_prompt_and_copy_only_the_tail_they_write() -> None:
    world = World(40)
    prompt = prompt_of(5 * PAGE + 1)
    request = world.add(prompt, n=3, max_tokens=2, ignore_eos=True)
    while not world.texts:
        world.step()
    world.step()
    assert world.runner.memory.copied_blocks == 2
    world.drain()
    assert request.peak_blocks == 5 + 3


def test_a_preempted_row_resumes_with_the_same_text_and_counts_apart() -> None:
    world = World(16, max_len=60)
    for family in range(4):
        world.add(prompt_of(10, family), max_tokens=40, ignore_eos=True)
    world.drain()
    counters = world.engine.prefix.counters
    assert world.engine.scheduler.preemptions > 0
    assert counters.resumed + counters.recomputed > 0
    assert counters.queries == 40


def test_decoding_goes_on_in_every_step_while_a_long_prompt_is_computed() -> None:
    world = World(60, max_len=120, budget=8)
    talker = world.add(prompt_of(3), max_tokens=30, ignore_eos=True)
    world.step()
    world.add(prompt_of(100, 1), max_tokens=1)
    for _ in range(10):
        outputs = world.step()
        assert talker in [out.request for out in outputs]
        assert world.runner.last_plan.tokens == 8  # type: ignore[union-attr]


def test_a_prompt_gets_on_while_all_other_seats_decode() -> None:
    world = World(80, max_len=60, seqs=4, budget=4)
    for family in range(3):
        world.add(prompt_of(2, family), max_tokens=50, ignore_eos=True)
    for _ in range(4):
        world.step()
    late = world.add(prompt_of(20, 9), max_tokens=1)
    for _ in range(25):
        world.step()
    assert late.id not in world.requests


def test_a_request_that_can_never_get_memory_fails_and_the_others_run_on() -> None:
    world = World(20)
    thief = world.engine.pool.take(18)
    world.add(prompt_of(40), max_tokens=1)
    world.add(prompt_of(3, 1), max_tokens=1)
    for _ in range(150):
        world.step(check=False)
    assert list(world.ends.values()) == [FinishReason.ERROR, FinishReason.LENGTH]
    world.engine.prefix.release(thief)
    world.engine.check()


def test_a_failed_step_ends_its_requests_and_returns_their_blocks() -> None:
    world = World(40)
    world.add(prompt_of(10), max_tokens=5)
    world.runner.fail_next = True
    (out,) = world.step()
    assert out.finish_reason is FinishReason.ERROR
    assert world.engine.pool.held == 0
    world.add(prompt_of(10), max_tokens=5)
    world.drain()


def test_pins_survive_pressure_and_never_take_the_room_of_the_longest_request() -> None:
    world = World(30, max_len=60)
    prompt = prompt_of(9 * PAGE)
    world.add(prompt, max_tokens=1)
    world.drain()
    assert world.engine.pin("system", prompt) == 9
    for family in range(1, 12):
        world.add(prompt_of(55, family), max_tokens=4)
    world.drain()
    request = world.add(prompt, max_tokens=1)
    world.drain()
    assert request.cached_tokens == 9 * PAGE - 1
    other = prompt_of(14 * PAGE, 3)
    world.add(other, max_tokens=1)
    world.drain()
    with pytest.raises(PinRefused, match="the limit is 15"):
        world.engine.pin("too much", other)
    world.engine.check()
    assert world.engine.prefix.unpin("system")


def test_an_interrupted_step_counts_for_nothing_and_its_rows_go_on() -> None:
    world = World(40)
    for family in range(3):
        world.add(prompt_of(9, family), max_tokens=6, ignore_eos=True)
    world.step()
    for _ in range(2):
        world.runner.interrupt_next = True
        assert world.step() == []
    world.drain()
    assert set(world.ends.values()) == {FinishReason.LENGTH}


def test_only_what_was_computed_before_a_preemption_counts_as_recomputed() -> None:
    world = World(40, budget=16)
    world.add(prompt_of(55), max_tokens=1)
    world.step()
    world.step()
    world.engine.scheduler._preempt(world.engine.scheduler.running[0])
    world.drain()
    counters = world.engine.prefix.counters
    assert (counters.resumed, counters.recomputed) == (32, 0)


def test_the_row_that_arrived_last_is_preempted_even_if_it_was_admitted_first() -> None:
    world = World(40, budget=8)
    document = prompt_of(6 * PAGE)
    first = world.add([*document, 1], max_tokens=30, ignore_eos=True)
    second = world.add([*document, 2], max_tokens=30, ignore_eos=True)  # waits for the first one's blocks
    third = world.add(prompt_of(3, 5), max_tokens=30, ignore_eos=True)  # overtakes it
    while len(world.engine.scheduler.running) < 3:
        world.step()
    assert [row.request for row in world.engine.scheduler.running] == [first, second, third]


def test_a_request_that_fails_before_it_forks_ends_all_its_texts() -> None:
    world = World(40)
    request = world.add(prompt_of(9), n=3, max_tokens=5)
    world.runner.nan_next = True
    outputs = world.step()
    assert [(out.choice, out.finish_reason) for out in outputs] == [(i, FinishReason.ERROR) for i in range(3)]
    assert not world.engine.is_active(request.id)


def test_a_text_given_up_before_the_fork_is_not_written() -> None:
    world = World(40, budget=8)
    request = world.add(prompt_of(20), n=3, max_tokens=4, ignore_eos=True)
    world.step()
    assert world.abort_choice(request.id, 1)
    assert not world.abort_choice(request.id, 1)
    assert not world.abort_choice(request.id, 7)
    world.drain()
    assert sorted(choice for _, choice in world.ends) == [0, 2]


def test_a_text_given_up_after_the_fork_leaves_the_others_alone() -> None:
    world = World(40)
    request = world.add(prompt_of(9), n=3, max_tokens=6, ignore_eos=True)
    world.step()
    world.step()
    assert world.abort_choice(request.id, 0)
    world.drain()
    assert sorted(choice for _, choice in world.ends) == [1, 2]


def test_blocks_of_a_row_whose_logits_were_not_finite_are_never_found_again() -> None:
    world = World(40)
    prompt = prompt_of(5 * PAGE)
    world.add(prompt, max_tokens=3)
    world.runner.nan_next = True
    world.drain()
    request = world.add(prompt, max_tokens=3)
    world.drain()
    assert request.cached_tokens == 0


def test_salts_keep_tenants_apart() -> None:
    world = World(40)
    from kvikk.engine.sampling_params import SamplingParams

    prompt = prompt_of(5 * PAGE)
    for salt, cached in [("a", 0), ("b", 0), ("a", 5 * PAGE - 1)]:
        request = world.engine.add(prompt, SamplingParams(max_tokens=1), salt=salt)
        while world.engine.has_work:
            world.engine.step()
        assert request.cached_tokens == cached

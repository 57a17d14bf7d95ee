"""Steps that are started before the ones before them have been read: who knows what when, and what a failure takes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.simulation import EOS, FORM, PAGE, VOCABULARY, AheadShadowRunner, World, expected_text
from kvikk.engine.core import EngineOutput
from kvikk.engine.request import UNKNOWN, FinishReason, Request
from kvikk.errors import StepFailed


def prompt_of(length: int, family: int = 0) -> list[int]:
    return [(family * 7 + i * 3) % VOCABULARY for i in range(length)]


def world_of(blocks: int = 40, **options: int) -> tuple[World, AheadShadowRunner]:
    runner = AheadShadowRunner()
    return World(blocks, runner=runner, **options), runner


def request_that_stops_at(world: World, tokens: int) -> Request:
    """One whose text ends with an end token after so many tokens, and not for its length."""
    for family in range(1000):
        prompt = prompt_of(9, family)
        request = world.add(prompt, max_tokens=tokens + 5, seed=family)
        if len(expected_text(prompt, request, 0, world.max_len)) == tokens:
            return request
        world.abort(request.id)
    raise AssertionError(f"no text ends after {tokens} tokens")


def step_until(world: World, is_so: Callable[[], bool]) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for _ in range(100):
        if is_so():
            return outputs
        outputs += world.step()
    raise AssertionError("it never comes to that")


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [out.token.token_id for out in outputs if out.token is not None]


# What is known when


def test_a_token_is_handed_out_when_the_step_after_it_has_been_started() -> None:
    world, runner = world_of()
    request = world.add(prompt_of(9), max_tokens=5, ignore_eos=True)
    assert world.step() == []
    assert (runner.launched, [*request.rows[0].tokens[9:]], request.rows[0].generated) == (1, [UNKNOWN], [])
    (out,) = world.step()
    assert (runner.launched, request.rows[0].pending) == (2, 1)
    assert [out.token.token_id, UNKNOWN] == [*request.rows[0].tokens[9:]]  # type: ignore[union-attr]


def test_a_text_that_ends_with_a_step_in_flight_gives_its_blocks_back_and_the_token_too_many_is_dropped() -> None:
    world, runner = world_of()
    request = request_that_stops_at(world, 3)
    outputs = step_until(world, lambda: not world.engine.is_active(request.id))
    assert runner.launched == 4
    assert len(runner.unread) == 1
    assert request.rows[0].pending == 0
    assert [*request.rows[0].tokens] == [*request.prompt_token_ids, *tokens_of(outputs)]
    assert (outputs[-1].finish_reason, tokens_of(outputs)[-1], len(outputs)) == (FinishReason.STOP, EOS, 3)
    assert world.engine.pool.held == 0


@pytest.mark.parametrize("prompt_length", [9, 57])  # the second one ends at the maximum model length
def test_a_text_of_known_length_ends_without_a_step_too_many(prompt_length: int) -> None:
    world, runner = world_of(budget=60)
    world.add(prompt_of(prompt_length), max_tokens=3, ignore_eos=True)
    world.drain()
    assert runner.launched == 3
    assert not runner.unread
    assert world.engine.computed_tokens == prompt_length + 2


def test_the_last_step_in_flight_is_read_when_nothing_is_left_to_plan() -> None:
    world, runner = world_of()
    world.add(prompt_of(9), max_tokens=1)
    assert world.step() == []
    assert world.engine.has_work
    (out,) = world.step()
    assert out.finish_reason is not None
    assert (runner.launched, world.engine.has_work) == (1, False)


def test_there_is_work_until_the_last_output_has_been_handed_out() -> None:
    world, _ = world_of()
    request = world.add(prompt_of(9), max_tokens=2, ignore_eos=True)
    handed_out = 0
    while world.engine.has_work:
        handed_out += len(world.step())
    assert handed_out == len(request.rows[0].generated) == 2


def test_the_scores_of_a_prompt_come_with_the_first_token_also_when_that_is_sampled_in_flight() -> None:
    world, runner = world_of(budget=8)
    request = world.add(prompt_of(17), max_tokens=3, ignore_eos=True, prompt_logprobs=0)  # nothing is scored at its end
    world.drain()
    assert runner.launched == 3
    assert world.scored == {request.id}


def test_rows_that_the_host_has_a_say_in_are_computed_when_all_before_them_has_been_read() -> None:
    world, runner = world_of()
    plain = world.add(prompt_of(9), max_tokens=8, ignore_eos=True)
    world.step()
    world.step()
    assert len(runner.unread) == 1
    world.add(prompt_of(9, 1), max_tokens=2, structured_outputs=FORM)
    launched = runner.launched
    outputs = world.step()
    assert runner.launched == launched
    assert not runner.unread
    assert [out.request is plain for out in outputs] == [True, True, False]  # the one in flight, and this step's
    world.drain()


def test_a_row_that_ends_when_the_step_before_is_read_is_left_out_of_the_step_that_is_executed() -> None:
    world, runner = world_of()
    request = request_that_stops_at(world, 1)
    world.step()
    world.add(prompt_of(9, 1), max_tokens=1, structured_outputs=FORM)
    world.step()
    assert not world.engine.is_active(request.id)
    assert [scheduled.row.request is request for scheduled in runner.last_plan.rows] == [False]  # type: ignore[union-attr]
    assert world.engine.computed_tokens == runner.computed_tokens == 9 + 9


# Blocks and the prefix cache


def test_a_block_can_be_found_when_the_step_that_filled_it_has_been_read_and_not_before() -> None:
    world, _ = world_of(budget=2 * PAGE)
    world.add(prompt_of(4 * PAGE + 1), max_tokens=1)
    found = []
    for _ in range(4):
        world.step()
        found.append(len(world.engine.prefix))
    assert found == [0, 2, 4, 4]


@pytest.mark.parametrize("fault", ["fail_next", "fail_results_next", "interrupt_next"])
def test_what_a_lost_step_should_have_filled_is_not_found_though_the_step_before_it_is(fault: str) -> None:
    world, runner = world_of(budget=2 * PAGE)
    prompt = prompt_of(6 * PAGE + 1)
    request = world.add(prompt, max_tokens=1)
    world.step()
    setattr(runner, fault, True)
    world.step()
    assert len(world.engine.prefix) == (0 if fault == "interrupt_next" else 2)
    step_until(world, lambda: not world.engine.is_active(request.id))
    late = world.add(prompt, max_tokens=1)
    world.drain()
    assert late.cached_tokens == (6 * PAGE if fault == "interrupt_next" else 2 * PAGE)


def test_a_step_that_is_read_after_its_row_began_anew_indexes_none_of_the_new_blocks() -> None:
    world, runner = world_of(budget=2 * PAGE)
    request = world.add(prompt_of(6 * PAGE + 1), max_tokens=1)
    world.step()
    runner.interrupt_next = True
    world.step()
    blocks = request.rows[0].blocks
    world.step()
    assert runner.launched == 2
    assert request.rows[0].blocks is not blocks
    assert len(world.engine.prefix) == 0
    world.drain()


def test_a_preempted_row_is_admitted_again_when_its_tokens_are_known_and_not_before() -> None:
    world, _ = world_of(budget=32)
    first = world.add(prompt_of(9), max_tokens=9, ignore_eos=True)
    second = world.add(prompt_of(9, 1), max_tokens=9, ignore_eos=True)
    world.step()
    row = second.rows[0]
    world.engine.scheduler._preempt(row)
    assert row.pending == 1
    world.step()
    assert (row.is_running, row.pending, len(row.generated)) == (False, 0, 1)
    world.step()
    assert (row.is_running, row.pending) == (True, 1)
    world.drain()
    assert set(world.ends) == {(first.id, 0), (second.id, 0)}


def test_a_row_that_is_preempted_while_its_last_token_is_in_flight_ends_all_the_same() -> None:
    world, runner = world_of()
    request = world.add(prompt_of(9), max_tokens=1)
    world.step()
    world.engine.scheduler._preempt(request.rows[0])
    world.drain()
    assert (runner.launched, len(request.rows[0].generated)) == (1, 1)
    assert not world.engine.scheduler.waiting


# Aborts


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_an_abort_while_a_step_is_in_flight_gives_all_blocks_back_and_nothing_more_is_heard(steps: int) -> None:
    world, runner = world_of()
    request = world.add(prompt_of(9), max_tokens=20, ignore_eos=True)
    for _ in range(steps):
        world.step()
    assert len(runner.unread) == 1
    world.abort(request.id)
    assert UNKNOWN not in request.rows[0].tokens
    assert world.engine.pool.held == 0
    other = world.add(prompt_of(50, 1), max_tokens=3, ignore_eos=True)  # takes the blocks that are still written to
    world.drain()
    assert list(world.ends) == [(other.id, 0)]


def test_a_text_of_several_that_is_given_up_in_flight_leaves_the_others_alone() -> None:
    world, runner = world_of()
    request = world.add(prompt_of(9), n=3, max_tokens=9, ignore_eos=True)
    step_until(world, lambda: len(runner.unread) == 1)
    assert world.abort_choice(request.id, 1)
    world.drain()
    assert sorted(choice for _, choice in world.ends) == [0, 2]


def test_a_step_in_flight_whose_rows_are_gone_harms_nothing_that_comes_next() -> None:
    world, runner = world_of()
    request = world.add(prompt_of(9), max_tokens=20, ignore_eos=True)
    step_until(world, lambda: len(runner.unread) == 1)
    world.abort(request.id)
    assert not world.engine.has_work
    world.engine.prefix.reset()
    assert (world.engine.pool.free, world.engine.pool.cached) == (40, 0)
    world.engine.check()
    again = world.add(prompt_of(9), max_tokens=4, ignore_eos=True)
    world.drain()
    assert world.ends == {(again.id, 0): FinishReason.LENGTH}
    assert again.cached_tokens == 0


# Failures


def test_a_step_that_fails_in_flight_ends_its_rows_with_the_tokens_before_it_and_no_other_row() -> None:
    world, runner = world_of()
    first = world.add(prompt_of(9), max_tokens=9, ignore_eos=True)
    world.step()
    world.step()
    runner.fail_results_next = True
    world.step()
    second = world.add(prompt_of(9, 1), max_tokens=3, ignore_eos=True)
    outputs = world.step()  # starts a step with both before it learns of the failure
    (out,) = outputs
    assert isinstance(out.error, StepFailed)
    assert len(first.rows[0].generated) == 2
    world.drain()
    assert world.ends == {(first.id, 0): FinishReason.ERROR, (second.id, 0): FinishReason.LENGTH}


def test_a_step_that_cannot_be_started_ends_its_rows_with_the_tokens_that_were_in_flight() -> None:
    world, runner = world_of()
    request = world.add(prompt_of(9), max_tokens=9, ignore_eos=True)
    world.step()
    runner.fail_next = True
    outputs = world.step()
    assert [out.finish_reason for out in outputs] == [None, FinishReason.ERROR]
    assert tokens_of(outputs) == request.rows[0].generated
    assert world.engine.pool.held == 0


def test_logits_that_are_not_finite_end_their_row_alone_though_its_next_step_is_in_flight() -> None:
    world, runner = world_of()
    prompt = prompt_of(5 * PAGE)
    first = world.add(prompt, max_tokens=9, ignore_eos=True)
    second = world.add(prompt_of(9, 1), max_tokens=9, ignore_eos=True)
    runner.nan_next = True
    world.drain()
    assert world.ends == {(first.id, 0): FinishReason.ERROR, (second.id, 0): FinishReason.LENGTH}
    late = world.add(prompt, max_tokens=1)
    world.drain()
    assert late.cached_tokens == 0


# Interrupts


@pytest.mark.parametrize("fault", ["interrupt_next", "interrupt_results_next"])
def test_an_interrupt_loses_no_token(fault: str) -> None:
    world, runner = world_of()
    for family in range(3):
        world.add(prompt_of(9, family), max_tokens=6, ignore_eos=True)
    while world.engine.has_work:
        setattr(runner, fault, not getattr(runner, fault))
        world.step()
        setattr(runner, fault, False)
        world.step()
    assert list(world.ends.values()) == [FinishReason.LENGTH] * 3


def executed_beside_one_in_flight(world: World) -> Request:
    """A plain request with a step in flight; the next step must be executed, as another asks for a grammar."""
    request = world.add(prompt_of(9), max_tokens=2, ignore_eos=True)
    world.step()
    world.add(prompt_of(9, 1), max_tokens=2, structured_outputs=FORM)
    return request


def test_tokens_that_were_read_before_an_executed_step_was_interrupted_come_with_the_next() -> None:
    world, runner = world_of()
    request = executed_beside_one_in_flight(world)
    runner.interrupt_next = True
    assert world.step() == []
    assert len(request.rows[0].generated) == 1
    outputs = world.step()
    assert tokens_of(outputs)[:1] == request.rows[0].generated[:1]
    world.drain()


def test_an_output_that_an_interrupt_held_back_is_work_though_its_request_has_ended() -> None:
    world, runner = world_of()
    world.add(prompt_of(9), max_tokens=1)
    world.step()
    other = world.add(prompt_of(9, 1), max_tokens=2, structured_outputs=FORM)
    runner.interrupt_next = True
    assert world.step() == []
    world.abort(other.id)
    assert not world.engine.requests
    assert world.engine.has_work
    (out,) = world.step()
    assert out.finish_reason is not None
    assert not world.engine.has_work


def test_an_output_that_an_interrupt_held_back_is_dropped_when_its_request_is_aborted() -> None:
    world, runner = world_of()
    request = executed_beside_one_in_flight(world)
    runner.interrupt_next = True
    world.step()
    world.abort(request.id)
    outputs = step_until(world, lambda: not world.engine.has_work)
    assert request not in [out.request for out in outputs]


@pytest.mark.parametrize("must_fail", [False, True])
def test_a_step_that_was_not_begun_because_reading_the_one_before_was_interrupted_is_planned_again(
    must_fail: bool,
) -> None:
    world, runner = world_of()
    request = executed_beside_one_in_flight(world)
    if must_fail:
        world.abort(next(id_ for id_ in world.requests if id_ != request.id))
        runner.fail_next = True  # the launch fails, so what is in flight is read, and that is interrupted
    runner.interrupt_results_next = True
    assert world.step() == []
    row = request.rows[0]
    assert (row.is_running, row.pending) == (False, 1)
    world.drain()
    assert world.ends[request.id, 0] is FinishReason.LENGTH


# Drafts


def drafting_world(wrong_drafts: float = 0.0) -> tuple[World, AheadShadowRunner]:
    runner = AheadShadowRunner(wrong_drafts)
    return World(60, runner=runner, budget=40), runner


LOSSLESS = {"policy": "streaming", "budget": 0.5, "lossless": True, "draft_tokens": 3, "sinks": 1, "window": 4}


@pytest.mark.parametrize("wrong_drafts", [0.0, 0.5])
def test_drafts_are_verified_before_the_host_knows_them_and_the_text_is_the_same(wrong_drafts: float) -> None:
    world, runner = drafting_world(wrong_drafts)
    for family in range(3):
        world.add(prompt_of(24, family), max_tokens=20, ignore_eos=True, kv_cache=LOSSLESS)
    world.drain()  # which compares every text
    assert runner.verified_ahead >= 9
    assert world.engine.scheduler.rounds.counters.rounds >= 9


def test_the_host_reads_a_step_that_tried_drafts_before_it_plans_another_one() -> None:
    world, runner = drafting_world()
    request = world.add(prompt_of(24), max_tokens=20, ignore_eos=True, kv_cache=LOSSLESS)
    step_until(world, lambda: any(scheduled.drafts for step in runner.unread for scheduled in step.plan.rows))
    known = len(request.rows[0].generated)
    outputs = world.step()
    assert len(outputs) == len(request.rows[0].generated) - known == 4
    assert len(runner.unread) == 1  # and another one has been started before they are told


def test_a_request_that_is_given_up_while_its_drafts_are_verified_leaves_nothing_behind() -> None:
    world, runner = drafting_world()
    request = world.add(prompt_of(24), max_tokens=20, ignore_eos=True, kv_cache=LOSSLESS)
    step_until(world, lambda: any(scheduled.drafts for step in runner.unread for scheduled in step.plan.rows))
    world.abort(request.id)
    world.step()
    assert not world.engine.has_work
    assert world.engine.pool.held == 0


def test_the_drafts_of_a_round_are_started_as_one_step_and_verified_behind_it() -> None:
    world, runner = drafting_world()
    world.add(prompt_of(24), max_tokens=20, ignore_eos=True, kv_cache=LOSSLESS)
    step_until(world, lambda: any(step.plan.repeats > 1 for step in runner.unread))
    (drafting,) = runner.unread
    assert drafting.plan.repeats == 3
    world.step()
    (verifying,) = runner.unread  # what was drafted has been read since
    assert [len(scheduled.drafts) for scheduled in verifying.plan.rows] == [3]
    assert runner.verified_ahead == 1


def test_where_other_rows_decode_plainly_drafts_are_computed_step_by_step() -> None:
    world, runner = drafting_world()
    world.add(prompt_of(24), max_tokens=12, ignore_eos=True, kv_cache=LOSSLESS)
    world.add(prompt_of(24, 1), max_tokens=30, ignore_eos=True)
    step_until(world, lambda: len(world.engine.requests) == 1)
    assert runner.repeated == 0


@pytest.mark.parametrize("bad_logits", [False, True])
def test_a_draft_that_ends_early_is_not_computed_on_beside_rows_that_the_host_samples(bad_logits: bool) -> None:
    """Such a row has all steps read before the next one, which was planned for tokens that never came."""
    for seed in range(25):
        rng = random.Random(seed)
        runner = AheadShadowRunner(0.5)
        world = World(60, runner=runner, budget=40)
        for number, draft_tokens in enumerate((12, 3)):  # one goes on when the other has drafted what it is to
            prompt = [rng.randrange(VOCABULARY) for _ in range(20)]
            drafts = LOSSLESS | {"draft_tokens": draft_tokens}
            world.add(prompt, max_tokens=30, seed=seed * 7 + number, kv_cache=drafts)
        for number in range(60):
            if rng.random() < 0.2:
                prompt = [rng.randrange(VOCABULARY) for _ in range(3)]
                world.add(prompt, max_tokens=2, repetition_penalty=1.5, seed=number)
            runner.nan_next |= bad_logits and rng.random() < 0.1
            world.step()
        world.drain()


def test_what_an_interrupt_leaves_to_be_written_out_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(60, seqs=4, budget=40, runner=AheadShadowRunner(0.0))
    kv_cache = {"policy": "random", "budget": 0.5, "trigger": "prefill", "lossless": True, "draft_tokens": 3}
    requests = [world.add([i] * 17, max_tokens=30, ignore_eos=True, seed=i, kv_cache=kv_cache) for i in range(3)]
    verify, write, calls = world.engine._verify, world.engine._write, Counter[str]()

    def verified(*args: Any) -> None:
        calls["verified"] += 1
        verify(*args)

    def written(*args: Any) -> list[EngineOutput]:
        calls["written"] += 1
        if calls["written"] == 3:
            raise KeyboardInterrupt
        return write(*args)

    monkeypatch.setattr(world.engine, "_verify", verified)
    monkeypatch.setattr(world.engine, "_write", written)
    world.drain()
    assert sum(request.kv_usage.rounds for request in requests if request.kv_usage) == calls["verified"]
    assert world.engine.scheduler.rounds.counters.rounds == calls["verified"]

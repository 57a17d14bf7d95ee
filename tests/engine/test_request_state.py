"""What a row keeps besides its blocks, in the simulation: its grammar, and when it started."""

from __future__ import annotations

import pytest

from engine.fake_grammar import FakeGrammar
from engine.simulation import EOS, FORM, PAGE, VOCABULARY, World
from kvikk.engine import SamplingParams
from kvikk.engine.request import FinishReason
from kvikk.errors import InvalidRequest


def prompt_of(length: int, family: int = 0) -> list[int]:
    return [(family * 7 + i * 3) % VOCABULARY for i in range(length)]


def ended(how: str, **options: object) -> tuple[World, list[int]]:
    """A world in which a request with a grammar has just ended in this way, and its text."""
    for family in range(200):
        world = World(40)
        request = world.add(prompt_of(9, family), structured_outputs=FORM, max_tokens=30, seed=family, **options)
        text: list[int] = []
        while world.engine.has_work:
            outputs = world.step()
            text += [out.token.token_id for out in outputs if out.token is not None]
        if outputs[-1].error is not None:
            found = "stuck"
        elif outputs[-1].finish_reason is FinishReason.STOP:
            found = "complete" if outputs[-1].token is None else "end token"
        else:
            found = "length"
        if found == how:
            assert request.rows[0].generated == text
            return world, text
    raise AssertionError(f"none of the requests ended as {how}")


@pytest.mark.parametrize("options", [{}, {"ignore_eos": True}, {"min_tokens": 30}])
def test_a_text_ends_when_its_grammar_is_complete_and_its_last_token_is_text(options: dict[str, object]) -> None:
    world, text = ended("complete", **options)
    assert len(text) < 30
    assert text[-1] != EOS
    grammar = FakeGrammar("lax", VOCABULARY, frozenset({EOS}))
    for token in text:
        grammar.advance(token)
    assert grammar.is_complete
    assert world.engine.pool.held == 0


def test_an_end_token_ends_a_text_as_soon_as_its_grammar_is_satisfied() -> None:
    _, text = ended("end token")
    assert text[-1] == EOS


def test_under_ignore_eos_no_end_token_comes() -> None:
    with pytest.raises(AssertionError, match="none of the requests"):
        ended("end token", ignore_eos=True)


def test_a_grammar_that_allows_no_token_ends_its_row_alone_and_its_blocks_stay_cached() -> None:
    world, text = ended("stuck")
    assert text
    again = world.add(world.prompts[0], max_tokens=3)
    world.add(prompt_of(12, 3), max_tokens=3, ignore_eos=True)
    world.drain()
    assert again.cached_tokens == 2 * PAGE
    assert next(iter(world.ends.values())) is FinishReason.ERROR
    assert FinishReason.ERROR not in list(world.ends.values())[1:]


def test_texts_of_one_request_each_have_a_grammar_of_their_own() -> None:
    world = World(60)
    request = world.add(prompt_of(9), n=3, structured_outputs=FORM, max_tokens=8)
    world.step()
    grammars = [row.grammar for row in request.rows]
    assert len({id(grammar) for grammar in grammars}) == 3
    world.drain()


def test_structured_outputs_are_refused_by_an_engine_that_has_no_grammars() -> None:
    world = World(40)
    world.engine._grammars = None
    with pytest.raises(InvalidRequest, match="built without a tokenizer") as refusal:
        world.add([1], structured_outputs=FORM)
    assert refusal.value.param == "structured_outputs"
    assert not world.engine.has_work


def test_a_request_has_queued_until_it_was_first_scheduled() -> None:
    world = World(16, seqs=2, budget=16)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    world.clock.now = 5.0
    first, second, third = (world.engine.add(prompt_of(9, family), params) for family in range(3))
    world.clock.now = 5.5
    world.engine.step()
    world.clock.now = 6.0
    while third.queued_s is None:
        world.clock.now += 1.0
        world.engine.step()
    assert first.queued_s == second.queued_s == 0.5
    assert third.queued_s == pytest.approx(world.clock.now - 5.0, abs=0.5)  # the step itself takes time too
    assert third.queued_s > 2.0
    world.engine.scheduler._preempt(world.engine.scheduler.running[-1])
    started = third.queued_s
    while world.engine.has_work:
        world.clock.now += 1.0
        world.engine.step()
    assert third.queued_s == started


def test_stop_tokens_come_before_min_tokens_where_a_grammar_allows_nothing_else() -> None:
    everything = range(VOCABULARY)
    _, text = ended("end token", stop_token_ids=everything, min_tokens=4)
    assert len(text) == 4

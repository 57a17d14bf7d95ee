"""What lossless rows take to draft with is taken back before it costs another request anything."""

from __future__ import annotations

import pytest

from engine.test_compression import engine_on, prompt_of, run, text
from engine.test_lossless import NGRAM, small, with_cache
from kvikk.engine import Engine, FinishReason, Request, SamplingParams
from kvikk.engine.compressor import PolicyCompressor
from kvikk.engine.drafting import Fallback, PromptLookup
from kvikk.engine.gpu.seats import SeatMap
from kvikk.errors import PolicyFailed
from kvikk.models import LlamaModel, toy_model

PAGE = 16


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return toy_model(max_positions=1024)


def add(engine: Engine, prompt: list[int], max_tokens: int, kv_cache: dict[str, object] | None = None) -> Request:
    return engine.add(
        prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, kv_cache=kv_cache)
    )


def always_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-up proposes all that it may, and hardly a token of it is right."""
    monkeypatch.setattr(PromptLookup, "propose", lambda self, most: [255] * most)


@pytest.mark.parametrize("gain", [None, 1.2])
def test_a_request_that_lacks_the_room_of_small_caches_starts_in_the_next_step(
    model: LlamaModel, gain: float | None
) -> None:
    engine = engine_on(model, blocks=36, caching=False)
    first = add(engine, prompt_of(320, seed=1), 100, small(budget=0.5))
    for _ in range(12):
        engine.step()
    assert first.rows[0].drafting is not None
    assert first.rows[0].drafting.cache is not None
    engine.scheduler.rounds.promised_gain = gain
    second = add(engine, prompt_of(100, seed=2), 8)
    for _ in range(2):
        engine.step()
        engine.check()
    assert second.rows[0].is_running
    assert first.rows[0].is_running
    while engine.has_work:
        engine.step()
        engine.check()
    (alone,) = run(engine_on(model), [(prompt_of(320, seed=1), {"max_tokens": 100, "ignore_eos": True})])
    assert text(first) == text(alone)
    assert engine.scheduler.preemptions == 0


def test_a_table_is_written_anew_when_blocks_for_drafts_were_taken_back_and_others_given(model: LlamaModel) -> None:
    engine = engine_on(model, blocks=36, caching=False)
    row = add(engine, prompt_of(100, seed=1), 40, NGRAM).rows[0]
    while not row.has_begun:
        engine.step()
    seats, writes = SeatMap(2, 40), list[int]()
    mirror = seats.mirror(row, [])
    row.blocks += engine.pool.take(2)
    seats.write_table(mirror, [])
    engine.kv.trim(row)
    taken = engine.pool.take(4)
    row.blocks += taken[2:]
    seats.write_table(mirror, writes)
    at = mirror.seat * 40
    assert dict(zip(writes[::2], writes[1::2], strict=True)) == dict(enumerate(row.blocks, at))


def test_small_caches_that_gain_more_than_the_request_would_are_kept(model: LlamaModel) -> None:
    engine = engine_on(model, blocks=36, caching=False)
    first = add(engine, prompt_of(320, seed=1), 100, small(budget=0.5))
    for _ in range(12):
        engine.step()
    engine.scheduler.rounds.promised_gain = 2.5
    second = add(engine, prompt_of(100, seed=2), 8)
    for _ in range(3):
        engine.step()
        engine.scheduler.rounds.promised_gain = 2.5
    assert not second.rows[0].is_running
    assert first.rows[0].drafting is not None
    assert first.rows[0].drafting.cache is not None


@pytest.mark.parametrize("method", [NGRAM | {"draft_tokens": 32}, small(draft_tokens=32)])
def test_no_request_is_preempted_for_blocks_that_were_taken_for_drafts(
    model: LlamaModel, method: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    always_wrong(monkeypatch)
    for length in range(40, 40 + PAGE, 3):
        sizes = (length, 30), (45, 60)
        blocks = sum(-(-(prompt + generated - 1) // PAGE) for prompt, generated in sizes)
        engine = engine_on(model, blocks=blocks, caching=False)
        first, second = (
            add(engine, prompt_of(prompt, seed=n), generated, method if n else None)
            for n, (prompt, generated) in enumerate(sizes[::-1])
        )
        while engine.has_work:
            engine.step()
            engine.check()
        assert engine.scheduler.preemptions == 0
        assert [request.rows[0].finish_reason for request in (first, second)] == [FinishReason.LENGTH] * 2


def test_a_prompt_gets_its_part_of_steps_that_drafts_would_fill(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_wrong(monkeypatch)
    engine = engine_on(model, rows=8, budget=64)
    for n in range(2):
        add(engine, prompt_of(40, seed=n), 300, NGRAM | {"draft_tokens": 32})
    for _ in range(4):
        engine.step()
    late = add(engine, prompt_of(200, seed=9), 4)
    steps = 0
    while not late.rows[0].generated:
        engine.step()
        steps += 1
    assert steps <= 200 // (64 // 2 - 2) + 2


@pytest.mark.parametrize("trigger", ["every:1", "every:4"])
def test_no_request_fails_where_memory_is_too_short_for_small_caches(model: LlamaModel, trigger: str) -> None:
    for blocks in range(12, 41, 2):
        engine = engine_on(model, blocks=blocks, caching=False)
        jobs = [(prompt_of(20 + 13 * n, seed=n), {"max_tokens": 24, "ignore_eos": True}) for n in range(5)]
        found = run(engine, with_cache(jobs, small(budget=0.5, trigger=trigger)))
        assert {row.finish_reason for request in found for row in request.rows} == {FinishReason.LENGTH}


def test_of_a_text_that_the_budget_holds_there_is_no_copy(model: LlamaModel) -> None:
    engine = engine_on(model)
    request = add(engine, prompt_of(20), 6, small(window=32))
    while engine.has_work:
        engine.step()
    assert request.kv_usage is not None
    assert request.kv_usage.compactions == 0
    assert request.kv_usage.drafted == 0


@pytest.mark.parametrize("trigger", ["prefill", "every:2"])
def test_nothing_is_copied_for_a_request_that_drafts_nothing(model: LlamaModel, trigger: str) -> None:
    (request,) = run(
        engine_on(model), with_cache([(prompt_of(100), {"max_tokens": 8})], small(draft_tokens=0, trigger=trigger))
    )
    assert request.kv_usage is not None
    assert request.kv_usage.compactions == 0


def test_a_row_that_fell_back_copies_nothing_until_it_is_tried_again(model: LlamaModel) -> None:
    engine = engine_on(model)
    request = add(engine, prompt_of(100), 60, small(trigger="every:4", draft_tokens=None))
    while not request.rows[0].has_begun:
        engine.step()
    drafting = request.rows[0].drafting
    assert drafting is not None
    assert request.kv_usage is not None
    copies = request.kv_usage.compactions
    drafting.record.fallback = Fallback.MISSES
    for _ in range(20):
        engine.step()
        drafting.record.fallback = Fallback.MISSES
    assert request.kv_usage.compactions <= copies + 1
    assert drafting.cache is None
    drafting.record.idle_tokens = drafting.record.patience
    for _ in range(8):
        engine.step()
    assert request.kv_usage.compactions > copies


def test_a_policy_that_fails_costs_a_lossless_text_nothing(model: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    job = (prompt_of(100), {"max_tokens": 20, "ignore_eos": True})
    (plain,) = run(engine_on(model), [job])

    def fail(*_: object) -> None:
        raise PolicyFailed("it scored NaN")

    monkeypatch.setattr(PolicyCompressor, "choose", fail)
    (lossy, lossless) = (
        run(engine_on(model), with_cache([job], method))[0]
        for method in (small(lossless=False, draft_tokens=None), small())
    )
    assert lossy.rows[0].finish_reason is FinishReason.ERROR
    assert text(lossless) == text(plain)
    assert lossless.rows[0].finish_reason is FinishReason.LENGTH

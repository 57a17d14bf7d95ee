"""Lossless rows on a real engine: whatever they draft with, their text is that of the whole cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.test_compression import POLICIES, SMALL, engine_on, prompt_of, run, text
from kvikk.compress import LayerView
from kvikk.compress.policies.knorm import KNorm
from kvikk.engine import Engine, FinishReason, Request, SampledToken, SamplingParams
from kvikk.engine.core import agreeing
from kvikk.engine.drafting import Fallback, PromptLookup, RoundCosts, StepTimes
from kvikk.engine.runner import ModelRunner
from kvikk.engine.step import RowResult, StepPlan
from kvikk.models import LlamaModel, toy_model
from kvikk.types import Numerics

Job = tuple[list[int], dict[str, Any]]
NGRAM: dict[str, Any] = {"lossless": True, "drafter": "ngram", "draft_tokens": 4}
LOOPS: dict[str, Any] = {"frequency_penalty": -2.0, "presence_penalty": -2.0}
"""Has the model say again what it has said, so that there is something to look up."""


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return toy_model(max_positions=1024)


def small(policy: str = "snapkv", budget: float = 0.25, **options: Any) -> dict[str, Any]:
    return {"policy": policy, "budget": budget, "lossless": True, "draft_tokens": 4} | SMALL | options


def repetitive(length: int, seed: int = 0) -> list[int]:
    """A prompt in which what came before comes again: every few tokens there is something to propose."""
    phrases = [prompt_of(5, seed=seed * 10 + n) for n in range(3)]
    rng = random.Random(seed)
    return [token for _ in range(length // 5 + 1) for token in rng.choice(phrases)][:length]


def with_cache(jobs: list[Job], kv_cache: dict[str, Any] | None) -> list[Job]:
    return [(prompt, options | {"kv_cache": kv_cache}) for prompt, options in jobs]


def texts(requests: list[Request]) -> list[list[list[int]]]:
    return [[row.generated for row in request.rows] for request in requests]


def drafts(requests: list[Request]) -> Counter[str]:
    """What all requests drafted together."""
    found: Counter[str] = Counter()
    for request in requests:
        assert request.kv_usage is not None
        for name in ("rounds", "drafted", "accepted"):
            found[name] += getattr(request.kv_usage, name)
    return found


def change_results(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[StepPlan, list[RowResult]], list[RowResult]]
) -> None:
    """Have all steps come out otherwise, or be looked at."""
    execute = ModelRunner.execute
    monkeypatch.setattr(ModelRunner, "execute", lambda self, plan: change(plan, execute(self, plan)))


# The text is that of the whole cache


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_at_every_budget_gives_the_text_of_the_whole_cache(model: LlamaModel, policy: str) -> None:
    rng = random.Random(policy)
    jobs: list[Job] = [
        (prompt_of(96, seed=1), {"temperature": 0.0}),
        (prompt_of(150, seed=2), {"temperature": 0.9, "seed": 3, "top_p": 0.95}),
        (prompt_of(131, seed=3), {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2}),
        (prompt_of(180, seed=4), {"temperature": 1.2, "seed": 5, "presence_penalty": 0.4, "n": 2}),
    ]
    plain = texts(run(engine_on(model), jobs))
    lossy_differ = False
    for budget in (0.5, 0.25, 0.125):
        method = small(policy, budget, trigger=rng.choice(["prefill", "every:9"]))
        found = run(engine_on(model), with_cache(jobs, method))
        assert texts(found) == plain
        assert drafts(found)["accepted"] > 0
        lossy = {key: method[key] for key in method if key not in ("lossless", "draft_tokens")}
        lossy_differ = lossy_differ or texts(run(engine_on(model), with_cache(jobs, lossy))) != plain
    assert lossy_differ, "what the policy keeps gives other texts by itself: else this test says nothing"


@pytest.mark.parametrize("draft_tokens", [None, 0, 1, 3, 32])
@pytest.mark.parametrize("drafter", ["cache", "ngram"])
def test_no_number_of_drafts_changes_a_text(model: LlamaModel, drafter: str, draft_tokens: int | None) -> None:
    jobs: list[Job] = [
        (repetitive(90 + 31 * n, seed=n), {"temperature": [0.0, 0.7][n % 2], "seed": n, "max_tokens": 40})
        for n in range(4)
    ]
    method = small(drafter=drafter, draft_tokens=draft_tokens)
    found = run(engine_on(model), with_cache(jobs, method))
    assert texts(found) == texts(run(engine_on(model), jobs))
    assert (drafts(found)["drafted"] == 0) == (draft_tokens == 0)


@pytest.mark.parametrize(
    "method", [small("h2o", trigger="every:7"), small("snapkv"), NGRAM], ids=["h2o", "snapkv", "ngram"]
)
def test_texts_do_not_hang_on_company_arrival_chunks_preemption_or_what_was_cached(
    model: LlamaModel, method: dict[str, Any]
) -> None:
    shared = repetitive(150, seed=9)
    jobs: list[Job] = [
        (shared[: 40 + 30 * n] + prompt_of(20 + 7 * n, seed=n), {"seed": n, "temperature": [0.0, 0.8][n % 2]} | LOOPS)
        for n in range(5)
    ]
    plain = texts(run(engine_on(model), jobs))
    mixed = [job if n == 2 else with_cache([job], method)[0] for n, job in enumerate(jobs)]
    for engine, seed in [
        (engine_on(model), None),
        (engine_on(model, budget=16), None),
        (engine_on(model, budget=50, blocks=40), None),
        (engine_on(model, budget=37), 1),
        (engine_on(model, budget=64, caching=False), 2),
    ]:
        assert texts(run(engine, mixed, seed=seed)) == plain
        warm = run(engine, mixed)
        assert texts(warm) == plain
        if engine.prefix.enabled and engine.pool.total > 100:
            assert sum(request.cached_tokens for request in warm) > 200
        assert engine.scheduler.rounds.counters.accepted > 0


@pytest.mark.parametrize(
    "method", [small("h2o"), small("keydiff", trigger="every:7"), NGRAM], ids=["h2o", "keydiff", "ngram"]
)
def test_in_exact_numerics_every_log_probability_is_plain_decodings_to_the_bit(method: dict[str, Any]) -> None:
    model = toy_model(max_positions=1024, dtype=torch.bfloat16, numerics="exact")
    shared = repetitive(120, seed=4)
    prompts = [shared[: 30 * n] + prompt_of(40 + 11 * n, seed=n) for n in range(1, 5)]

    def told(engine: Engine, asked: list[list[int]], kv_cache: Any, preempt_every: int = 0) -> dict[int, list[Any]]:
        for prompt in asked:
            options = {"temperature": 0.0, "max_tokens": 24, "logprobs": len(prompt) % 20} | LOOPS
            engine.add(prompt, SamplingParams(kv_cache=kv_cache, **options))
        found: dict[int, list[Any]] = {}
        while engine.has_work:
            for out in engine.step():
                assert out.token is not None
                found.setdefault(len(out.request.prompt_token_ids), []).append(out.token)
            if preempt_every and engine.steps % preempt_every == 0 and engine.scheduler.running:
                engine.scheduler._preempt(engine.scheduler.running[-1])
        return found

    plain: dict[int, list[Any]] = {}
    for prompt in prompts:
        plain |= told(engine_on(model), [prompt], None)
    engine = engine_on(model, budget=64)
    assert told(engine, prompts, method) == plain
    assert told(engine, prompts, method, preempt_every=7) == plain
    assert engine.scheduler.rounds.counters.accepted > 10


def test_scores_of_a_prompt_are_those_that_it_has_without_drafts(model: LlamaModel) -> None:
    job = (prompt_of(130), {"prompt_logprobs": 2})
    (plain,) = run(engine_on(model), [job])
    (found,) = run(engine_on(model), with_cache([job], small()))
    assert found.prompt_logprobs == plain.prompt_logprobs
    assert text(found) == text(plain)


@pytest.mark.parametrize("options", [{"n": 3, "temperature": 0.8, "seed": 2}, {"prompt_logprobs": 1}])
def test_a_prompt_of_which_one_token_is_missing_is_no_text_to_draft_for(
    model: LlamaModel, options: dict[str, Any]
) -> None:
    def outputs(kv_cache: dict[str, Any] | None) -> list[tuple[Any, ...]]:
        engine = engine_on(model, budget=96)
        params = SamplingParams(**{"max_tokens": 24, "temperature": 0.0} | options, kv_cache=kv_cache)
        engine.add(repetitive(97, seed=1), params)
        found = []
        while engine.has_work:
            found += [(out.choice, out.token, out.finish_reason, out.prompt_logprobs) for out in engine.step()]
        assert (engine.scheduler.rounds.counters.rounds > 0) == (kv_cache is not None)
        return sorted(found, key=lambda out: out[0])

    assert outputs(NGRAM) == outputs(None)


def test_a_prompt_is_indexed_once_for_all_texts_that_begin_with_it(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexed = []
    index = PromptLookup.__init__
    monkeypatch.setattr(
        PromptLookup, "__init__", lambda self, tokens: (indexed.append(len(tokens)), index(self, tokens))[1]
    )
    job = (repetitive(120, seed=3), LOOPS | {"n": 3, "temperature": 0.7, "seed": 1, "max_tokens": 40})
    (plain,) = run(engine_on(model), [job])
    (found,) = run(engine_on(model), with_cache([job], NGRAM))
    assert texts([found]) == texts([plain])
    assert len({tuple(generated) for generated in texts([found])[0]}) == 3, "each looks up in its own text"
    assert drafts([found])["accepted"] > 10
    assert indexed == [120]


# Drafters that are wrong


def wrong_small_cache(plan: StepPlan, results: list[RowResult]) -> list[RowResult]:
    return [
        RowResult([SampledToken((token.token_id + 1) % 256) for token in result.tokens])
        if scheduled.row.draft_of is not None
        else result
        for scheduled, result in zip(plan.rows, results, strict=True)
    ]


@pytest.mark.parametrize("drafter", ["cache", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_drafter_that_is_always_wrong_gives_the_right_text_and_is_soon_asked_no_more(
    model: LlamaModel, drafter: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = [
        (prompt_of(140, seed=n), {"temperature": temperature, "seed": n, "max_tokens": 60}) for n in range(3)
    ]
    plain = run(engine_on(model), jobs)
    change_results(monkeypatch, wrong_small_cache)
    monkeypatch.setattr(PromptLookup, "propose", lambda self, most: [255] * most)
    assert not any(255 in row for request in texts(plain) for row in request)
    costs = RoundCosts(draft_step_s=0.3, draft_row_s=0.0, verify_s=1.0, verify_token_s=0.1, plain_s=1.0)
    monkeypatch.setattr(StepTimes, "costs", lambda self, rows, **options: costs)
    engine = engine_on(model)
    found = run(engine, with_cache(jobs, small(drafter=drafter, draft_tokens=None)))
    assert texts(found) == texts(plain)
    counts = drafts(found)
    assert counts["accepted"] == 0
    assert 0 < counts["rounds"] < 45, "most tokens are decoded plainly"
    assert engine.scheduler.rounds.fallbacks == {Fallback.MISSES: 3}


@pytest.mark.parametrize("drafter", ["cache", "ngram"])
def test_a_request_that_says_how_many_tokens_to_draft_goes_on_drafting_them_whatever_pays(
    model: LlamaModel, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_results(monkeypatch, wrong_small_cache)
    monkeypatch.setattr(PromptLookup, "propose", lambda self, most: [255] * most)
    costs = RoundCosts(draft_step_s=0.3, draft_row_s=0.0, verify_s=1.0, verify_token_s=0.1, plain_s=1.0)
    monkeypatch.setattr(StepTimes, "costs", lambda self, rows, **options: costs)
    engine = engine_on(model)
    found = run(engine, with_cache([(prompt_of(140), {"max_tokens": 60})], small(drafter=drafter, draft_tokens=3)))
    assert drafts(found)["accepted"] == 0
    assert drafts(found)["rounds"] >= 55, "nearly every token is the one after drafts that were wrong"
    assert not engine.scheduler.rounds.fallbacks


def test_a_small_cache_whose_logits_are_not_finite_is_given_up_and_the_row_goes_on(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = run(engine_on(model), [(prompt_of(140), {})])
    calls = []

    def none_from_the_small_cache(plan: StepPlan, results: list[RowResult]) -> list[RowResult]:
        is_draft = [scheduled.row.draft_of is not None for scheduled in plan.rows]
        calls.append(any(is_draft))
        return [RowResult([]) if draft else result for draft, result in zip(is_draft, results, strict=True)]

    change_results(monkeypatch, none_from_the_small_cache)
    (found,) = run(engine_on(model), with_cache([(prompt_of(140), {})], small()))
    assert text(found) == text(plain)
    assert sum(calls) == 1, "it is not asked again"


def test_a_policy_that_scores_nan_is_asked_no_more_and_the_text_is_that_of_the_whole_cache(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plain,) = run(engine_on(model), [(prompt_of(140), {})])
    asked = []

    def score(policy: KNorm, view: LayerView) -> Tensor:
        asked.append(view.length)
        return torch.full_like(view.norms(view.keys), torch.nan)

    monkeypatch.setattr(KNorm, "score", score)
    (found,) = run(engine_on(model), with_cache([(prompt_of(140), {})], small("knorm", trigger="every:8")))
    assert text(found) == text(plain)
    assert set(asked) == {140}


@pytest.mark.parametrize("good", [0, 1, 2])
def test_logits_that_are_not_finite_among_those_of_drafts_cost_what_comes_after_them(
    model: LlamaModel, good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = (prompt_of(140), {})
    (plain,) = run(engine_on(model), [job])
    cut = []

    def cut_the_first_verification(plan: StepPlan, results: list[RowResult]) -> list[RowResult]:
        if plan.rows and plan.rows[0].drafts and not cut:
            cut.append(True)
            return [RowResult(results[0].tokens[:good])]
        return results

    change_results(monkeypatch, cut_the_first_verification)
    engine = engine_on(model)
    (found,) = run(engine, with_cache([job], small()))
    assert cut
    if good:
        assert text(found) == text(plain)
    else:
        assert found.rows[0].finish_reason is FinishReason.ERROR
        assert text(found) == text(plain)[: len(text(found))]


# Where texts end


@pytest.mark.parametrize("method", [small(draft_tokens=6), NGRAM | {"draft_tokens": 6}], ids=["cache", "ngram"])
def test_nothing_is_drafted_beyond_the_last_token(
    model: LlamaModel, method: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []

    def look(plan: StepPlan, results: list[RowResult]) -> list[RowResult]:
        ends.extend(len(scheduled.row.tokens) + len(scheduled.drafts) for scheduled in plan.rows)
        return results

    change_results(monkeypatch, look)
    prompt = repetitive(100)
    (plain,) = run(engine_on(model, blocks=8), [(prompt, {"max_tokens": None})])
    assert len(prompt) + len(text(plain)) == 8 * 16, "it ends at the longest sequence"
    (longest,) = run(engine_on(model, blocks=9), with_cache([(prompt, {"max_tokens": 28})], method))
    assert text(longest) == text(plain)
    assert max(ends) < 8 * 16
    ends.clear()
    for tokens in range(1, 9):
        (found,) = run(engine_on(model), with_cache([(prompt, {"max_tokens": tokens})], method))
        assert text(found) == text(plain)[:tokens]
        assert found.rows[0].finish_reason is FinishReason.LENGTH
        assert max(ends) < len(prompt) + tokens, "what is sampled after the last token of a step is the text's last"
        ends.clear()


@pytest.mark.parametrize("min_tokens", [0, 12])
@pytest.mark.parametrize("method", [small(draft_tokens=6), NGRAM | {"draft_tokens": 6}], ids=["cache", "ngram"])
def test_an_end_token_among_drafts_ends_the_text_there(
    model: LlamaModel, method: dict[str, Any], min_tokens: int
) -> None:
    prompt = repetitive(100)
    engine = engine_on(model)
    (free,) = run(engine, [(prompt, {})])
    for place in range(1, 20, 3):
        options = {"stop_token_ids": [text(free)[place]], "min_tokens": min_tokens}
        params = [
            SamplingParams.from_dict({"temperature": 0.0, "max_tokens": 24} | options | more)
            for more in ({}, {"kv_cache": method})
        ]
        plain, found = (ended(engine, prompt, each) for each in params)
        assert found == plain
        assert plain[1] in (FinishReason.STOP, FinishReason.LENGTH)


def ended(
    engine: Engine, prompt: list[int], params: SamplingParams
) -> tuple[list[int], FinishReason | None, int | None]:
    """The tokens that are told, why they end, and the stop token."""
    request = engine.add(prompt, params)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        engine.check()
    tokens = [out.token.token_id for out in outputs if out.token is not None]
    assert tokens == text(request)
    return tokens, outputs[-1].finish_reason, outputs[-1].stop_token_id


# What is told, and what it costs


def test_only_verified_tokens_are_told_and_the_counts_add_up(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_tokens: Counter[str] = Counter()

    def count_plain(plan: StepPlan, results: list[RowResult]) -> list[RowResult]:
        for scheduled in plan.rows:
            if scheduled.row.draft_of is None and scheduled.samples and not scheduled.drafts:
                plain_tokens[scheduled.row.request.id] += 1
        return results

    change_results(monkeypatch, count_plain)
    engine = engine_on(model)
    methods = [small(), small("knorm", 0.125, draft_tokens=None), NGRAM, small(trigger="every:6")]
    requests = [
        engine.add(repetitive(120, seed=n), SamplingParams(temperature=0.0, max_tokens=50, kv_cache=method))
        for n, method in enumerate(methods)
    ]
    told: dict[str, list[int]] = {request.id: [] for request in requests}
    while engine.has_work:
        rounds = {request.id: drafts([request]) for request in requests}
        outputs = engine.step()
        for request in requests:
            new = [out.token.token_id for out in outputs if out.request is request and out.token is not None]
            told[request.id] += new
            verified = drafts([request]) - rounds[request.id]
            assert len(new) == verified["accepted"] + verified["rounds"] or (len(new) == 1 and not verified)
    total = drafts(requests)
    for request in requests:
        counts = drafts([request])
        assert told[request.id] == text(request)
        assert counts["accepted"] + counts["rounds"] + plain_tokens[request.id] == len(text(request)) == 50
    of_engine = engine.scheduler.rounds.counters
    assert (of_engine.rounds, of_engine.drafted, of_engine.accepted) == tuple(total[name] for name in total)
    assert sum(of_engine.accepted_at) == of_engine.accepted


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_near_ties_among_verified_tokens_are_counted_where_rounding_can_decide_them(
    monkeypatch: pytest.MonkeyPatch, numerics: Numerics
) -> None:
    model = toy_model(max_positions=1024, numerics=numerics)
    told: list[float] = []

    def near(plan: StepPlan, results: list[RowResult]) -> list[RowResult]:
        """Pretend that every verified token is nearly tied, but for the last."""
        changed = []
        for scheduled, result in zip(plan.rows, results, strict=True):
            is_led = scheduled.drafts and scheduled.row.request.is_plain
            assert len(result.leads) == (len(result.tokens) if is_led else 0)
            assert all(lead >= 0 for lead in result.leads)
            pretended = [0.125] * max(0, len(result.leads) - 1) + [7.0] * bool(result.leads)
            told.extend(pretended[: 1 + len(agreeing(scheduled.drafts, result.tokens))] if pretended else ())
            changed.append(result._replace(leads=pretended))
        return changed

    change_results(monkeypatch, near)
    engine = engine_on(model)
    run(engine, [(repetitive(120, seed=4), {"temperature": 0.0, "max_tokens": 40, "kv_cache": NGRAM} | LOOPS)])
    assert engine.scheduler.rounds.counters.rounds > 0
    assert not told, "tokens that penalties shape are not the likeliest of the logits"
    run(engine, [(prompt_of(120, seed=4), {"temperature": 0.0, "max_tokens": 40, "kv_cache": small()})])
    near_ties = sum(lead == 0.125 for lead in told)
    assert near_ties > 0
    assert engine.scheduler.rounds.counters.near_ties == ({"0.125": near_ties} if numerics == "fast" else {})


def test_a_text_that_repeats_is_written_in_fewer_steps_than_it_has_tokens(model: LlamaModel) -> None:
    engine = engine_on(model)
    (found,) = run(engine, with_cache([(prompt_of(200), {"max_tokens": 100} | LOOPS)], NGRAM))
    assert engine.steps < 1 + 60
    assert drafts([found])["accepted"] > 40


def test_what_is_drafted_is_found_by_nobody_and_what_is_verified_is(model: LlamaModel) -> None:
    """A lossless row's blocks are as good as a plain row's: its KV is that of the whole cache."""
    job = (prompt_of(200), {"max_tokens": 60, "ignore_eos": True})
    (fresh,) = run(engine_on(model), [(prompt_of(200) + text(run(engine_on(model), [job])[0]), {})])
    engine = engine_on(model)
    (found,) = run(engine, with_cache([job], small()))
    (follower,) = run(engine, [(job[0] + text(found), {})])
    assert follower.cached_tokens > 250
    assert text(follower) == text(fresh)


def test_where_steps_are_full_of_other_rows_fewer_drafts_are_verified_and_the_text_goes_on(model: LlamaModel) -> None:
    others: list[Job] = [(prompt_of(20, seed=n), {"max_tokens": 400, "ignore_eos": True}) for n in range(7)]
    job: Job = (prompt_of(100, seed=50), {"max_tokens": 30, "ignore_eos": True})
    (plain,) = run(engine_on(model), [job])
    engine = engine_on(model, rows=8, budget=8)
    for prompt, options in others:
        engine.add(prompt, SamplingParams(temperature=0.0, **options))
    for _ in range(25):
        engine.step()
    (request,) = [engine.add(job[0], SamplingParams(temperature=0.0, kv_cache=small(draft_tokens=7), **job[1]))]
    while engine.is_active(request.id):
        engine.step()
    assert text(request) == text(plain)
    assert engine.has_work, "the others go on"


# Memory


def test_where_memory_is_short_no_row_loses_its_own_for_the_sake_of_drafts(model: LlamaModel) -> None:
    jobs: list[Job] = [(prompt_of(160, seed=n), {"max_tokens": 32, "ignore_eos": True}) for n in range(2)]
    plain = run(engine_on(model), jobs)
    for blocks in (24, 27, 30, 34, 40):  # from none to spare: 24 are what the rows need in the end
        engine = engine_on(model, blocks=blocks, caching=False)
        found = run(engine, with_cache(jobs, small(budget=0.5, trigger="every:8")))
        assert texts(found) == texts(plain)
        assert engine.scheduler.preemptions == 0
        assert (drafts(found)["drafted"] > 0) == (blocks > 24)
    assert drafts(found)["accepted"] > 0


def test_a_request_that_comes_later_gets_the_room_of_small_caches(model: LlamaModel) -> None:
    first = (prompt_of(160, seed=1), {"max_tokens": 60, "ignore_eos": True})
    second = (prompt_of(100, seed=2), {"max_tokens": 40, "ignore_eos": True})
    plain = texts(run(engine_on(model), [first, second]))
    engine = engine_on(model, blocks=23, caching=False)
    params = [SamplingParams(temperature=0.0, kv_cache=small(budget=0.5), **options) for _, options in (first, second)]
    one = engine.add(first[0], params[0])
    for _ in range(12):
        engine.step()
    assert drafts([one])["accepted"] > 0
    assert one.rows[0].drafting.cache is not None  # type: ignore[union-attr]
    two = engine.add(second[0], params[1])
    while engine.has_work:
        engine.step()
        engine.check()
    assert texts([one, two]) == plain
    assert engine.scheduler.preemptions == 0


def test_a_row_that_found_no_room_for_its_small_cache_gets_one_when_there_is(model: LlamaModel) -> None:
    long = (prompt_of(160, seed=1), {"max_tokens": 120, "ignore_eos": True})
    short = (prompt_of(160, seed=2), {"max_tokens": 8, "ignore_eos": True})
    plain = texts(run(engine_on(model), [short, long]))
    engine = engine_on(model, blocks=31, caching=False)
    requests = [
        engine.add(prompt, SamplingParams(temperature=0.0, kv_cache=small(budget=0.5), **options))
        for prompt, options in (short, long)
    ]
    had_none = False
    while engine.has_work:
        engine.step()
        engine.check()
        (row,) = requests[1].rows
        had_none |= row.has_begun and row.drafting.cache is None  # type: ignore[union-attr]
    assert texts(requests) == plain
    assert had_none
    assert drafts([requests[1]])["accepted"] > 0

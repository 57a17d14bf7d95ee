"""Look-up as a level below the small cache: what it proposes changes how many steps drafting takes, and no text."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from engine import simulation
from engine.simulation import VOCABULARY, AheadShadowRunner, ShadowRunner, World
from engine.test_compression import engine_on, prompt_of, run
from engine.test_lossless import LOOPS, drafts, repetitive, small, texts, with_cache
from kvikk.engine.drafting import LookupBelow, PromptLookup, below
from kvikk.engine.request import Row
from kvikk.engine.step import StepPlan
from kvikk.errors import InvalidRequest
from kvikk.models import LlamaModel, toy_model


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return toy_model(max_positions=1024)


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many proposals small caches verified, and of how many tokens."""
    counts: Counter[str] = Counter()
    add = StepPlan.add_verification

    def counted(plan: StepPlan, row: Row, tokens: list[int]) -> None:
        if row.draft_of is not None:
            counts["steps"] += 1
            counts["tokens"] += len(tokens)
        add(plan, row, tokens)

    monkeypatch.setattr(StepPlan, "add_verification", counted)
    return counts


# The pure part


def test_what_is_proposed_follows_what_was_drafted_and_what_was_drafted_is_not_remembered() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 9, 9])
    assert lookup.propose(2, then=[2, 3]) == [4, 5]
    assert len(lookup) == 8
    assert lookup.propose(2) == []
    lookup.extend([2, 3])
    assert lookup.propose(2) == [4, 5]


def test_proposals_grow_with_what_is_accepted_and_end_where_nothing_is() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    level = LookupBelow(prompt)
    assert level.propose(prompt, [], 6) == [3]
    for _ in range(30):
        level.note_step(6, 6)
    assert level.propose(prompt, [], 6) == [3, 4, 5, 6, 7, 8]
    assert level.propose(prompt, [3, 4], 2) == [5, 6]
    for _ in range(200):
        level.note_step(6, 0)
    assert level.propose(prompt, [], 6) == []
    for _ in range(below.PATIENCE_STEPS):
        level.note_step(0, 0)
    assert level.propose(prompt, [], 6) == [3], "it is tried again"
    level.note_step(1, 0)
    assert not level.is_hopeful


def test_forks_do_not_learn_from_each_other() -> None:
    prompt = [1, 2, 3, 1, 2]
    level = LookupBelow(prompt)
    other = level.copy()
    for _ in range(60):
        level.note_step(1, 0)
    assert not level.is_hopeful
    assert other.is_hopeful
    other.propose([*prompt, 7, 8], [], 3)
    assert level.copy().propose([*prompt, 5, 5], [], 1) == []


# On an engine


@pytest.mark.parametrize("policy", ["snapkv", "streaming"])
@pytest.mark.parametrize("draft_tokens", [None, 6])
def test_texts_are_those_of_the_whole_cache(
    model: LlamaModel, policy: str, draft_tokens: int | None, proposed: Counter[str]
) -> None:
    jobs: list[tuple[list[int], dict[str, Any]]] = [
        (repetitive(160 + 11 * n, seed=n), {"max_tokens": 48, "ignore_eos": True} | (LOOPS if n % 2 else {}))
        for n in range(4)
    ]
    jobs[2][1].update(n=2, temperature=0.9, seed=3)
    plain = run(engine_on(model), jobs)
    method = small(policy, 0.5, drafter="cache+ngram", draft_tokens=draft_tokens)
    found = run(engine_on(model), with_cache(jobs, method))
    assert texts(found) == texts(plain)
    assert proposed["steps"] > (10 if draft_tokens else 0)


def test_a_text_that_repeats_is_drafted_in_fewer_steps(model: LlamaModel, proposed: Counter[str]) -> None:
    job = (prompt_of(100), {"max_tokens": 150, "ignore_eos": True} | LOOPS)
    steps = {}
    for drafter in ("cache", "cache+ngram"):
        engine = engine_on(model)
        (request,) = run(engine, with_cache([job], small(budget=0.9, drafter=drafter, draft_tokens=8)))
        steps[drafter] = engine.steps
        assert drafts([request])["accepted"] > 80
    assert steps["cache+ngram"] < 0.7 * steps["cache"]
    assert proposed["tokens"] > 60


@pytest.mark.parametrize("runner", [ShadowRunner, AheadShadowRunner])
def test_whatever_is_proposed_no_small_cache_reads_or_leaves_what_it_should_not(
    runner: type[ShadowRunner], proposed: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    monkeypatch.setattr(below, "tokens_until", lambda *_: 6)
    monkeypatch.setattr(LookupBelow, "is_hopeful", True)

    def anything(_: PromptLookup, most: int, then: Any = ()) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randrange(most + 1))]

    monkeypatch.setattr(PromptLookup, "propose", anything)
    compression = simulation.random_compression
    always = {"drafter": "cache+ngram"}

    def with_look_up(rng: random.Random) -> dict[str, object]:
        options = compression(rng)
        return options | always if options.get("drafter") == "cache" else options

    monkeypatch.setattr(simulation, "random_compression", with_look_up)
    for seed in range(12):
        world = World(15 + 3 * seed, runner=runner(0.15), rest_blocks=100 * (seed % 2))
        events = random.Random(seed)
        for _ in range(120):
            simulation.random_event(world, events, plain_share=0.5)
            world.step()
        world.drain()
        assert not world.stalled
    assert proposed["steps"] > 10


def test_it_needs_a_policy_that_drops_something(model: LlamaModel) -> None:
    refused: dict[str, Any] = {"lossless": True, "drafter": "cache+ngram"}
    with pytest.raises(InvalidRequest, match="is 'cache\\+ngram', but nothing is dropped: name a policy and a budget"):
        run(engine_on(model), with_cache([(prompt_of(10), {})], refused))

"""Log-probabilities of prompts, on a toy model: what one full forward in fp32 gives, however the prompt is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.test_toy_model import PAGE, engine_on, prompts
from kvikk.engine import Engine, Logprob, Request, SamplingParams
from kvikk.engine.logprobs import ROWS_AT_ONCE
from kvikk.models import CausalLM, toy_model
from models.dense_step import DenseKV

Scores = list[tuple[Logprob, ...] | None]
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(150)]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return toy_model()


@pytest.fixture(scope="module")
def table(model: CausalLM) -> torch.Tensor:
    """Log-probabilities at all positions of the prompt, all at once."""
    everything = torch.arange(len(PROMPT))
    step = DenseKV().step([len(PROMPT)])
    return model.head(model.forward(torch.tensor(PROMPT), everything, step, everything)).log_softmax(-1)


def scored(engine: Engine, prompt: list[int] = PROMPT, **options: Any) -> tuple[Request, Scores]:
    """Run a request by itself; its scores must come once, with its first token."""
    params = SamplingParams.from_dict({"temperature": 0.0, "max_tokens": 3, "prompt_logprobs": 2, **options})
    request, found, is_first = engine.add(prompt, params), [], True
    while engine.has_work:
        for out in engine.step():
            assert (out.prompt_logprobs is not None) == is_first
            is_first = False
            found += out.prompt_logprobs or []
        engine.check()
    return request, found


def assert_scores(found: Scores, table: torch.Tensor, count: int = 2) -> None:
    assert len(found) == len(PROMPT)
    assert found[0] is None
    for position, entries in enumerate(found[1:], 1):
        assert entries is not None
        row, own = table[position - 1], PROMPT[position]
        likeliest = row.topk(count).indices.tolist()
        assert [entry.token_id for entry in entries] == [*likeliest, *([own] if own not in likeliest else [])]
        for entry in entries:
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-4)
            assert entry.rank == int((row > row[entry.token_id]).sum()) + 1


@pytest.mark.parametrize("budget", [16, 37, 256])
@pytest.mark.parametrize("count", [0, 2, 20])
def test_they_are_those_of_one_full_forward_in_chunks_of_any_size(
    model: CausalLM, table: torch.Tensor, budget: int, count: int
) -> None:
    _, found = scored(engine_on(model, budget=budget), prompt_logprobs=count)
    assert_scores(found, table, count)


def test_a_cached_prompt_is_computed_again_to_be_scored_and_stays_cached(model: CausalLM, table: torch.Tensor) -> None:
    engine = engine_on(model)
    engine.add(PROMPT, SamplingParams(max_tokens=1))
    while engine.has_work:
        engine.step()
    before = engine.computed_tokens
    request, found = scored(engine, max_tokens=1)
    assert_scores(found, table)
    assert request.cached_tokens == 0
    assert engine.computed_tokens - before == len(PROMPT)
    later = engine.add(PROMPT, SamplingParams(max_tokens=1))
    engine.step()
    assert later.cached_tokens == len(PROMPT) // PAGE * PAGE


def test_what_it_computes_is_there_for_others(model: CausalLM) -> None:
    engine = engine_on(model)
    scored(engine)
    later = engine.add(PROMPT, SamplingParams(max_tokens=1))
    engine.step()
    assert later.cached_tokens == len(PROMPT) // PAGE * PAGE


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_row_preempted_in_the_middle_goes_on_scoring_where_it_was(
    model: CausalLM, table: torch.Tensor, steps: int
) -> None:
    engine = engine_on(model, budget=30)
    request = engine.add(PROMPT, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2))
    for _ in range(steps - 1):
        engine.step()
    outputs = engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    while engine.has_work:
        outputs += engine.step()
        engine.check()
    assert_scores([entry for out in outputs for entry in out.prompt_logprobs or []], table)
    assert request.rows[0].preemptions == 1
    assert engine.prefix.counters.resumed > 0


def test_all_texts_of_a_request_share_one_scoring(model: CausalLM, table: torch.Tensor) -> None:
    engine = engine_on(model)
    request, found = scored(engine, n=3, temperature=1.0)
    assert_scores(found, table)
    assert len(request.rows) == 3
    assert engine.computed_tokens == len(PROMPT) + 3 * 2


def test_they_come_with_the_first_token_although_the_first_text_was_given_up(
    model: CausalLM, table: torch.Tensor
) -> None:
    engine = engine_on(model, budget=64)
    request = engine.add(PROMPT, SamplingParams(n=2, max_tokens=2, prompt_logprobs=2))
    engine.step()
    assert engine.abort(request.id, 0)
    outputs = [out for _ in range(4) for out in engine.step()]
    assert [out.prompt_logprobs is not None for out in outputs] == [True, False]
    assert outputs[0].prompt_logprobs is not None
    assert_scores(outputs[0].prompt_logprobs, table)


def test_a_prompt_of_one_token_has_none(model: CausalLM) -> None:
    assert scored(engine_on(model), [5])[1] == [None]


def test_no_more_logits_than_a_slice_are_made_at_once(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    head = type(model).head
    monkeypatch.setattr(type(model), "head", lambda self, hidden: (rows.append(len(hidden)), head(self, hidden))[1])
    engine = engine_on(model)
    for prompt in prompts(5):
        engine.add(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    while engine.has_work:
        engine.step()
    assert max(rows) == ROWS_AT_ONCE

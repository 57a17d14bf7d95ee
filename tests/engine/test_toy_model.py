"""The engine on a toy model: one seed gives one text, whatever else happens, and memory full of NaN stays unseen."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine.fake_grammar import FakeCompiler
from kvikk.attention import attention_backend
from kvikk.engine import Engine, EngineConfig, EngineLimits, SamplingParams, SchedulerConfig
from kvikk.engine.runner import ModelRunner
from kvikk.grammar import StructuredOutputsParams
from kvikk.memory import KVStore
from kvikk.models import CausalLM, toy_model
from kvikk.prefix import KeySpace

CPU = torch.device("cpu")
PAGE = 16
SEEDED = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 24}
EVERYTHING = {
    **SEEDED, "n": 2, "top_k": 100, "min_p": 0.001, "presence_penalty": 0.4, "frequency_penalty": 0.3,
    "repetition_penalty": 1.2, "logit_bias": {30: 2.0, 9: -1.0}, "min_tokens": 5, "stop_token_ids": [9], "logprobs": 2,
    "prompt_logprobs": 1, "structured_outputs": StructuredOutputsParams(regex="endless"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return toy_model()


def engine_on(
    model: CausalLM, *, blocks: int = 200, budget: int = 256, backend: Any = "auto", **options: Any
) -> Engine:
    store = KVStore(model.spec.geometry(PAGE), blocks + 1, CPU)
    store.poison()
    spec = model.spec
    keyspace = KeySpace(model=spec.fingerprint, rope=spec.rope, kv_format="f32", page_size=PAGE, numerics="fast")
    return Engine(
        EngineConfig(scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=budget), **options),
        EngineLimits(max_model_len=min(blocks * PAGE, 1000), vocabulary=spec.vocabulary),
        keyspace,
        blocks,
        ModelRunner(model, store, attention_backend(backend, store)),
        store,
        grammars=FakeCompiler(spec.vocabulary, frozenset()),  # type: ignore[arg-type]
    )


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(2)
    shared = [rng.randrange(256) for _ in range(70)]
    return [
        shared[: rng.choice([0, 40, 70])] + [rng.randrange(256) for _ in range(rng.randrange(1, 60))]
        for _ in range(count)
    ]


def texts(engine: Engine, jobs: list[tuple[list[int], SamplingParams]]) -> list[list[list[int]]]:
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    while engine.has_work:
        engine.step()
        engine.check()
    return [[row.generated for row in request.rows] for request in requests]


def jobs_of(count: int) -> list[tuple[list[int], SamplingParams]]:
    penalised = {"temperature": 0.0, "max_tokens": 24, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
    mixed = [{"temperature": 0.0, "max_tokens": 24}, SEEDED, {**SEEDED, "n": 3, "top_k": 40}, penalised, EVERYTHING]
    return [
        (prompt, SamplingParams.from_dict({**mixed[index % 5], "seed": 7 + index % 2}))
        for index, prompt in enumerate(prompts(count))
    ]


@pytest.fixture(scope="module")
def alone(model: CausalLM) -> list[list[list[int]]]:
    return [texts(engine_on(model, enable_prefix_caching=False), [job])[0] for job in jobs_of(15)]


def test_texts_are_varied_enough_for_equality_to_mean_something(alone: list[list[list[int]]]) -> None:
    assert all(len(set(text)) > 6 for request in alone for text in request)
    assert all(len(set(map(tuple, request))) == len(request) for request in alone)


@pytest.mark.parametrize("budget", [16, 64, 256])
def test_batched_and_chunked_equals_alone(model: CausalLM, alone: list[list[list[int]]], budget: int) -> None:
    assert texts(engine_on(model, budget=budget), jobs_of(15)) == alone


def test_cached_equals_alone(model: CausalLM, alone: list[list[list[int]]]) -> None:
    engine = engine_on(model)
    texts(engine, jobs_of(15))
    assert texts(engine, jobs_of(15)) == alone
    assert engine.prefix.counters.hits > 500


def test_preempted_equals_alone(model: CausalLM, alone: list[list[list[int]]]) -> None:
    engine = engine_on(model, blocks=24)
    assert texts(engine, jobs_of(15)) == alone
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("is_cache_lost", [False, True])
def test_preempted_at_any_time_with_all_parameters_on_equals_alone(
    model: CausalLM, alone: list[list[list[int]]], is_cache_lost: bool
) -> None:
    engine, rng = engine_on(model, budget=64), random.Random(3)
    requests = [engine.add(prompt, params) for prompt, params in jobs_of(15)]
    while engine.has_work:
        engine.step()
        if engine.scheduler.running and rng.random() < 0.5:
            engine.scheduler._preempt(rng.choice(engine.scheduler.running))
            if is_cache_lost:
                engine.prefix.reset()
        engine.check()
    assert [[row.generated for row in request.rows] for request in requests] == alone
    shaped = [row for request in requests[4::5] for row in request.rows]
    assert sum(row.preemptions for row in shaped) >= 3


def test_both_backends_give_the_same_texts(model: CausalLM, alone: list[list[list[int]]]) -> None:
    assert texts(engine_on(model, backend="reference"), jobs_of(15)) == alone


def test_two_requests_with_one_seed_do_not_disturb_each_other(model: CausalLM) -> None:
    job = (prompts(1)[0], SamplingParams.from_dict({**SEEDED, "seed": 3}))
    other = (prompts(2)[1], SamplingParams.from_dict({**SEEDED, "seed": 3}))
    first, again, different = texts(engine_on(model), [job, job, other])
    assert first == again
    assert different != first


def test_min_tokens_bars_the_end_and_stop_tokens_end_it(model: CausalLM) -> None:
    prompt = prompts(1)[0]
    (free,) = texts(engine_on(model), [(prompt, SamplingParams(temperature=0, max_tokens=24))])
    stop = free[0][5]
    first = free[0].index(stop)
    stopped = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop])
    barred = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[stop], min_tokens=first + 4)
    (found,), (late,) = texts(engine_on(model), [(prompt, stopped), (prompt, barred)])
    assert found == free[0][: first + 1]
    assert stop not in late[: first + 3]
    assert late[:first] == free[0][:first]

"""`--numerics exact`: every logit of every text is the same to the bit in every way that an engine can arrive at it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from identity.prompts import real_prompts
from kvikk.attention import QueryRun, attention_backend
from kvikk.configuration import build
from kvikk.engine import Engine, EngineConfig, SamplingParams, build_engine
from kvikk.engine.sampler import SampledToken, SamplingTask, sample
from kvikk.errors import ConfigError
from kvikk.memory import KVStore
from kvikk.models import CausalLM, LoadedModel, load_model, toy_model
from kvikk.prefix import extend_keys
from kvikk.types import BlockId, Numerics, Position

CPU = torch.device("cpu")
PAGE = 16
MAX_LEN = 1024
TEXTS = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.0, "n": 2, "logprobs": 2}]
MODELS = [("toy", "bfloat16"), ("toy", "float32"), ("smollm2", "bfloat16"), ("smollm2", "float32")]
SERVED = MODELS if os.environ.get("KVIKK_VERIFY") else MODELS[:3]
"""Those that an engine serves in every way: the products of the last one are met without an engine, too."""

Jobs = list[tuple[list[int], SamplingParams]]
Seen = dict[tuple[int, int, int], Tensor]
"""Logits by seed, which is the request's, choice and position of the token to be."""


def loaded_model(name: str, dtype: str, numerics: Numerics) -> LoadedModel:
    if name == "smollm2":
        return load_model(None, dtype=dtype, device=CPU, max_model_len=MAX_LEN, numerics=numerics)
    made = toy_model(dtype=getattr(torch, dtype), numerics=numerics)
    return LoadedModel(
        model=made, tokenizer=None, max_model_len=MAX_LEN, generation_defaults={}, folder=Path("/nowhere")
    )


def prompts_for(loaded: LoadedModel) -> list[list[int]]:
    """Prompts around the sizes of a page and of a tile of keys; the last three begin alike."""
    lengths = (1, 5, 16, 33, 130, 300)
    if loaded.tokenizer is None:
        rng = random.Random(5)
        found = [[rng.randrange(256) for _ in range(length)] for length in lengths]
    else:
        real = [prompt.token_ids for prompt in real_prompts(loaded.tokenizer)]
        found = [next(ids for ids in real if len(ids) >= length)[:length] for length in lengths]
    return [*found, found[-1][:200] + found[0], found[-1][:200] + found[1]]


def jobs_for(loaded: LoadedModel, new_tokens: int) -> Jobs:
    return [
        (
            ids,
            SamplingParams.from_dict({**TEXTS[index % 3], "seed": index, "max_tokens": new_tokens, "ignore_eos": True}),
        )
        for index, ids in enumerate(prompts_for(loaded))
    ]


def engine_for(loaded: LoadedModel, numerics: Numerics, **options: object) -> Engine:
    size = loaded.model.spec.geometry(PAGE).block_bytes * 201
    config = {"device": "cpu", "kv_memory": str(size), "max_num_seqs": 32, "numerics": numerics, **options}
    engine, _ = build_engine(loaded, build(EngineConfig, config))
    engine._runner.store.poison()  # type: ignore[attr-defined]
    return engine


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What the sampler is given from here on; clear it before each run."""
    found: Seen = {}

    def watched(logits: Tensor, tasks: list[SamplingTask]) -> list[SampledToken | None]:
        for row, task in zip(logits, tasks, strict=True):
            found[task.seed, task.choice, task.position] = row.clone()
        return sample(logits, tasks)

    monkeypatch.setattr("kvikk.engine.runner.sample", watched)
    return found


def run(engine: Engine, jobs: Jobs, between: Callable[[Engine], None] = lambda engine: None) -> None:
    for ids, params in jobs:
        engine.add(ids, params)
    while engine.has_work:
        between(engine)
        engine.step()
    engine.check()


def alone(loaded: LoadedModel, jobs: Jobs, numerics: Numerics) -> None:
    engine = engine_for(loaded, numerics, enable_prefix_caching=False)
    for job in jobs:
        run(engine, [job])


def batched(loaded: LoadedModel, jobs: Jobs, numerics: Numerics) -> None:
    engine = engine_for(loaded, numerics)
    run(engine, jobs)
    assert engine.steps < 20


def in_small_chunks(loaded: LoadedModel, jobs: Jobs, numerics: Numerics) -> None:
    engine = engine_for(loaded, numerics, max_num_batched_tokens=37, max_num_seqs=11, enable_prefix_caching=False)
    run(engine, jobs)
    assert engine.steps > sum(len(ids) for ids, _ in jobs) / 37


def arriving_one_by_one(loaded: LoadedModel, jobs: Jobs, numerics: Numerics) -> None:
    engine, later = engine_for(loaded, numerics, max_num_batched_tokens=64), list(jobs)

    def admit(engine: Engine) -> None:
        if later and engine.steps % 2 == 0:
            engine.add(*later.pop())

    run(engine, [later.pop()], admit)
    assert not later


def over_cached_prefixes(loaded: LoadedModel, jobs: Jobs, numerics: Numerics) -> None:
    engine = engine_for(loaded, numerics)
    run(engine, jobs)
    before = engine.prefix.counters.hits
    for job in jobs:
        run(engine, [job])
    assert engine.prefix.counters.hits - before > 600


def over_holes(loaded: LoadedModel, jobs: Jobs, numerics: Numerics) -> None:
    engine = engine_for(loaded, numerics)
    run(engine, jobs)
    punched = 0
    for ids, params in jobs:
        keys = [engine._keyspace.root("")]
        extend_keys(keys, ids, PAGE)
        cached = [block for block in engine.prefix.lookup(keys[1:]) if block is not None]
        punched += engine.prefix.discard([block for at, block in enumerate(cached[:-1]) if at % 3 == 1])
        run(engine, [(ids, params)])
    assert punched > 10


def preempted(loaded: LoadedModel, jobs: Jobs, numerics: Numerics) -> None:
    engine, rng = engine_for(loaded, numerics, max_num_batched_tokens=100), random.Random(6)

    def disturb(engine: Engine) -> None:
        if engine.scheduler.running and rng.random() < 0.6:
            engine.scheduler._preempt(rng.choice(engine.scheduler.running))
            if rng.random() < 0.5:
                engine.prefix.reset()

    run(engine, jobs, disturb)
    assert engine.scheduler.preemptions > 3
    assert engine.prefix.counters.recomputed > 100


WAYS = [batched, in_small_chunks, arriving_one_by_one, over_cached_prefixes, over_holes, preempted]


def taken(seen: Seen) -> Seen:
    found = dict(seen)
    seen.clear()
    return found


def unlike(first: Seen, other: Seen) -> list[tuple[int, int, int]]:
    """Where two runs differ: at a token that only one of them came to, or in the bits of a logit."""
    common = first.keys() & other.keys()
    return [*(first.keys() ^ other.keys()), *(key for key in common if not torch.equal(first[key], other[key]))]


@pytest.mark.parametrize(("name", "dtype"), SERVED)
def test_exact_logits_are_the_same_in_every_way_of_computing_them(name: str, dtype: str, seen: Seen) -> None:
    loaded = loaded_model(name, dtype, "exact")
    jobs = jobs_for(loaded, new_tokens=8)
    alone(loaded, jobs, "exact")
    expected = taken(seen)
    assert len(expected) >= 8 * len(jobs)
    for way in WAYS:
        way(loaded, jobs, "exact")
        assert not unlike(expected, taken(seen)), way.__name__


@pytest.mark.parametrize(("name", "dtype"), SERVED)
def test_exact_log_probabilities_of_a_prompt_are_the_same_in_every_chunking(name: str, dtype: str) -> None:
    loaded = loaded_model(name, dtype, "exact")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    found = []
    for chunk in (1024, 100, 37):
        engine = engine_for(loaded, "exact", max_num_batched_tokens=chunk)
        for ids in prompts_for(loaded):
            engine.add(ids, params)
        given: dict[str, Any] = {}
        while engine.has_work:
            for out in engine.step():
                given.setdefault(out.request.id, out.prompt_logprobs)
        found.append(given)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_exact_logits_of_a_position_do_not_depend_on_the_run_it_is_computed_in(name: str, dtype: str) -> None:
    model = loaded_model(name, dtype, "exact").model
    ids = [(7 * i * i + 3 * i) % 251 for i in range(140)]
    whole = logits_in_runs(model, ids, [140])
    by_one = [*[1] * 18, 105, *[1] * 17]  # over the ends of a page and of a tile of keys
    assert torch.equal(logits_in_runs(model, ids, by_one), whole)
    assert torch.equal(logits_in_runs(model, ids, [1, 2, 14, 50, 63, 10]), whole)


def logits_in_runs(model: CausalLM, ids: list[int], lengths: list[int]) -> Tensor:
    """Logits at every position, computed in one step after another."""
    store = KVStore(model.spec.geometry(PAGE), 20, CPU)
    store.poison()
    backend = attention_backend("auto", store, numerics="exact")
    blocks = [BlockId(block) for block in range(1, 20)]
    found, start = [], 0
    for length in lengths:
        run = QueryRun(blocks=blocks, start=Position(start), length=length)
        positions = torch.arange(start, start + length)
        tokens = torch.tensor(ids[start : start + length])
        step = backend.begin(backend.plan([run]))
        found.append(model.head(model.forward(tokens, positions, step, torch.arange(length))))
        start += length
    return torch.cat(found)


def test_fast_logits_do_differ(seen: Seen) -> None:
    loaded = loaded_model("smollm2", "bfloat16", "fast")  # the toy's products are too small for that on some machines
    jobs = jobs_for(loaded, new_tokens=8)
    alone(loaded, jobs, "fast")
    expected = taken(seen)
    preempted(loaded, jobs, "fast")
    assert unlike(expected, taken(seen))


def test_a_model_loaded_for_fast_numerics_serves_no_exact_engine() -> None:
    with pytest.raises(ConfigError, match="was loaded for fast: load it for exact as well"):
        engine_for(loaded_model("toy", "float32", "fast"), "exact")

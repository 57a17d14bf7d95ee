"""A real engine over quantised caches: one text however it is computed, near the full cache's, in less memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.test_compression import PAGE, SMALL, prompt_of, run, text
from kvikk.attention import AttentionBackend, BackendName, attention_backend
from kvikk.compress import Rotary
from kvikk.engine.build import build_engine
from kvikk.engine.compressor import PolicyCompressor
from kvikk.engine.config import EngineConfig, SchedulerConfig
from kvikk.engine.core import Engine
from kvikk.engine.limits import EngineLimits
from kvikk.engine.runner import ModelRunner
from kvikk.engine.sampling_params import SamplingParams
from kvikk.engine.step import Runner
from kvikk.geometry import INT4
from kvikk.memory import KVStore, MemoryConfig
from kvikk.models import LlamaModel, LoadedModel, toy_model
from kvikk.prefix import KeySpace

CPU = torch.device("cpu")
BACKENDS: tuple[BackendName, ...] = ("reference", "cpu")
FORMATS = (torch.int8, INT4)
SNAPKV = {"policy": "snapkv", "budget": 0.3, "trigger": "every:5", "allocator": "pooled"} | SMALL


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return toy_model(max_positions=1024)


def engine_on(
    model: LlamaModel,
    *,
    quantised: torch.dtype | None,
    blocks: int = 300,
    budget: int = 256,
    caching: bool = True,
    backend: BackendName = "auto",
    device: torch.device = CPU,
    make_runner: Callable[[LlamaModel, KVStore, AttentionBackend], Runner] = ModelRunner,
) -> Engine:
    store = KVStore(model.spec.geometry(PAGE, quantised), blocks + 1, device)
    store.poison()
    return Engine(
        EngineConfig(
            scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=budget), enable_prefix_caching=caching
        ),
        EngineLimits(max_model_len=min(blocks * PAGE, 1000), vocabulary=model.spec.vocabulary),
        KeySpace(
            model=model.spec.fingerprint, rope=model.spec.rope, kv_format=store.geometry.format, page_size=PAGE,
            numerics="fast",
        ),
        blocks,
        make_runner(model, store, attention_backend(backend, store)),
        store,
        compressor=PolicyCompressor(store, Rotary(inv_freq=model.inv_freq)),
    )  # fmt: skip


def logprobs(engine: Engine, prompt: list[int], **options: Any) -> list[dict[int, float]]:
    """Of the 20 likeliest tokens at each place of a greedy answer."""
    engine.add(prompt, SamplingParams(temperature=0.0, logprobs=20, ignore_eos=True, **options))
    found = []
    while engine.has_work:
        for out in engine.step():
            assert out.token is not None
            found.append({entry.token_id: entry.logprob for entry in out.token.logprobs})
    return found


def farthest(ours: list[dict[int, float]], theirs: list[dict[int, float]]) -> float:
    """The largest difference of a log-probability that both name."""
    shared = [(one, other, one.keys() & other.keys()) for one, other in zip(ours, theirs, strict=True)]
    assert all(len(tokens) > 10 for _, _, tokens in shared)
    return max(abs(one[token] - other[token]) for one, other, tokens in shared for token in tokens)


@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("asked", [None, SNAPKV], ids=["full", "snapkv"])
def test_texts_do_not_hang_on_company_arrival_chunks_preemption_or_what_was_cached(
    quantised: torch.dtype, model: LlamaModel, asked: dict[str, Any] | None
) -> None:
    shared = prompt_of(150, seed=9)
    jobs = [
        (shared[: 40 + 30 * n] + prompt_of(30 + 7 * n, seed=n), {"kv_cache": asked if n != 3 else None, "seed": n})
        for n in range(5)
    ]
    alone = [text(run(engine_on(model, quantised=quantised), [job])[0]) for job in jobs]
    for engine, seed in [
        (engine_on(model, quantised=quantised), None),
        (engine_on(model, quantised=quantised, budget=16), None),
        (engine_on(model, quantised=quantised, budget=50, blocks=40), None),
        (engine_on(model, quantised=quantised, budget=37), 1),
        (engine_on(model, quantised=quantised, budget=64, caching=False), 2),
    ]:
        together = run(engine, jobs, seed=seed)
        assert [text(request) for request in together] == alone
        if seed is not None:
            assert sum(row.preemptions for request in together for row in request.rows) > 0
        warm = run(engine, jobs)
        assert [text(request) for request in warm] == alone
        if engine.prefix.enabled and engine.pool.total > 100:
            assert sum(request.cached_tokens for request in warm) > 200


@pytest.mark.parametrize("quantised", FORMATS)
def test_the_bytes_of_a_prompt_are_the_same_whatever_its_chunks(quantised: torch.dtype, model: LlamaModel) -> None:
    pools = []
    for budget in (256, 48, 16):
        engine = engine_on(model, quantised=quantised, budget=budget, caching=False)
        request = engine.add(prompt_of(230), SamplingParams(max_tokens=40, temperature=0.0))
        while not request.rows[0].generated:
            engine.step()
        blocks = torch.tensor(request.rows[0].blocks[: 230 // PAGE])
        pools.append(engine.kv.store.words.view(301, -1)[blocks])
    assert torch.equal(pools[0], pools[1])
    assert torch.equal(pools[0], pools[2])


@pytest.mark.parametrize("quantised", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probabilities_are_near_those_of_the_full_cache_and_not_equal_to_them(
    quantised: torch.dtype, model: LlamaModel, backend: BackendName
) -> None:
    prompt = prompt_of(300, seed=3)
    full = logprobs(engine_on(model, quantised=None, backend=backend), prompt, max_tokens=1)
    other = logprobs(engine_on(model, quantised=quantised, backend=backend), prompt, max_tokens=1)
    assert 0 < farthest(full, other) < (0.1 if quantised == torch.int8 else 1.0)


@pytest.mark.parametrize("quantised", FORMATS)
def test_both_backends_say_the_same(quantised: torch.dtype, model: LlamaModel) -> None:
    prompts = [prompt_of(200, seed=n) for n in range(3)]
    for asked in (None, SNAPKV):
        found = [
            [
                logprobs(engine_on(model, quantised=quantised, backend=backend), prompt, max_tokens=12, kv_cache=asked)
                for prompt in prompts
            ]
            for backend in BACKENDS
        ]
        for ours, theirs in zip(*found, strict=True):
            # Where a rounding differs, a number may be its neighbour.
            assert farthest(ours, theirs) < (1e-3 if quantised == torch.int8 else 2e-2)


@pytest.mark.parametrize("quantised", FORMATS)
def test_a_policy_that_keeps_everything_gives_the_text_of_no_policy(quantised: torch.dtype, model: LlamaModel) -> None:
    prompts = [prompt_of(100 + 31 * n, seed=n) for n in range(3)]
    plain = run(engine_on(model, quantised=quantised), [(prompt, {}) for prompt in prompts])
    everything = SNAPKV | {"budget": 10_000}
    kept = run(engine_on(model, quantised=quantised), [(prompt, {"kv_cache": everything}) for prompt in prompts])
    assert [text(request) for request in kept] == [text(request) for request in plain]


def test_a_budget_in_bytes_keeps_as_many_more_tokens_as_they_are_smaller(model: LlamaModel) -> None:
    kept = {}
    for quantised in (None, *FORMATS):
        engine = engine_on(model, quantised=quantised)
        geometry = engine.kv.store.geometry
        noted = 4 * engine.kv.store.lanes  # the position of a kept token, in each lane
        asked = {"policy": "knorm", "budget": "30KiB"} | SMALL
        (request,) = run(engine, [(prompt_of(320), {"kv_cache": asked})])
        assert request.kv_usage is not None
        kept[quantised] = request.kv_usage.kept_tokens
        assert request.kv_usage.kept_tokens == 30 * 1024 // (geometry.token_bytes + noted)
        assert request.kv_usage.kept_bytes == round(request.kv_usage.kept_tokens * geometry.token_bytes)
    assert kept[torch.int8] > 2 * kept[None]
    assert kept[INT4] > kept[torch.int8]


def test_an_engine_that_is_asked_for_a_format_says_so_and_shares_no_block_with_another(model: LlamaModel) -> None:
    loaded = LoadedModel(model=model, tokenizer=None, max_model_len=512, generation_defaults={}, folder=Path())
    found = {}
    for kv_dtype in ("auto", "int8", "int4"):
        config = EngineConfig(memory=MemoryConfig(kv_memory="4MiB", kv_dtype=kv_dtype))  # type: ignore[arg-type]
        found[kv_dtype] = build_engine(loaded, config)
    tokens = random.Random(0).choices(range(256), k=PAGE)
    full, of_full = found.pop("auto")
    assert "as" not in str(of_full).split(";")[0]
    for (name, (engine, capacity)), quantised in zip(found.items(), FORMATS, strict=True):
        assert capacity.tokens > 3 * of_full.tokens
        assert f"tokens as {name} in" in str(capacity)
        assert engine.kv.store.geometry.quantised is quantised
        assert run(engine, [(tokens, {})])
    roots = [engine._keyspace.root() for engine in (full, *(engine for engine, _ in found.values()))]
    assert len(set(roots)) == 3


@pytest.mark.parametrize(
    ("quantised", "asked"), [(torch.int8, None), (INT4, SNAPKV | {"policy": "knorm"})], ids=["int8", "int4 and knorm"]
)
def test_the_steps_of_a_gpu_give_the_texts_of_the_reference(
    quantised: torch.dtype, asked: dict[str, Any] | None, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from kvikk.engine.gpu import runner as gpu

    if kernel_device.type == "cpu":  # every program of a grid is interpreted, the idle ones too
        monkeypatch.setattr(gpu, "size_runs", lambda tokens: 2)
    model = toy_model(max_positions=256, device=kernel_device)
    jobs = [(prompt_of(length, seed=length), {"max_tokens": 8, "kv_cache": asked}) for length in (70, 33)]

    def on_gpu(model: LlamaModel, store: KVStore, backend: AttentionBackend) -> Runner:
        return gpu.GpuRunner(
            model, store, backend, max_rows=16, max_tokens=64, max_model_len=160, enforce_eager=True,
            ragged=asked is not None,
        )  # fmt: skip

    plain = engine_on(model, quantised=quantised, backend="reference", blocks=40, budget=64, device=kernel_device)
    fast = engine_on(
        model, quantised=quantised, backend="triton", blocks=40, budget=64, device=kernel_device, make_runner=on_gpu
    )
    expected = [text(request) for request in run(plain, jobs)]
    assert [text(request) for request in run(fast, jobs)] == expected

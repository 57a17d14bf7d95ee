"""The engine on a GPU: the same texts as on the CPU, in fp32, and a pool that takes the memory it was given."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from engine.fake_grammar import FakeCompiler
from engine.test_toy_model import EVERYTHING
from kvikk.attention import attention_backend
from kvikk.compress import Rotary
from kvikk.engine import Engine, EngineConfig, EngineLimits, SamplingParams
from kvikk.engine.compressor import PolicyCompressor
from kvikk.engine.runner import ModelRunner
from kvikk.memory import KVStore, MemoryConfig, pool_blocks
from kvikk.models import toy_model
from kvikk.prefix import KeySpace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def engine_on(device: torch.device) -> Engine:
    model = toy_model(device=device)
    store = KVStore(model.spec.geometry(16), 101, device)
    store.poison()
    return Engine(
        EngineConfig(),
        EngineLimits(max_model_len=500, vocabulary=256),
        KeySpace(model="toy", rope="", kv_format="f32", page_size=16, numerics="fast"),
        100,
        ModelRunner(model, store, attention_backend("auto", store)),
        store,
        compressor=PolicyCompressor(store, Rotary(inv_freq=model.inv_freq)),
        grammars=FakeCompiler(256, frozenset()),  # type: ignore[arg-type]
    )


def texts(device: torch.device, jobs: list[tuple[list[int], SamplingParams]]) -> list[list[list[int]]]:
    engine = engine_on(device)
    for _ in range(2):  # cold, then over the prefix cache
        requests = [engine.add(prompt, params) for prompt, params in jobs]
        while engine.has_work:
            engine.step()
            engine.check()
    assert engine.prefix.counters.hits > 100
    return [[row.generated for row in request.rows] for request in requests]


def test_the_gpu_writes_the_texts_of_the_cpu() -> None:
    rng = random.Random(4)
    jobs = []
    mixed = [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}, {"n": 3, "top_k": 30}, EVERYTHING]
    for index in range(12):
        options = mixed[index % 4]
        params = SamplingParams.from_dict({**options, "max_tokens": 20, "seed": index})
        jobs.append(([rng.randrange(256) for _ in range(rng.randrange(1, 120))], params))
    assert texts(torch.device("cuda"), jobs) == texts(torch.device("cpu"), jobs)


def test_gpu_memory_utilization_is_of_the_whole_device() -> None:
    geometry = toy_model().spec.geometry(16)
    device = torch.device("cuda")
    free, total = torch.cuda.mem_get_info(device)
    blocks = pool_blocks(MemoryConfig(gpu_memory_utilization=0.5), geometry, device)
    assert abs(blocks * geometry.block_bytes - (total * 0.5 - (total - free))) < 2**28


@pytest.mark.parametrize("allocator", ["uniform", "pyramid", "pooled"])
@pytest.mark.parametrize("policy", ["streaming", "snapkv", "knorm", "h2o"])
def test_the_host_waits_for_the_device_only_where_scores_say_how_many_tokens_a_lane_keeps(
    policy: str, allocator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_on(torch.device("cuda"))
    compact, waits = engine.kv.compact, []

    def watched(*arguments: Any) -> bool:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                return compact(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waits.append(sum("synchronizing" in str(warning.message) for warning in found))

    monkeypatch.setattr(engine.kv, "compact", watched)
    kv_cache = {
        "policy": policy,
        "budget": 0.5,
        "trigger": "every:16",
        "sinks": 2,
        "window": 16,
        "allocator": allocator,
    }
    engine.add(range(1, 200), SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, kv_cache=kv_cache))
    while engine.has_work:
        engine.step()
    assert engine.kv.counters.compactions == len(waits) == 4
    assert waits[1:] == [int(allocator == "pooled")] * 3

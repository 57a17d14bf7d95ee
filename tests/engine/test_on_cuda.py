"""The engine on a GPU: the same texts as on the CPU, in fp32, and a pool that takes the memory it was given."""

from __future__ import annotations

import random

import pytest
import torch

from engine.fake_grammar import FakeCompiler
from engine.test_toy_model import EVERYTHING
from kvikk.attention import attention_backend
from kvikk.engine import Engine, EngineConfig, EngineLimits, SamplingParams
from kvikk.engine.runner import ModelRunner
from kvikk.memory import KVStore, MemoryConfig, pool_blocks
from kvikk.models import toy_model
from kvikk.prefix import KeySpace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def texts(device: torch.device, jobs: list[tuple[list[int], SamplingParams]]) -> list[list[list[int]]]:
    model = toy_model(device=device)
    store = KVStore(model.spec.geometry(16), 101, device)
    store.poison()
    engine = Engine(
        EngineConfig(),
        EngineLimits(max_model_len=500, vocabulary=256),
        KeySpace(model="toy", rope="", kv_format="f32", page_size=16, numerics="fast"),
        100,
        ModelRunner(model, store, attention_backend("auto", store)),
        store,
        grammars=FakeCompiler(256, frozenset()),  # type: ignore[arg-type]
    )
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

"""Steps of few sizes: a process that has warmed up stays as large as it is, and nobody sees the rows that fill up."""

from __future__ import annotations

import ctypes
import gc
import platform
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvikk.attention import attention_backend
from kvikk.engine import Engine, EngineConfig, EngineLimits, SamplingParams
from kvikk.engine.padding import padded_size
from kvikk.engine.runner import ModelRunner
from kvikk.memory import KVStore
from kvikk.models import CausalLM, toy_model
from kvikk.models.llama import LlamaModel
from kvikk.models.projection import can_pack
from kvikk.prefix import KeySpace
from kvikk.types import NULL_BLOCK

PAGE = 16
MOST_ROWS, LONGEST = 20, 19


class HeapCounts(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "rest",
        )
    )


def heap_mib() -> float:
    """What this process has allocated from the C heap and not given back."""
    count = ctypes.CDLL(None).mallinfo2
    count.restype = HeapCounts
    gc.collect()
    counts = count()
    return float(counts.uordblks + counts.hblkhd) / 2**20


def engine_on(model: CausalLM, *, blocks: int = 120, backend: Any = "auto") -> Engine:
    spec = model.spec
    store = KVStore(spec.geometry(PAGE), blocks + 1, torch.device("cpu"))
    store.poison()  # every page is touched, and what must not be read shows
    keyspace = KeySpace(model=spec.fingerprint, rope=spec.rope, kv_format="any", page_size=PAGE, numerics="fast")
    limits = EngineLimits(max_model_len=512, vocabulary=spec.vocabulary)
    runner = ModelRunner(model, store, attention_backend(backend, store))
    return Engine(EngineConfig(), limits, keyspace, blocks, runner, store)


def serve(engine: Engine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    """The texts of prompts that are asked at once."""
    requests = [
        engine.add(prompt, SamplingParams(**({"temperature": 0, "max_tokens": 4} | params))) for prompt in prompts
    ]
    while engine.has_work:
        engine.step()
    engine.check()
    return [request.rows[0].generated for request in requests]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny steps gain nothing from more, and wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="counts glibc's heap"
)
def test_a_process_that_has_met_all_sizes_grows_no_more_over_thousands_of_tiny_requests() -> None:
    if not can_pack(torch.empty(1, 1)):
        pytest.skip("nothing is compiled for a number of rows here")
    rng = random.Random(0)
    cold = heap_mib()
    engine = engine_on(toy_model(hidden=72))  # weights of a shape for which no other test had anything compiled
    for tokens in {padded_size(rows) for rows in range(1, MOST_ROWS * LONGEST + 1)}:
        serve(engine, [[tokens % 256] * tokens])
    for rows in range(1, MOST_ROWS + 1):
        serve(engine, [[row] for row in range(rows)])
    warm = heap_mib()
    for _ in range(5000 // MOST_ROWS * 2):
        prompts = [
            [rng.randrange(256) for _ in range(rng.randint(1, LONGEST))] for _ in range(rng.randint(1, MOST_ROWS))
        ]
        serve(engine, prompts, max_tokens=rng.randint(1, 4))
    assert heap_mib() - warm < 3
    assert warm - cold > 30  # what was compiled is in the count
    assert engine.prefix.counters.evicted_blocks > 120  # the pool has been full


@pytest.mark.parametrize("rows", [0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 500, 1000, 1024, 5000])
def test_a_size_holds_its_rows_and_an_eighth_more_at_most(rows: int) -> None:
    assert rows <= padded_size(rows) <= max(rows, rows * 9 / 8)
    assert padded_size(padded_size(rows)) == padded_size(rows)


def test_there_are_few_sizes() -> None:
    assert len({padded_size(rows) for rows in range(1, 1025)}) == 80
    assert [padded_size(rows) for rows in range(33)] == list(range(33))


class Spy:
    """A model that notes how many rows its parts were given."""

    def __init__(self, model: LlamaModel) -> None:
        self.spec = model.spec
        self.tokens: list[int] = []
        self.wanted: list[int] = []
        self.heads: list[int] = []
        self._model = model

    def forward(self, token_ids: Any, positions: Any, step: Any, logits_at: Any) -> Any:
        self.tokens.append(len(token_ids))
        self.wanted.append(len(logits_at))
        return self._model.forward(token_ids, positions, step, logits_at)

    def head(self, hidden: Any) -> Any:
        self.heads.append(len(hidden))
        return self._model.head(hidden)


def test_all_parts_of_a_model_compute_sizes_only_and_the_texts_are_those_of_each_prompt_alone() -> None:
    spy, rng = Spy(toy_model()), random.Random(1)
    engine = engine_on(spy, blocks=400)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 12))] for _ in range(67)]
    together = serve(engine, prompts, prompt_logprobs=1)
    assert max(spy.tokens) > 300
    assert 72 in spy.heads  # of 67 rows
    assert all(rows == padded_size(rows) for rows in spy.tokens + spy.wanted + spy.heads)
    assert together == [serve(engine_on(toy_model()), [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_that_fill_a_step_up_store_nothing(backend: Any) -> None:
    engine = engine_on(toy_model(), backend=backend)
    prompt = list(range(65))
    serve(engine, [prompt], max_tokens=1)
    pool = engine._runner.store.layer(0)  # type: ignore[attr-defined]
    assert not pool[NULL_BLOCK].any()
    assert int(pool[1:, 0, 0, :, 0].isfinite().sum()) == len(prompt)

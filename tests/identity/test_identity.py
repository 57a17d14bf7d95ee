"""The greedy tokens of transformers' own `generate` in fp32, in every way that kvikk can arrive at them.

`make verify` takes all prompts, CI five of them for each family: the longest for the one that computes them quickly.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from identity.prompts import RealPrompt, real_prompts
from kvikk.configuration import build
from kvikk.engine import Engine, EngineConfig, SamplingParams, build_engine
from kvikk.engine.request import Request
from kvikk.models import load_model
from kvikk.models.bundled import bundled_folder
from kvikk.prefix import extend_keys
from kvikk.types import BlockId

NEW_TOKENS = 64
IN_CI = {"smollm2": (5, 60, 128, 300, 1200), "qwen3": (5, 60, 300, 1200, 4000)}
"""Lengths of prompts."""
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
MAX_LEN = 4128


class Family:
    """A model, its prompts, and what transformers generates for them."""

    def __init__(self, folder: Path, lengths: tuple[int, ...]) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        prompts = real_prompts(AutoTokenizer.from_pretrained(folder))
        is_whole = bool(os.environ.get("KVIKK_VERIFY"))
        self.prompts: list[RealPrompt] = [p for p in prompts if is_whole or len(p.token_ids) in lengths]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.expected = [self._reference(model, prompt.token_ids) for prompt in self.prompts]
        self.loaded = load_model(str(folder), dtype="float32", device=torch.device("cpu"), max_model_len=MAX_LEN)

    @staticmethod
    @torch.inference_mode()
    def _reference(model: Any, token_ids: list[int]) -> list[int]:
        ids = torch.tensor([token_ids])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        found: list[int] = out[0, len(token_ids) :].tolist()
        return found

    def engine(self, *, kv_tokens: int = 40_000, **options: object) -> Engine:
        spec = self.loaded.model.spec
        size = spec.geometry(16).block_bytes * (kv_tokens // 16 + 1)
        config = build(EngineConfig, {"device": "cpu", "kv_memory": str(size), "max_model_len": MAX_LEN, **options})
        engine, _ = build_engine(self.loaded, config)
        engine_store(engine).poison()
        return engine

    def assert_equal(self, requests: dict[int, Request]) -> None:
        for index, request in requests.items():
            name = f"{self.prompts[index].name}, {len(self.prompts[index].token_ids)} tokens"
            assert request.rows[0].generated == self.expected[index], name


def engine_store(engine: Engine) -> Any:
    return engine._runner.store  # type: ignore[attr-defined]


def run(
    engine: Engine,
    prompts: dict[int, list[int]],
    params: SamplingParams = GREEDY,
    between: Callable[[int], None] = lambda step: None,
) -> dict[int, Request]:
    requests = {index: engine.add(ids, params) for index, ids in prompts.items()}
    step = 0
    while engine.has_work:
        between(step)
        engine.step()
        step += 1
    engine.check()
    return requests


@pytest.fixture(scope="module")
def smollm2() -> Family:
    return Family(bundled_folder(), IN_CI["smollm2"])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Family:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=49152, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, initializer_range=0.2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(bundled_folder()).save_pretrained(folder)
    return Family(folder, IN_CI["qwen3"])


@pytest.fixture(params=["smollm2", "qwen3"])
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.getfixturevalue(request.param)
    return found


def ids_of(family: Family) -> dict[int, list[int]]:
    return {index: prompt.token_ids for index, prompt in enumerate(family.prompts)}


def test_alone(family: Family) -> None:
    engine = family.engine(enable_prefix_caching=False)
    for index, ids in ids_of(family).items():
        family.assert_equal(run(engine, {index: ids}))


def test_batched(family: Family) -> None:
    engine = family.engine()
    family.assert_equal(run(engine, ids_of(family)))
    assert engine.steps < 2 * NEW_TOKENS + 40


def test_in_random_order_of_arrival(family: Family) -> None:
    engine = family.engine()
    rng = random.Random(1)
    order = list(ids_of(family).items())
    rng.shuffle(order)
    requests = {}
    while order or engine.has_work:
        if order and rng.random() < 0.2:
            index, ids = order.pop()
            requests[index] = engine.add(ids, GREEDY)
        engine.step()
    family.assert_equal(requests)


def test_with_prefix_hits(family: Family) -> None:
    engine = family.engine()
    run(engine, ids_of(family), SamplingParams(temperature=0, max_tokens=1))
    requests = run(engine, ids_of(family))
    for request in requests.values():
        assert request.cached_tokens == min(len(request.prompt_token_ids) // 16 * 16, len(request.prompt_token_ids) - 1)
    family.assert_equal(requests)
    assert engine.prefix.counters.hits > 0


def test_with_holes_in_the_middle(family: Family) -> None:
    engine = family.engine()
    run(engine, ids_of(family), SamplingParams(temperature=0, max_tokens=1))
    found: dict[int, int] = {}
    punched = 0
    for index, ids in ids_of(family).items():
        keys = [engine._keyspace.root("")]
        extend_keys(keys, ids, 16)
        blocks = [block for block in engine.prefix.lookup(keys[1:]) if block is not None]
        middle = [block for at, block in enumerate(blocks[1:-1]) if at % 5 < 2]
        assert engine.prefix.discard(middle) == len(middle)
        found[index] = 16 * (len(ids) // 16 - len(middle)) - (len(ids) % 16 == 0)  # the last token is always computed
        punched += len(middle)
    assert punched > 30
    requests = run(engine, ids_of(family))
    assert {index: request.cached_tokens for index, request in requests.items()} == found
    family.assert_equal(requests)


@pytest.mark.parametrize("chunk", [64, 1000])
def test_in_chunks(family: Family, chunk: int) -> None:
    engine = family.engine(max_num_batched_tokens=chunk, max_num_seqs=32, enable_prefix_caching=False)
    totals = [0]
    family.assert_equal(run(engine, ids_of(family), between=lambda step: totals.append(engine.computed_tokens)))
    assert max(after - before for before, after in pairwise(totals)) == chunk
    assert engine.steps >= sum(len(ids) for ids in ids_of(family).values()) / chunk


@pytest.mark.parametrize("is_cache_lost", [False, True])
def test_after_preemption(family: Family, is_cache_lost: bool) -> None:
    engine = family.engine(max_num_seqs=32)
    requests = {index: engine.add(ids, GREEDY) for index, ids in ids_of(family).items()}
    stolen: list[BlockId] | None = None
    while engine.has_work:
        engine.step()
        is_full = not engine.scheduler.waiting and all(row.missing_tokens == 1 for row in engine.scheduler.running)
        if stolen is None and is_full:  # from here on there is no room: rows that need a block must take another's
            engine.prefix.make_room(engine.pool.free + engine.pool.cached)
            stolen = engine.pool.take(engine.pool.free)
        elif stolen and engine.scheduler.preemptions:
            engine.prefix.release(stolen)
            stolen = []
            if is_cache_lost:
                engine.prefix.reset()
    assert engine.scheduler.preemptions > 0
    assert (engine.prefix.counters.recomputed > 100) == is_cache_lost
    assert (engine.prefix.counters.resumed > 100) != is_cache_lost
    family.assert_equal(requests)
    engine.check()

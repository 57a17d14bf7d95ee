"""While an engine lives garbage collections are short; when it is dropped its memory is free at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvikk.configuration import build
from kvikk.engine import Engine, EngineConfig, SamplingParams, build_engine
from kvikk.heap import frozen_heap
from kvikk.models import CausalLM, LoadedModel, toy_model
from kvikk.models.transformers_model import TransformersModel, register

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """Reference counts alone, so that nothing is freed by luck."""
    gc.unfreeze()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def toy() -> CausalLM:
    return toy_model(max_positions=256)


def of_transformers() -> CausalLM:
    register()
    config = transformers.GemmaConfig(**SIZES, num_key_value_heads=2, vocab_size=256)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="kvikk").eval()
    return TransformersModel(module, replace(toy_model().spec, name="gemma"), 256)


def engine_of(model: CausalLM) -> Engine:
    loaded = LoadedModel(model=model, tokenizer=None, max_model_len=256, generation_defaults={}, folder=Path())
    engine, _ = build_engine(loaded, build(EngineConfig, {"device": "cpu", "kv_memory": "2MiB"}))
    return engine


class Node:
    """What a user has made before."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("make", [toy, of_transformers])
def test_an_engine_that_is_dropped_gives_its_pool_and_its_model_back_at_once(make: Callable[[], CausalLM]) -> None:
    model = make()
    engine = engine_of(model)
    assert gc.get_freeze_count() > 0
    half = {"policy": "knorm", "budget": 0.5, "trigger": "every:16"}
    for kv_cache in (None, half):
        engine.add(range(3, 80), SamplingParams(max_tokens=40, ignore_eos=True, kv_cache=kv_cache))
    for _ in range(25):
        engine.step()
    assert engine.has_work
    assert engine.kv.counters.compactions
    parts = [weakref.ref(part) for part in (engine, engine.kv.store, model)]
    del engine, model
    assert [part() for part in parts] == [None, None, None]
    assert gc.get_freeze_count() == 0


LOSSLESS = {"policy": "knorm", "budget": 0.5, "lossless": True, "draft_tokens": 3}


@pytest.mark.parametrize(
    "kv_cache",
    [None, LOSSLESS, LOSSLESS | {"drafter": "cache+ngram"}, {"lossless": True, "drafter": "ngram", "draft_tokens": 3}],
)
def test_a_full_collection_does_not_go_through_the_tokens_of_running_requests(kv_cache: dict[str, Any] | None) -> None:
    engine = engine_of(toy())
    prompt = [*range(3, 103), *range(3, 103)]
    request = engine.add(prompt, SamplingParams(max_tokens=40, ignore_eos=True, n=2, kv_cache=kv_cache))
    del prompt
    for _ in range(16):
        engine.step()
    assert [row.is_running for row in request.rows] == [True, True]
    assert kv_cache is None or request.kv_usage.drafted > 0  # type: ignore[union-attr]
    referents = [gc.get_referents(thing) for thing in gc.get_objects()]  # nothing of those that are frozen
    assert max(sum(isinstance(one, int) for one in found) for found in referents) < 100


def test_garbage_of_a_users_own_that_is_older_than_an_engine_goes_when_the_engine_has_gone() -> None:
    node = Node()
    is_there = weakref.ref(node)
    engine = engine_of(toy())
    del node
    gc.collect()
    assert is_there() is not None, "frozen with all that was there"
    del engine
    gc.collect()
    assert is_there() is None


def test_garbage_that_is_younger_than_an_engine_goes_as_ever() -> None:
    engine = engine_of(toy())
    is_there = weakref.ref(Node())
    gc.collect()
    assert is_there() is None
    assert not engine.has_work


def test_a_frozen_heap_is_as_before_when_its_block_is_left_by_an_error() -> None:
    is_there = weakref.ref(Node())
    with pytest.raises(ZeroDivisionError), frozen_heap():  # noqa: PT012
        assert is_there() is None, "what is garbage already does not stay"
        assert gc.get_freeze_count() > 0
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0

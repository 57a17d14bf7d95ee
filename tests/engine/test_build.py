"""What an operator says of the KV cache: checked when the engine is built, and what requests go on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.test_heap import of_transformers, toy
from kvikk import memory
from kvikk.compress import KVCacheParams
from kvikk.configuration import build
from kvikk.engine import Engine, EngineConfig, SamplingParams, build_engine
from kvikk.engine import build as build_module
from kvikk.errors import ConfigError, InvalidRequest
from kvikk.models import CausalLM, LoadedModel

QUARTER: dict[str, Any] = {"kv_policy": "snapkv", "kv_budget": "25%"}


def engine_of(model: CausalLM, **options: Any) -> Engine:
    loaded = LoadedModel(model=model, tokenizer=None, max_model_len=256, generation_defaults={}, folder=Path())
    engine, _ = build_engine(loaded, build(EngineConfig, {"device": "cpu", "kv_memory": "2MiB"} | options))
    return engine


def asked_of(engine: Engine, kv_cache: dict[str, Any] | None) -> KVCacheParams | None:
    """How a request will be compressed; it is served to its end."""
    request = engine.add(range(3, 80), SamplingParams(max_tokens=4, kv_cache=kv_cache))
    while engine.has_work:
        assert all(out.error is None for out in engine.step())
    return request.kv_cache


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (
            toy,
            {"kv_policy": "snapkv", "kv_budget": "1B"},
            r"--kv-budget is 1 byte, sinks \(4\) and window \(32\) alone",
        ),
        (of_transformers, QUARTER | {"kv_policy": "expected-attention"}, "--kv-policy 'expected-attention' must know"),
    ],
    ids=["a budget below what always stays", "a policy that must know more of the model"],
)
def test_no_engine_is_built_that_could_serve_no_request_as_its_operator_says(
    make: Callable[[], CausalLM], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        engine_of(make(), **options)


def test_a_request_goes_on_from_what_the_operator_says_with_or_without_a_policy() -> None:
    engine = engine_of(toy(), kv_sinks=2, kv_window=8, kv_allocator="pooled")
    assert asked_of(engine, None) is None, "nothing is dropped"
    asked = asked_of(engine, {"policy": "knorm", "budget": "50%", "sinks": 1})
    assert asked is not None
    assert (asked.sinks, asked.window, asked.allocator) == (1, 8, "pooled")


def test_an_operator_may_keep_it_to_the_flags() -> None:
    engine = engine_of(toy(), **QUARTER, kv_per_request=False)
    assert asked_of(engine, None) == KVCacheParams(policy="snapkv", budget="25%")
    with pytest.raises(InvalidRequest, match="is not a request's to say here"):
        asked_of(engine, {"policy": "r-kv", "trigger": "every:1"})
    assert not engine.has_work


@pytest.mark.parametrize("drafting", [{"draft_tokens": 4}, {"drafter": "ngram"}, {"drafter": "cache"}], ids=str)
def test_a_client_of_a_lossless_server_may_have_its_policy_alone_or_none_of_it(drafting: dict[str, Any]) -> None:
    engine = engine_of(toy(), **QUARTER, lossless=True, **drafting)
    assert asked_of(engine, {"lossless": False}) == KVCacheParams(policy="snapkv", budget="25%")
    assert asked_of(engine, {"lossless": False, "policy": "full"}) is None
    full = asked_of(engine, {"policy": "full"})
    assert full is not None
    assert full.lossless
    assert full.drafts_by_lookup


@pytest.mark.parametrize(
    ("options", "crossings"),
    [
        ({}, 0),
        ({"kv_host_memory": "1MiB"}, 1),
        ({"prefix_tier_memory": "1MiB"}, 1),
        ({"kv_host_memory": "1MiB", "prefix_tier_memory": "1MiB"}, 2),
    ],
    ids=str,
)
def test_what_blocks_pass_through_on_their_way_to_the_host_is_no_part_of_the_pool(
    options: dict[str, Any], crossings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def pool_blocks(*arguments: Any, reserved_bytes: int) -> int:
        seen.append(reserved_bytes)
        return memory.pool_blocks(*arguments, reserved_bytes=reserved_bytes)

    monkeypatch.setattr(build_module, "pool_blocks", pool_blocks)
    monkeypatch.setattr(build_module, "staging_bytes", lambda *_: 5)
    engine_of(toy(), **options).close()
    assert seen == [5 * crossings]

"""What an operator says by flags, and what is refused in the flags' own names."""

from __future__ import annotations

from typing import Any

import pytest

from kvikk.compress import KVCacheParams
from kvikk.compress.flags import PRESETS, KVCacheConfig
from kvikk.configuration import build
from kvikk.errors import ConfigError, InvalidRequest

QUARTER = {"kv_policy": "snapkv", "kv_budget": "25%"}


def test_flags_say_what_a_request_would() -> None:
    params = KVCacheConfig(kv_policy="snapkv", kv_budget="25%", kv_policy_options='{"kernel": 7}', kv_sinks=2).params
    assert (params.policy, params.policy_options, params.sinks) == ("snapkv", {"kernel": 7}, 2)
    assert KVCacheConfig().params == KVCacheParams()


def test_what_is_said_without_a_policy_holds_for_requests_that_name_one() -> None:
    operator = KVCacheConfig(kv_allocator="pooled", kv_trigger="every:64", kv_sinks=2, kv_window=8)
    assert operator.asked(None).is_full
    asked = operator.asked({"policy": "snapkv", "budget": "25%", "sinks": 1})
    assert (asked.allocator, asked.every, asked.sinks, asked.window) == ("pooled", 64, 1, 8)


def test_a_lossless_server_has_what_a_request_names_drafted_with_as_it_says() -> None:
    asked = KVCacheConfig(lossless=True, draft_tokens=3, kv_window=8).asked({"policy": "snapkv", "budget": "25%"})
    assert (asked.lossless, asked.draft_tokens, asked.window) == (True, 3, 8)
    assert not asked.drafts_by_lookup


def test_a_preset_is_the_options_that_it_is_made_of_and_flags_win_over_it() -> None:
    vericache = build(KVCacheConfig, {"preset": "vericache"}).params
    assert vericache == KVCacheParams(policy="snapkv", budget="25%", lossless=True)
    other = build(KVCacheConfig, {"preset": "vericache", "kv_policy": "knorm", "draft_tokens": 3}).params
    assert other == KVCacheParams(policy="knorm", budget="25%", lossless=True, draft_tokens=3)
    lossy = build(KVCacheConfig, {"preset": "vericache", "lossless": False}).params
    assert lossy == KVCacheParams(policy="snapkv", budget="25%")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_had_and_is_never_silently_nothing(name: str) -> None:
    assert build(KVCacheConfig, {"preset": name}).params != KVCacheParams()
    with pytest.raises(ConfigError, match=rf"preset '{name}' was not read"):
        KVCacheConfig(preset=name)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"kv_budget": "25%"}, "--kv-budget 25% has no --kv-policy"),
        ({"kv_policy_options": '{"kernel": 7}'}, "--kv-policy-options {.*} has no --kv-policy"),
        ({"kv_policy_options": "nonsense"}, "--kv-policy-options nonsense has no --kv-policy"),
        ({"kv_policy": ""}, "--kv-policy: unknown policy ''"),
        ({"kv_policy": "snapkv"}, "--kv-budget is missing"),
        ({"kv_policy": "snapkv", "kv_budget": "101%"}, "--kv-budget: 101% is no budget"),
        ({"kv_policy": "snapkv", "kv_budget": "10"}, "--kv-budget is 10 tokens, sinks .* alone are 36"),
        ({"kv_policy": "snapkv", "kv_budget": "all"}, "--kv-budget: 'all' is no budget"),
        ({"kv_policy": "full", "kv_budget": "25%"}, "--kv-budget is 25% and the policy is 'full'"),
        ({"kv_policy": "snapvk", "kv_budget": "25%"}, "--kv-policy: unknown policy 'snapvk': did you mean 'snapkv'"),
        (QUARTER | {"kv_policy_options": "kernel=7"}, "--kv-policy-options 'kernel=7' is not JSON"),
        (QUARTER | {"kv_policy_options": "[7]"}, "must be an object"),
        (QUARTER | {"kv_policy_options": '{"kernel": 4}'}, "--kv-policy-options: SnapKV: kernel is 4"),
        ({"drafter": "ngram"}, "--drafter is 'ngram', but only lossless requests draft: add --lossless"),
        ({"draft_tokens": 4}, "--draft-tokens is 4, but only lossless requests draft: add --lossless"),
        ({"lossless": True, "draft_tokens": 33}, "--draft-tokens is 33: it must lie between 0 and 32"),
        ({"lossless": True, "drafter": "cache"}, "--drafter is 'cache', but nothing is dropped"),
        ({"kv_policy": "mine", "kv_budget": "25%"}, "is its package installed"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        KVCacheConfig(**flags)
    assert "kv_cache" not in str(caught.value), "a request's field is none of an operator's words"


def test_where_it_is_the_operators_alone_a_request_that_says_anything_is_refused() -> None:
    config = KVCacheConfig(kv_policy="snapkv", kv_budget="25%", kv_per_request=False)
    assert config.asked(None) == KVCacheParams(policy="snapkv", budget="25%")
    for said in ({}, {"policy": "full"}, {"trigger": "every:1"}):
        with pytest.raises(InvalidRequest, match="by --no-kv-per-request: leave it out") as caught:
            config.asked(said)
        assert caught.value.param == "kv_cache"


@pytest.mark.parametrize("method", [{}, QUARTER, {"lossless": True}], ids=["alone", "with a policy", "lossless"])
@pytest.mark.parametrize(
    ("flag", "value"),
    [("allocator", "nonsense"), ("rest", "burn"), ("trigger", "sometimes"), ("sinks", -3), ("window", 2**21)],
)
def test_every_flag_is_checked_whatever_stands_beside_it(method: dict[str, Any], flag: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"--kv-{flag} is {value!r}"):
        KVCacheConfig(**method, **{f"kv_{flag}": value})

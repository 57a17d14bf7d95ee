"""What an operator says by flags, and what is refused in the flags' own names."""

from __future__ import annotations

from typing import Any

import pytest

from kvikk.compress import KVCacheParams
from kvikk.compress.flags import PRESETS, KVCacheConfig
from kvikk.configuration import build
from kvikk.errors import ConfigError


def test_flags_say_what_a_request_would() -> None:
    params = KVCacheConfig(kv_policy="snapkv", kv_budget="25%", kv_policy_options='{"kernel": 7}', kv_sinks=2).params
    assert params is not None
    assert (params.policy, params.policy_options, params.sinks) == ("snapkv", {"kernel": 7}, 2)
    assert KVCacheConfig().params is None


def test_a_preset_is_the_options_that_it_is_made_of_and_flags_win_over_it() -> None:
    vericache = build(KVCacheConfig, {"preset": "vericache"}).params
    assert vericache == KVCacheParams(policy="snapkv", budget="25%", lossless=True)
    other = build(KVCacheConfig, {"preset": "vericache", "kv_policy": "knorm", "draft_tokens": 3}).params
    assert other == KVCacheParams(policy="knorm", budget="25%", lossless=True, draft_tokens=3)
    lossy = build(KVCacheConfig, {"preset": "vericache", "lossless": False}).params
    assert lossy == KVCacheParams(policy="snapkv", budget="25%")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_had_and_is_never_silently_nothing(name: str) -> None:
    assert build(KVCacheConfig, {"preset": name}).params is not None
    with pytest.raises(ConfigError, match=rf"preset '{name}' was not read"):
        KVCacheConfig(preset=name)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"kv_budget": "25%"}, "--kv-budget 25% has no --kv-policy"),
        ({"kv_policy": "snapkv"}, "--kv-budget is missing"),
        ({"kv_policy": "snapvk", "kv_budget": "25%"}, "did you mean 'snapkv'"),
        ({"kv_policy": "snapkv", "kv_budget": "25%", "kv_trigger": "now"}, "--kv-trigger is 'now'"),
        ({"kv_policy": "snapkv", "kv_budget": "25%", "kv_policy_options": "kernel=7"}, "is not JSON"),
        ({"kv_policy": "snapkv", "kv_budget": "25%", "kv_policy_options": "[7]"}, "must be an object"),
        ({"drafter": "ngram"}, "--drafter is 'ngram', but only lossless requests draft: add lossless"),
        ({"draft_tokens": 4}, "--draft-tokens is 4, but only lossless requests draft"),
        ({"lossless": True, "draft_tokens": 33}, "--draft-tokens is 33: it must lie between 0 and 32"),
        ({"lossless": True, "drafter": "cache"}, "--drafter is 'cache', but nothing is dropped"),
        ({"kv_policy": "mine", "kv_budget": "25%"}, "is its package installed"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KVCacheConfig(**flags)

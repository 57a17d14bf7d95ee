"""What an operator says by flags, and what is refused in the flags' own names."""

from __future__ import annotations

import pytest

from kvikk.compress.flags import KVCacheConfig
from kvikk.errors import ConfigError


def test_flags_say_what_a_request_would() -> None:
    params = KVCacheConfig(kv_policy="snapkv", kv_budget="25%", kv_policy_options='{"kernel": 7}', kv_sinks=2).params
    assert params is not None
    assert (params.policy, params.policy_options, params.sinks) == ("snapkv", {"kernel": 7}, 2)
    assert KVCacheConfig().params is None


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"kv_budget": "25%"}, "--kv-budget 25% has no --kv-policy"),
        ({"kv_policy": "snapkv"}, "--kv-budget is missing"),
        ({"kv_policy": "snapvk", "kv_budget": "25%"}, "did you mean 'snapkv'"),
        ({"kv_policy": "snapkv", "kv_budget": "25%", "kv_trigger": "now"}, "--kv-trigger is 'now'"),
        ({"kv_policy": "snapkv", "kv_budget": "25%", "kv_policy_options": "kernel=7"}, "is not JSON"),
        ({"kv_policy": "snapkv", "kv_budget": "25%", "kv_policy_options": "[7]"}, "must be an object"),
        ({"kv_policy": "mine", "kv_budget": "25%"}, "is its package installed"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(flags: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KVCacheConfig(**flags)  # type: ignore[arg-type]

"""What a request may ask for, and how it goes over what the operator set."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import msgspec
import pytest
from torch import Tensor

from kvikk.compress import KVCacheParams, LayerView, Signal
from kvikk.compress.allocators import Pooled
from kvikk.compress.policies.h2o import H2O
from kvikk.compress.policies.snapkv import SnapKV
from kvikk.compress.registry import GROUP, Registry
from kvikk.errors import InvalidRequest

OPERATOR = KVCacheParams(policy="snapkv", policy_options={"kernel": 7}, budget="25%", trigger="every:128", window=64)


def test_nothing_asked_for_keeps_everything() -> None:
    params = KVCacheParams()
    assert params.is_full
    assert params.every is None
    assert params.method.budget.is_everything


def test_what_is_asked_for_is_made() -> None:
    params = KVCacheParams(
        policy="snapkv", policy_options={"query_window": 16, "pooling": "max"}, budget=512, allocator="pooled",
        allocator_options={"safeguard": 0}, trigger="every:64", sinks=1, window=8,
    )  # fmt: skip
    method = params.method
    assert method.policy == SnapKV(query_window=16, pooling="max")
    assert method.allocator == Pooled(safeguard=0)
    assert (method.sinks, method.window, params.every, params.is_full) == (1, 8, 64, False)
    assert params.method is method, "made once"


def test_a_whole_share_keeps_everything_under_any_policy() -> None:
    assert KVCacheParams(policy="tova", budget="100%").is_full


@pytest.mark.parametrize(
    ("options", "param", "reason"),
    [
        ({"polcy": "tova"}, "polcy", "unknown field 'polcy' of kv_cache: did you mean 'policy'?"),
        ({"size": 3}, "size", "known are: policy, policy_options, budget"),
        ({"policy": "snap"}, "policy", "unknown policy 'snap': did you mean 'snapkv'?"),
        ({"policy": "zzz"}, "policy", "unknown policy 'zzz': is its package installed"),
        ({"policy": None}, "policy", "must be a name, `kvikk policies` lists them"),
        ({"policy": "tova", "policy_options": {"kernel": 3}}, "policy_options", "no option 'kernel': it takes none"),
        ({"policy_options": {"kernal": 3}}, "policy_options", "has no option 'kernal': did you mean 'kernel'?"),
        ({"policy_options": {"kernel": 4}}, "policy_options", "kernel is 4: a window around a token is odd"),
        ({"policy_options": {"kernel": "4"}}, "policy_options", "kernel '4' is not a whole number"),
        ({"policy_options": {"pooling": "sum"}}, "policy_options", "pooling is 'sum': choose from mean, max"),
        ({"policy_options": {"pooling": []}}, "policy_options", r"pooling is \[\]: choose from mean, max"),
        ({"policy": "h2o", "policy_options": {"per_query": 1}}, "policy_options", "per_query is 1: it must be true or"),
        ({"policy": "h2o", "policy_options": {"recent_share": "x"}}, "policy_options", "it must be a number"),
        ({"policy_options": ["kernel"]}, "policy_options", "must be an object of options by name"),
        ({"policy_options": {5: 5}}, "policy_options", "has no option 5"),
        ({"budget": "lots"}, "budget", r"'lots' is no budget: write a share \(25%, 0.25\), tokens"),
        ({"budget": None}, "budget", "budget is missing: policy 'snapkv' needs to know how much may stay"),
        ({"budget": 67}, "budget", r"is 67 tokens, sinks \(4\) and window \(64\) alone are 68: raise it"),
        ({"policy": "full", "budget": "50%"}, "budget", "is 50% and the policy is 'full', which keeps everything"),
        ({"allocator": "fair"}, "allocator", "is 'fair': choose from uniform, pyramid, pooled"),
        ({"allocator": {}}, "allocator", "choose from"),
        ({"allocator_options": {"beta": 3}}, "allocator_options", "allocator 'uniform' has no option 'beta'"),
        ({"allocator": "pyramid", "allocator_options": {"beta": 0}}, "allocator_options", "beta is 0.0: it must be at"),
        ({"rest": "quantise"}, "rest", "is 'quantise': choose from drop"),
        ({"trigger": "every:0"}, "trigger", "is 'every:0': write prefill, or every:128"),
        ({"trigger": "every:128\n"}, "trigger", "write prefill, or every:128"),
        ({"trigger": "every:1٢"}, "trigger", "write prefill, or every:128"),
        ({"trigger": "pressure"}, "trigger", "write prefill, or every:128"),
        ({"trigger": 128}, "trigger", "write prefill, or every:128"),
        ({"sinks": -1}, "sinks", "is -1: it must lie between 0 and"),
        ({"window": 2.5}, "window", "window 2.5 is not a whole number"),
        ({"window": True}, "window", "is not a whole number"),
        ({"drafter": "ngram"}, "drafter", "only lossless requests draft: add kv_cache.lossless, or leave it out"),
        ({"lossless": False, "drafter": "ngram"}, "drafter", "only lossless requests draft"),
        ({"draft_tokens": 4}, "draft_tokens", "is 4, but only lossless requests draft: add kv_cache.lossless"),
        ({"policy": "full", "lossless": True, "drafter": "cache"}, "drafter", "name a policy and a budget, or take"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_field(options: dict[Any, Any], param: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        KVCacheParams.from_dict(options, default=OPERATOR)
    assert caught.value.param == f"kv_cache.{param}"


def test_a_request_changes_what_it_names_and_leaves_the_rest_to_the_operator() -> None:
    assert KVCacheParams.from_dict({}, default=OPERATOR) == OPERATOR
    params = KVCacheParams.from_dict({"budget": "50%"}, default=OPERATOR)
    assert (params.budget, params.policy_options, params.every, params.window) == ("50%", {"kernel": 7}, 128, 64)


def test_another_policy_does_not_get_the_operators_options() -> None:
    params = KVCacheParams.from_dict({"policy": "h2o"}, default=OPERATOR)
    assert params.method.policy == H2O()
    assert params.budget == "25%"
    assert KVCacheParams.from_dict({"policy": "snapkv"}, default=OPERATOR).policy_options == {"kernel": 7}


def test_a_request_may_have_everything_kept() -> None:
    assert KVCacheParams.from_dict({"policy": "full"}, default=OPERATOR).is_full


@pytest.mark.parametrize("drafting", [{}, {"drafter": "ngram"}, {"drafter": "cache", "draft_tokens": 4}], ids=str)
def test_a_request_that_is_not_to_be_lossless_is_the_operators_without_drafting(drafting: dict[str, Any]) -> None:
    lossy = KVCacheParams(policy="snapkv", budget="25%", window=64)
    operator = replace(lossy, lossless=True, **drafting)
    assert KVCacheParams.from_dict({"lossless": False}, operator) == lossy
    assert KVCacheParams.from_dict({"lossless": False, "policy": "full"}, operator).is_full
    with pytest.raises(InvalidRequest, match="but only lossless requests draft"):
        KVCacheParams.from_dict({"lossless": False, "draft_tokens": 2}, operator)


@pytest.mark.parametrize("everything", [{"policy": "full"}, {"budget": "100%"}, {"budget": 1.0}], ids=str)
def test_a_lossless_request_that_has_everything_kept_looks_its_drafts_up(everything: dict[str, Any]) -> None:
    operator = KVCacheParams(policy="snapkv", budget="25%", lossless=True, drafter="cache", draft_tokens=4)
    params = KVCacheParams.from_dict(everything, operator)
    assert params.lossless
    assert params.drafts_by_lookup
    assert params.draft_tokens == 4
    assert KVCacheParams.from_dict({"budget": "50%"}, operator).drafter == "cache"
    with pytest.raises(InvalidRequest, match="is 'cache', but nothing is dropped"):
        KVCacheParams.from_dict(everything | {"drafter": "cache"}, operator)


def test_a_budget_of_just_what_always_stays_is_taken() -> None:
    assert KVCacheParams(policy="knorm", budget=36).method.budget.amount == 36


@dataclass(frozen=True, kw_only=True)
class Greedy:
    """Wants more queries than an engine holds."""

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.QUERIES})
    query_window: int = 4096

    def score(self, view: LayerView) -> Tensor:
        return view.live.float()


def test_more_queries_than_an_engine_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry([EntryPoint("greedy", f"{__name__}:Greedy", GROUP)])
    monkeypatch.setattr("kvikk.compress.config.installed", lambda: registry)
    with pytest.raises(InvalidRequest, match="ask for 4096 queries: an engine holds up to 1024 of a row") as caught:
        KVCacheParams(policy="greedy", budget="50%")
    assert caught.value.param == "kv_cache.policy_options"
    assert KVCacheParams(policy="greedy", policy_options={"query_window": 1024}, budget="50%").method.policy


def test_params_cross_processes_as_they_are() -> None:
    a_token = KVCacheParams(policy="h2o", budget=1, sinks=0, window=0)
    assert not a_token.is_full
    everything = KVCacheParams(policy="h2o", budget=1.0)
    for params in (OPERATOR, a_token, everything, KVCacheParams(policy="h2o", budget=2048)):
        assert params.method
        assert pickle.loads(pickle.dumps(params)) == params
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=KVCacheParams) == params
        assert msgspec.json.decode(msgspec.json.encode(params), type=KVCacheParams).is_full == params.is_full


def test_options_of_the_operators_policy_are_merged_and_those_of_another_one_are_not() -> None:
    operator = KVCacheParams(policy="snapkv", budget="25%", policy_options={"kernel": 7, "query_window": 16})
    same = KVCacheParams.from_dict({"policy_options": {"kernel": 9}}, operator)
    assert same.policy_options == {"kernel": 9, "query_window": 16}
    other = KVCacheParams.from_dict({"policy": "r-kv", "policy_options": {"kernel": 9}}, operator)
    assert other.policy_options == {"kernel": 9}

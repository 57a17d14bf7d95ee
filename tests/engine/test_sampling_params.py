from __future__ import annotations

import re
from dataclasses import fields

import msgspec
import numpy as np
import pytest

from kvikk.engine.sampling_params import SamplingParams, recommended_sampling
from kvikk.errors import InvalidRequest
from kvikk.grammar import StructuredOutputsParams


def test_vllms_ways_to_say_nothing_are_taken() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, seed=-1)
    assert (params.stop_strings, params.stop_tokens, params.seed) == ((), (), None)


def test_numpys_numbers_are_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(5), temperature=np.float32(0.5), top_k=np.int32(3))
    assert (params.max_tokens, params.temperature, params.top_k) == (5, 0.5, 3)
    assert type(params.max_tokens) is int


def test_every_field_survives_the_way_between_processes() -> None:
    params = SamplingParams(
        n=2, best_of=2, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, presence_penalty=-1.5, frequency_penalty=0.5,
        repetition_penalty=1.25, logit_bias={7: -100.0, 2**31: 0.5}, seed=2**64 - 1, max_tokens=9, min_tokens=3,
        stop="end", stop_token_ids={5}, ignore_eos=True, include_stop_str_in_output=True, logprobs=3, prompt_logprobs=0,
        structured_outputs=StructuredOutputsParams(choice=["yes", "no"]), skip_special_tokens=False,
        kv_cache={"policy": "snapkv", "budget": 0.5},
    )  # fmt: skip
    neutral = SamplingParams()
    unchanged = [field.name for field in fields(params) if getattr(params, field.name) == getattr(neutral, field.name)]
    assert unchanged == []
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


def test_what_is_out_of_its_limits_is_refused_on_the_way_in_too() -> None:
    sent = msgspec.msgpack.encode({"temperature": 500.0})
    with pytest.raises(msgspec.ValidationError, match="temperature is 500"):
        msgspec.msgpack.decode(sent, type=SamplingParams)


def test_best_of_as_many_as_n_changes_nothing() -> None:
    assert SamplingParams(n=3, best_of=3).n == 3


def test_what_the_models_authors_recommend_is_taken_by_name() -> None:
    said = {"temperature": 0.6, "min_p": 0.05, "repetition_penalty": 1.1, "do_sample": True, "top_k": None}
    assert SamplingParams(**recommended_sampling(said)) == SamplingParams(
        temperature=0.6, min_p=0.05, repetition_penalty=1.1
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"max_tokens": 2.5}, "max_tokens 2.5 is not a whole number"),
        ({"max_tokens": "9"}, "whole number"),
        ({"temperature": float("nan")}, "temperature is nan: it must be a finite number"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": "hot"}, "temperature is 'hot': it must be a number"),
        ({"top_p": 0.0}, "top_p is 0.0: it must lie above 0 and up to 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_k": -2}, "top_k is -2"),
        ({"n": 0}, "n is 0"),
        ({"n": True}, "n True is not"),
        ({"seed": "x"}, "seed 'x' is not"),
        ({"stop": ["x"] * 1000}, "stop holds 1000 strings, at most 64"),
        ({"stop": [""]}, "0 characters"),
        ({"stop": 5}, "stop is 5"),
        ({"stop": [5]}, "list of strings"),
        ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
        ({"stop_token_ids": "12"}, "list of token ids"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens 9 is above max_tokens 3"),
        ({"logprobs": 1000}, "logprobs is 1000"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21: it must lie between 0 and 20"),
        ({"min_p": 1.5}, "min_p is 1.5: it must lie between 0 and 1"),
        ({"presence_penalty": -2.5}, "presence_penalty is -2.5: it must lie between -2 and 2"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf: it must be a finite number"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0: it must lie between 0.01 and 100"),
        ({"temperature": 10**400}, "it must be a finite number"),
        ({"temperature": np.ones(2)}, "it must be a finite number"),
        ({"logit_bias": [1]}, "logit_bias is [1]: it must map token ids to numbers"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias '5' is not a whole number"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias is -5: token ids are not negative"),
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 is 101.0: it must lie between -100 and 100"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias is nan"),
        ({"logit_bias": dict.fromkeys(range(513), 1.0)}, "logit_bias holds 513 ids, at most 512"),
        ({"best_of": 3}, "best_of is 3 and n is 1: all texts that are written are given back"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs is dict: it must be StructuredOutputsParams"),
        ({"ignore_eos": "yes"}, "true or false"),
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"quux": 1.0}, "unknown sampling option 'quux'"),
    ],
)
def test_wrong_parameters_are_refused_with_their_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)) as refusal:
        SamplingParams.from_dict(options)
    assert refusal.value.param in options

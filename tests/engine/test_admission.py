"""Bad requests, against a simulated engine in which others are running."""

from __future__ import annotations

import pytest

from engine.simulation import VOCABULARY, World
from kvikk.errors import ConfigError, InvalidRequest, PromptTooLong


@pytest.mark.parametrize(
    ("prompt", "options", "error", "message"),
    [
        ([], {}, InvalidRequest, "the prompt is empty"),
        ([1] * 60, {}, PromptTooLong, "the prompt has 60 tokens, at most 59 leave room"),
        ([1] * 5000, {}, PromptTooLong, "5,000 tokens"),
        ([1, VOCABULARY], {}, InvalidRequest, "token id 50 is outside the model's vocabulary: ids lie between"),
        ([-1], {}, InvalidRequest, "token id -1"),
        ([1.5], {}, InvalidRequest, "token id 1.5 is not a whole number"),
        (["a"], {}, InvalidRequest, "token id 'a'"),
        (
            [1],
            {"stop_token_ids": [VOCABULARY], "min_tokens": 2},
            InvalidRequest,
            "stop_token_ids names token 50, which is outside",
        ),
        ([1], {"logit_bias": {VOCABULARY: 1.0}}, InvalidRequest, "logit_bias names token 50, which is outside"),
        ([1], {"n": 9}, InvalidRequest, "n is 9, at most --max-num-seqs 8"),
    ],
)
def test_a_bad_request_is_refused_and_the_others_run_on(
    prompt: list[int], options: dict[str, object], error: type[Exception], message: str
) -> None:
    world = World(40)
    for family in range(3):
        world.add([family] * 20, max_tokens=20, ignore_eos=True)
    world.step()
    with pytest.raises(error, match=message):
        world.add(prompt, **options)
    assert len(world.requests) == 3
    world.drain()
    assert len(world.ends) == 3


def test_a_request_id_in_use_is_refused_and_a_used_one_is_free_again() -> None:
    from kvikk.engine.sampling_params import SamplingParams

    world = World(40)
    params = SamplingParams(max_tokens=1)
    world.engine.add([1], params, request_id="mine")
    with pytest.raises(InvalidRequest, match="'mine' is in use"):
        world.engine.add([1], params, request_id="mine")
    world.step()
    world.engine.add([1], params, request_id="mine")


def test_a_pool_too_small_for_the_longest_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes 15 blocks of 14"):
        World(14, max_len=60)


def test_a_row_whose_logits_are_not_finite_fails_alone() -> None:
    world = World(40)
    world.add([1] * 9, max_tokens=3, ignore_eos=True)
    world.add([2] * 9, max_tokens=3, ignore_eos=True)
    world.runner.nan_next = True
    world.drain()
    assert sorted(str(end) for end in world.ends.values()) == ["error", "length"]

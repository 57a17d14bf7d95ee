from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvikk.engine.noise import gumbel, philox4x32
from kvikk.engine.sampler import SamplingTask, sample
from kvikk.engine.sampling_params import SamplingParams


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value], dtype=torch.int64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known-answer vectors that the authors publish with Random123, philox4x32 with 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, expected) -> None:  # type: ignore[no-untyped-def]
    found = philox4x32(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in found) == expected


def task(seed: int = 1, position: int = 5, choice: int = 0, barred: frozenset[int] = frozenset(), **options: object):  # type: ignore[no-untyped-def]
    return SamplingTask(SamplingParams.from_dict(options), seed, position, choice, barred)


def logits(rows: int, vocabulary: int = 1000, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def ids(tokens: list) -> list[int]:  # type: ignore[type-arg]
    return [token.token_id for token in tokens]


def test_a_task_gets_the_same_token_alone_and_in_any_batch() -> None:
    table = logits(6)
    tasks = [
        task(seed=3), task(seed=3, temperature=0.7, top_p=0.9), task(temperature=0), task(seed=2**64 - 1, top_k=5),
        task(seed=3, position=9), task(seed=3, choice=1),
    ]  # fmt: skip
    together = ids(sample(table, tasks))
    alone = [ids(sample(table[i : i + 1], [t]))[0] for i, t in enumerate(tasks)]
    backwards = ids(sample(table.flip(0), tasks[::-1]))[::-1]
    assert together == alone == backwards


def test_seed_position_and_choice_each_change_the_noise() -> None:
    table = logits(1)
    variants = [task(), task(seed=2), task(position=6), task(choice=1), task(seed=1 + 2**40)]
    keys = [[torch.tensor([number]) for number in (t.seed, t.position, t.choice)] for t in variants]
    noises = {tuple(gumbel(*key, 8)[0].tolist()) for key in keys}
    assert len(noises) == len(variants)
    assert sample(table, [task()]) == sample(table, [task()])


def test_the_noise_is_what_its_definition_says() -> None:
    seed, position, choice = 0x0123456789ABCDEF, 77, 2
    noise = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.tensor([choice]), 10)
    assert noise.dtype == torch.float32
    for token in (0, 1, 6, 9):
        counter = words(token // 4, position, choice, 0)
        word = int(philox4x32(counter, words(seed & 0xFFFFFFFF, seed >> 32))[token % 4])  # type: ignore[arg-type]
        uniform = ((word >> 8) + 0.5) / 2**24
        assert float(noise[0, token]) == pytest.approx(-math.log(-math.log(uniform)), abs=1e-6)
    assert [round(float(value), 5) for value in noise[0, :4]] == [0.08404, 3.67626, -0.293, 2.84769]


def test_vllms_ways_to_say_nothing_are_taken() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, seed=-1)
    assert (params.stop_strings, params.stop_tokens, params.seed) == ((), (), None)


def test_numpys_numbers_are_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(5), temperature=np.float32(0.5), top_k=np.int32(3))
    assert (params.max_tokens, params.temperature, params.top_k) == (5, 0.5, 3)
    assert type(params.max_tokens) is int


def test_samples_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = 20_000
    drawn = torch.tensor(
        ids(sample(probabilities.log().expand(rows, 4), [task(seed=11, position=p) for p in range(rows)]))
    )
    found = torch.bincount(drawn, minlength=4) / rows
    assert torch.allclose(found, probabilities, atol=4 * math.sqrt(0.25 / rows))


def test_greedy_takes_the_likeliest_and_ties_go_to_the_lower_id() -> None:
    table = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert ids(sample(table, [task(temperature=0.0)])) == [1]
    assert ids(sample(table, [task(temperature=1e-6)])) == [1]


def test_top_k_and_top_p_leave_out_all_others() -> None:
    table = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    for options, allowed in [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.3}, {0}),
        ({"top_k": 3, "top_p": 0.99}, {0, 1, 2}),
        ({"top_k": 1}, {0}),
        ({"top_k": -1}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {0}),
    ]:
        rows = 400
        drawn = ids(sample(table.expand(rows, 4), [task(position=p, **options) for p in range(rows)]))
        assert set(drawn) == allowed, options


def test_barred_tokens_never_come() -> None:
    table = torch.tensor([[9.0, 1.0, 0.0]])
    assert ids(sample(table, [task(temperature=0, barred=frozenset({0}))])) == [1]


def test_logprobs_are_of_the_raw_logits_and_hold_the_chosen_token() -> None:
    table = logits(2)
    greedy, sampled = sample(table, [task(temperature=0, logprobs=3), task(temperature=50.0, seed=8, logprobs=2)])
    raw = table.log_softmax(-1)
    assert greedy is not None
    assert greedy.logprobs is not None
    assert [entry.token_id for entry in greedy.logprobs] == raw[0].topk(3).indices.tolist()
    assert [entry.rank for entry in greedy.logprobs] == [1, 2, 3]
    assert sampled is not None
    assert sampled.logprobs is not None
    own = sampled.logprobs[-1]
    assert len(sampled.logprobs) == 3
    assert own.token_id == sampled.token_id
    assert own.logprob == pytest.approx(float(raw[1, own.token_id]), abs=1e-6)
    assert own.rank == int((raw[1] > raw[1, own.token_id]).sum()) + 1


def test_logits_that_are_not_finite_give_no_token_and_harm_no_other_row() -> None:
    table = logits(3)
    table[1] = float("nan")
    found = sample(table, [task(temperature=0)] * 3)
    assert found[1] is None
    assert None not in (found[0], found[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -3}, "max_tokens is -3"),
        ({"max_tokens": 2.5}, "max_tokens 2.5 is not a whole number"),
        ({"max_tokens": "9"}, "whole number"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": "hot"}, "temperature is 'hot': it must be a number"),
        ({"top_p": 0.0}, "top_p is 0.0: it must lie above 0.0 and up to 1.0"),
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
        ({"ignore_eos": "yes"}, "true or false"),
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"quux": 1.0}, "unknown sampling option 'quux'"),
    ],
)
def test_wrong_parameters_are_refused_with_their_value(options: dict[str, object], message: str) -> None:
    from kvikk.errors import InvalidRequest

    with pytest.raises(InvalidRequest, match=message.replace("(", r"\(")):
        SamplingParams.from_dict(options)

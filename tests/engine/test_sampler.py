from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvikk.engine.history import TokenHistory
from kvikk.engine.noise import gumbel, philox4x32
from kvikk.engine.sampler import SamplingTask, leads, sample
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


def held(prompt: list[int], text: list[int]) -> TokenHistory:
    history = TokenHistory(prompt)
    for token in text:
        history.append(token)
    return history


def shaped_task(rng: random.Random, vocabulary: int) -> tuple[SamplingTask, list[int], list[int]]:
    """A task with any of the parameters on, and the prompt and text behind its history."""
    prompt, text = ([rng.randrange(vocabulary) for _ in range(rng.randrange(40))] for _ in range(2))
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 2.0]),
        top_k=rng.choice([0, 3, 20]),
        top_p=rng.choice([0.5, 0.9, 1.0]),
        min_p=rng.choice([0.0, 0.05, 0.5]),
        presence_penalty=rng.choice([-1.5, 0.0, 0.7]),
        frequency_penalty=rng.choice([-0.5, 0.0, 1.5]),
        repetition_penalty=rng.choice([0.5, 1.0, 1.7]),
        logit_bias={rng.randrange(vocabulary): rng.uniform(-9, 9) for _ in range(rng.randrange(5))} or None,
    )
    allowed = None
    if rng.random() < 0.5:
        allowed = np.array([rng.random() < 0.3 for _ in range(vocabulary)])
        allowed[rng.randrange(vocabulary)] = True
    barred = frozenset(rng.sample(range(vocabulary), k=rng.randrange(3)) if allowed is None else ())
    history = held(prompt if params.repetition_penalty != 1 else [], text) if params.has_penalties else None
    task = SamplingTask(params, rng.getrandbits(64), rng.randrange(500), rng.randrange(3), barred, history, allowed)
    return task, prompt, text


def reference_token(row: torch.Tensor, task: SamplingTask, prompt: list[int], text: list[int]) -> int:
    """One task in the order that the design gives, over the whole vocabulary, with nothing kept between steps."""
    params, values = task.params, row.float().clone()
    for token in range(len(values)):
        if task.allowed is not None and not task.allowed[token]:
            values[token] = -math.inf
        values[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in task.barred:
            values[token] = -math.inf
        if token in prompt or token in text:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= params.frequency_penalty * text.count(token)
        values[token] -= params.presence_penalty * (token in text)
    if params.is_greedy:
        return int(values.argmax())
    values = values / params.temperature
    probabilities = values.softmax(-1)
    values[probabilities < params.min_p * probabilities.max()] = -math.inf
    if params.top_k:
        values[values < values.sort(descending=True).values[params.top_k - 1]] = -math.inf
    ordered = values.softmax(-1).sort(descending=True)
    before = ordered.values.cumsum(-1) - ordered.values
    values[ordered.indices[before >= params.top_p]] = -math.inf
    seed = task.seed - 2**64 if task.seed >= 2**63 else task.seed
    keys = [torch.tensor([number]) for number in (seed, task.position, task.choice)]
    return int((values + gumbel(*keys, len(values))[0]).argmax())


def test_all_parameters_together_give_the_token_that_their_definition_gives_alone_and_in_a_batch() -> None:
    rng, vocabulary = random.Random(4), 60
    table = logits(150, vocabulary)
    made = [shaped_task(rng, vocabulary) for _ in range(150)]
    expected = [reference_token(row, *one) for row, one in zip(table, made, strict=True)]
    tasks = [task for task, _, _ in made]
    assert ids(sample(table, tasks)) == expected
    assert [ids(sample(table[i : i + 1], [task]))[0] for i, task in enumerate(tasks)] == expected
    plain = table.argmax(-1).tolist()
    assert sum(a != b for a, b in zip(plain, expected, strict=True)) > 100


def test_penalties_and_min_p_are_those_of_transformers() -> None:
    from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

    rows, vocabulary = 200, 50
    table, rng = logits(rows, vocabulary, seed=3), random.Random(3)
    prompt = [rng.randrange(vocabulary) for _ in range(40)]
    greedy = [replace(task(temperature=0, repetition_penalty=1.8), history=held(prompt[:20], prompt[20:]))] * rows
    theirs = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([prompt] * rows), table.clone()).argmax(-1).tolist()
    assert ids(sample(table, greedy)) == theirs != table.argmax(-1).tolist()

    positions = [torch.tensor([number] * rows) for number in (1, 0)]
    noise = gumbel(positions[0], torch.arange(rows), positions[1], vocabulary)
    kept = MinPLogitsWarper(0.3)(torch.empty(rows, 0), table.clone())
    assert ids(sample(table, [task(position=p, min_p=0.3) for p in range(rows)])) == (kept + noise).argmax(-1).tolist()


def test_a_history_kept_token_by_token_is_the_one_counted_at_once_and_its_copies_go_their_own_ways() -> None:
    rng = random.Random(1)
    prompt, text = ([rng.randrange(9) for _ in range(12)] for _ in range(2))
    history = held(prompt, text[:6])
    other = history.copy()
    for token in text[6:]:
        history.append(token)
    other.append(8)
    assert dict(zip(history.tokens, history.counts, strict=True)) == dict.fromkeys(prompt, 0) | Counter(text)
    assert dict(zip(other.tokens, other.counts, strict=True)) == dict.fromkeys(prompt, 0) | Counter([*text[:6], 8])


def test_a_grammar_that_allows_nothing_gives_no_token_and_harms_no_other_row() -> None:
    table = logits(3)
    stuck = replace(task(temperature=0), allowed=np.zeros(1000, dtype=np.bool_))
    found = sample(table, [task(temperature=0), stuck, replace(stuck, params=SamplingParams())])
    assert (found[0].token_id, found[1], found[2]) == (int(table[0].argmax()), None, None)  # type: ignore[union-attr]


def test_a_mask_does_not_hide_logits_that_are_not_finite() -> None:
    table = logits(1)
    table[0, 7] = float("nan")
    allowed = np.ones(1000, dtype=np.bool_)
    allowed[7] = False
    assert sample(table, [replace(task(temperature=0), allowed=allowed)]) == [None]


def test_greedy_rows_cost_neither_a_copy_nor_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", lambda _: pytest.fail("copied to fp32"))
    table = logits(4).to(torch.bfloat16)
    assert ids(sample(table, [task(temperature=0)] * 4)) == table.argmax(-1).tolist()


def test_logprobs_are_raw_whatever_shapes_the_choice() -> None:
    table = logits(1)
    allowed = np.zeros(1000, dtype=np.bool_)
    allowed[[3, 4]] = True
    shaped = task(temperature=0, logprobs=2, logit_bias={4: 50.0}, presence_penalty=1.0)
    (found,) = sample(table, [replace(shaped, allowed=allowed, history=held([], [3]))])
    raw = table[0].log_softmax(-1)
    assert found is not None
    assert found.logprobs is not None
    assert [entry.token_id for entry in found.logprobs] == [*raw.topk(2).indices.tolist(), 4]
    assert found.logprobs[-1].logprob == pytest.approx(float(raw[4]))
    assert found.logprobs[-1].rank == int((raw > raw[4]).sum()) + 1


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lead_is_how_far_the_largest_logit_is_above_the_next_and_0_where_two_are_equal(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 4.0, -2.0, 3.5], [2.0, 2.0, 1.0, 0.0], [-8.0, -9.0, -8.5, -16.0]], dtype=dtype)
    assert leads(logits).tolist() == [0.5, 0.0, 0.5]
    assert leads(logits).dtype == torch.float32

"""The device's sampler gives the tokens of `engine.sampler`, row by row."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kvikk.engine.gpu.sampling import BLOCK, DeviceSampling, SampledOnDevice, sample_on_device
from kvikk.engine.sampler import SamplingTask, leads, sample
from kvikk.engine.sampling_params import SamplingParams

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def task(seed: int = 1, position: int = 5, choice: int = 0, **options: Any) -> SamplingTask:
    return SamplingTask(SamplingParams.from_dict(options), seed, position, choice)


def random_task(rng: random.Random) -> SamplingTask:
    return task(
        seed=rng.getrandbits(64),
        position=rng.randrange(100_000),
        choice=rng.randrange(3),
        temperature=rng.choice([0.0, 1e-5, 0.5, 1.0, 1.5, 2.0, 4.0]),
        top_k=rng.choice([-1, 0, 0, 1, 5, 40, 100, 10_000]),
        top_p=rng.choice([1e-9, 0.5, 0.9, 0.95, 0.99, 1.0, 1.0]),
        min_p=rng.choice([0.0, 0.0, 0.0, 0.001, 0.05, 1.0]),
    )


def logits(rows: int, vocabulary: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


def on_device(table: Tensor, tasks: list[SamplingTask], device: torch.device) -> list[int | None]:
    """Sample with seats in another order than rows, and outputs that hold rubbish before."""
    rows = len(tasks)
    order = random.Random(rows).sample(range(rows + 2), rows)
    seated = [tasks[order.index(seat)] if seat in order else task() for seat in range(rows + 2)]

    def column(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    params = DeviceSampling(
        temperature=column([t.params.temperature for t in seated], torch.float32),
        top_k=column([t.params.top_k for t in seated], torch.int32),
        top_p=column([t.params.top_p for t in seated], torch.float32),
        min_p=column([t.params.min_p for t in seated], torch.float32),
        seed=column([signed(t.seed) for t in seated], torch.int64),
        choice=column([t.choice for t in seated], torch.int32),
        seats=column(order, torch.int32),
        positions=column([t.position for t in tasks], torch.int64),
    )
    out = SampledOnDevice(
        tokens=column([-7] * rows, torch.int64),
        is_bad=column([-7] * rows, torch.int32),
        leads=column([-7.0] * rows, torch.float32),
    )
    sample_on_device(table.to(device), params, out)
    is_finite = table.isfinite().all(-1)
    assert torch.equal(out.leads.cpu()[is_finite], leads(table)[is_finite])
    found = zip(out.tokens.tolist(), out.is_bad.tolist(), strict=True)
    return [{0: token, 1: None}[is_bad] for token, is_bad in found]


def on_host(table: Tensor, tasks: list[SamplingTask]) -> list[int | None]:
    return [None if token is None else token.token_id for token in sample(table, tasks)]


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (1, torch.float32), (300, torch.float16), (300, torch.bfloat16), (2001, torch.float32), (2001, torch.bfloat16),
    ],
)  # fmt: skip
def test_every_mix_of_parameters_gives_the_samplers_tokens(
    vocabulary: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    rng = random.Random(vocabulary)
    tasks = [random_task(rng) for _ in range(25)]
    table = logits(25, vocabulary).to(dtype)
    expected = on_host(table, tasks)
    assert on_device(table, tasks, kernel_device) == expected
    greedy = table.float().argmax(-1).tolist()
    assert vocabulary == 1 or sum(a != b for a, b in zip(greedy, expected, strict=True)) > 5


def test_a_vocabulary_of_several_parts_is_one_row(kernel_device: torch.device) -> None:
    rng, vocabulary = random.Random(5), 2 * BLOCK + 1000
    tasks = [random_task(rng) for _ in range(12)] + [task(temperature=1.5), task(temperature=0)]
    table = logits(14, vocabulary, scale=1).bfloat16()
    table[13, -1] = 100
    expected = on_host(table, tasks)
    assert on_device(table, tasks, kernel_device) == expected
    assert {(token or 0) // BLOCK for token in expected} == {0, 1, 2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_at_every_border_are_settled_as_the_sampler_does(dtype: torch.dtype, kernel_device: torch.device) -> None:
    rng, rows = random.Random(9), 25
    table = torch.round(logits(rows, 300, seed=4)).to(dtype)  # some ten values in all
    tasks = [
        task(position=row, top_k=rng.choice([0, 3, 50]), top_p=rng.choice([0.2, 0.53, 0.87, 1.0]))
        for row in range(rows)
    ]
    expected = on_host(table, tasks)
    assert on_device(table, tasks, kernel_device) == expected
    assert len({table[row, token].item() for row, token in enumerate(expected) if token is not None}) > 3


def test_top_p_keeps_the_last_of_equals_just_as_many_as_it_needs(kernel_device: torch.device) -> None:
    rows = 24
    table = torch.zeros(rows, 10)
    tasks = [task(position=position, top_p=0.25) for position in range(rows)]
    drawn = on_device(table, tasks, kernel_device)
    assert set(drawn) == {7, 8, 9}
    assert drawn == on_host(table, tasks)


def test_the_first_of_equal_logits_is_the_greedy_token(kernel_device: torch.device) -> None:
    table = torch.full((3, 2 * BLOCK), -1.0)
    table[0, [77, 78, BLOCK + 5]] = 2.0
    table[1, [BLOCK + 3, BLOCK + 9]] = 2.0
    assert on_device(table, [task(temperature=0)] * 3, kernel_device) == [77, BLOCK + 3, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_finite_largest_logit_has_no_token_and_harms_no_other(
    temperature: float, kernel_device: torch.device
) -> None:
    table = logits(6, 500)
    table[0, 3] = float("nan")
    table[1] = float("nan")
    table[2, 4] = float("inf")
    table[3] = float("-inf")
    table[4, 10:] = float("-inf")
    tasks = [task(position=row, temperature=temperature, top_k=20, top_p=0.9, min_p=0.01) for row in range(6)]
    expected = on_host(table, tasks)
    assert expected[:4] == [None] * 4
    assert None not in expected[4:]
    assert on_device(table, tasks, kernel_device) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_logits_and_zeros_of_both_signs_have_borders_too(
    dtype: torch.dtype, kernel_device: torch.device
) -> None:
    rows = torch.tensor([[-3.3, -2.5, -2.1, -9.0], [0.0, -0.0, -1.0, -0.0], [-0.0, 0.0, 1.0, 2.0]])
    table = rows.repeat(10, 1).to(dtype)
    tasks = [task(position=row, top_k=2, top_p=[0.8, 1.0][row % 2]) for row in range(30)]
    expected = on_host(table, tasks)
    assert on_device(table, tasks, kernel_device) == expected
    assert {token for row, token in enumerate(expected) if row % 3 == 0} == {1, 2}


def test_a_row_gets_the_same_token_alone_and_among_others(kernel_device: torch.device) -> None:
    rng = random.Random(1)
    tasks = [random_task(rng) for _ in range(8)]
    table = logits(8, 700).bfloat16()
    together = on_device(table, tasks, kernel_device)
    assert [on_device(table[row : row + 1], tasks[row : row + 1], kernel_device)[0] for row in range(8)] == together


def test_logits_may_be_rows_of_a_wider_buffer(kernel_device: torch.device) -> None:
    table = logits(3, 400)
    tasks = [task(position=row, top_p=0.9) for row in range(3)]
    assert on_device(table[:, :300], tasks, kernel_device) == on_host(table[:, :300], tasks)


def test_a_captured_graph_samples_by_the_parameters_of_its_replay(kernel_device: torch.device) -> None:
    if kernel_device.type != "cuda":
        pytest.skip("graphs need a GPU")
    table, rows = logits(4, 1000).to(kernel_device), 4
    zeros = torch.zeros(rows, device=kernel_device)
    params = DeviceSampling(
        temperature=zeros.clone(), top_k=zeros.int(), top_p=zeros + 0.9, min_p=zeros.clone(), seed=zeros.long(),
        choice=zeros.int(), seats=torch.arange(rows, dtype=torch.int32, device=kernel_device), positions=zeros.long(),
    )  # fmt: skip
    out = SampledOnDevice(tokens=zeros.long(), is_bad=zeros.int(), leads=zeros.float())
    sample_on_device(table, params, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_on_device(table, params, out)
    graph.replay()
    assert out.tokens.tolist() == table.argmax(-1).tolist()
    params.temperature.fill_(1.3)
    params.positions.fill_(8)
    graph.replay()
    tasks = [task(seed=0, position=8, temperature=1.3, top_p=0.9)] * rows
    assert out.tokens.tolist() == on_host(table.cpu(), tasks)


def test_parameters_that_do_not_fit_are_refused(kernel_device: torch.device) -> None:
    zeros = torch.zeros(2, device=kernel_device)
    params = DeviceSampling(
        temperature=zeros, top_k=zeros.int(), top_p=zeros, min_p=zeros, seed=zeros.long(), choice=zeros.int(),
        seats=zeros.int(), positions=zeros.long(),
    )  # fmt: skip
    out = SampledOnDevice(tokens=zeros.long(), is_bad=zeros.int(), leads=zeros.float())
    with pytest.raises(ValueError, match=r"seats is torch.int32 \(2,\)"):
        sample_on_device(torch.zeros(3, 9, device=kernel_device), params, out)
    with pytest.raises(ValueError, match=r"logits are torch.int64"):
        sample_on_device(torch.zeros(2, 9, dtype=torch.int64, device=kernel_device), params, out)

"""Which tokens are told as the likeliest, in which order: a matter of a row's logits alone, ties included."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvikk.engine import Logprob
from kvikk.engine.logprobs import token_logprobs

VOCABULARY = 4000
FEW = [-3.0, -0.5, -0.0, 0.0, 1.0, 1.0078125]
"""Values that tie all the time; the two zeros are equal, and the last two next to each other in bf16."""


def tied(rows: int, seed: int = 0) -> Tensor:
    """`[rows, VOCABULARY]` bf16: each value some 20 times, also the largest."""
    values = torch.randint(-100, 100, (rows, VOCABULARY), generator=torch.Generator().manual_seed(seed))
    return (values / 8).bfloat16()


def alone(row: Tensor, token: int, count: int) -> tuple[Logprob, ...]:
    (found,) = token_logprobs(row[None], [token], [count])
    return found


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(FEW), min_size=1, max_size=12), st.integers(0, 14), st.integers(0))
def test_of_equal_logits_the_lower_id_is_the_likelier_and_each_token_has_its_place(
    values: list[float], count: int, number: int
) -> None:
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    token = number % len(values)
    found = alone(torch.tensor(values), token, count)
    told = order[:count] + ([token] if token not in order[:count] else [])
    assert [entry.token_id for entry in found] == told
    assert [entry.rank for entry in found] == [order.index(token) + 1 for token in told]
    assert [entry.logprob for entry in found] == torch.tensor(values).log_softmax(-1)[told].tolist()


def test_a_greedy_choice_is_the_first_that_is_told() -> None:
    table = tied(8)
    chosen = table.max(dim=-1).indices.tolist()
    for token, entries in zip(chosen, token_logprobs(table, chosen, [1] * 8), strict=True):
        assert [(entry.token_id, entry.rank) for entry in entries] == [(token, 1)]


def test_what_is_told_of_a_row_hangs_neither_on_the_rows_nor_on_the_counts_beside_it() -> None:
    table = tied(32)
    chosen, counts = list(range(0, 320, 10)), [1 + 7 * row % 20 for row in range(32)]
    expected = [alone(*each) for each in zip(table, chosen, counts, strict=True)]
    assert any(entry.logprob == after.logprob for told in expected for entry, after in pairwise(told))
    assert token_logprobs(table, chosen, counts) == expected
    assert token_logprobs(table[5:8], chosen[5:8], counts[5:8]) == expected[5:8]
    assert token_logprobs(table[[3, 9]], [30, 90], [counts[3], 20])[0] == expected[3]


def test_fewer_likeliest_are_the_first_of_more() -> None:
    (row,) = tied(1)
    most = alone(row, 0, 20)[:20]
    for count in range(20):
        assert alone(row, 0, count)[:count] == most[:count]


def test_where_all_tokens_tie_the_first_ones_are_told() -> None:
    for value in (0.0, -7.5):
        found = alone(torch.full((VOCABULARY,), value), 3999, 3)
        assert [(entry.token_id, entry.rank) for entry in found] == [(0, 1), (1, 2), (2, 3), (3999, 4000)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_tells_the_same_tokens_in_the_same_order_with_the_same_ranks() -> None:
    table, chosen, counts = tied(32), list(range(32)), [20] * 32
    ours, theirs = (token_logprobs(table.to(device), chosen, counts) for device in ("cpu", "cuda"))
    for on_cpu, on_gpu in zip(ours, theirs, strict=True):
        assert [(entry.token_id, entry.rank) for entry in on_gpu] == [(entry.token_id, entry.rank) for entry in on_cpu]
        assert [entry.logprob for entry in on_gpu] == pytest.approx([entry.logprob for entry in on_cpu], abs=1e-5)
    assert token_logprobs(table[:1].cuda(), chosen[:1], [7])[0][:7] == theirs[0][:7]

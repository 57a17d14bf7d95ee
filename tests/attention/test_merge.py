"""Merging attention over disjoint slots."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvikk.attention import attend_dense, merge_states

NOTHING = float("-inf")


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(0, 30), max_size=4), seed=st.integers(0, 99))
def test_parts_merge_into_attention_over_all_slots(cuts: list[int], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(*size, generator=random) for size in ((1, 6, 16), (2, 30, 16), (2, 30, 16)))
    whole, whole_lse = attend_dense(q, k, v, start=29, scale=0.25)
    outs, lses = [], []
    edges = [0, *sorted(cuts), 30]
    for first, stop in itertools.pairwise(edges):
        bias = torch.full((2, 30), NOTHING)
        bias[:, first:stop] = 0.0
        out, lse = attend_dense(q, k, v, start=29, scale=0.25, bias=bias)
        outs.append(out)
        lses.append(lse)
    merged, lse = merge_states(outs, lses)
    assert torch.allclose(merged, whole, atol=1e-6)
    assert torch.allclose(lse, whole_lse, atol=1e-5)


def test_empty_parts_merge_into_an_empty_part_and_never_into_nan() -> None:
    empty, nothing = torch.zeros(3, 4, 8), torch.full((3, 4), NOTHING)
    out, lse = merge_states([empty, empty], [nothing, nothing])
    assert torch.equal(out, empty)
    assert torch.equal(lse, nothing)


def test_an_empty_part_changes_nothing() -> None:
    part, lse = torch.randn(3, 4, 8), torch.randn(3, 4)
    out, merged = merge_states([torch.zeros(3, 4, 8), part], [torch.full((3, 4), NOTHING), lse])
    assert torch.equal(out, part)
    assert torch.equal(merged, lse)


def test_logits_that_would_overflow_fp32_merge_to_finite_numbers() -> None:
    out, lse = merge_states(
        [torch.ones(1, 1, 2), torch.ones(1, 1, 2)], [torch.tensor([[500.0]]), torch.tensor([[499.0]])]
    )
    assert torch.allclose(out, torch.ones(1, 1, 2))
    assert lse.isfinite().all()

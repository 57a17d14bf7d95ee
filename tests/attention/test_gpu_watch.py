"""Queries that are kept beside a step, against the twin."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvikk.attention.gpu import twins
from kvikk.attention.gpu.watch import keep_queries


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_heads", "head_dim"), [(1, 64), (9, 64), (3, 80), (12, 128)])
def test_queries_that_have_a_place_are_copied_to_it_and_nothing_else_changes(
    q_heads: int, head_dim: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(q_heads)
    q = torch.randn(7, q_heads, head_dim, generator=generator).to(device=kernel_device, dtype=dtype)
    places = torch.tensor([3, -1, 0, -1, 9, 5, -1], dtype=torch.int32, device=kernel_device)
    target = torch.full((11, q_heads, head_dim), float("nan"), dtype=dtype, device=kernel_device)
    expected = target.clone()
    keep_queries(q, places, target)
    twins.keep_queries(q, places, expected)
    assert torch.equal(target.nan_to_num(7.5), expected.nan_to_num(7.5))
    assert torch.equal(target[9], q[4])


def test_a_buffer_of_another_shape_is_refused(kernel_device: torch.device) -> None:
    q = torch.zeros(2, 4, 64, device=kernel_device)
    with pytest.raises(ValueError, match="do not fit a buffer"):
        keep_queries(q, torch.zeros(2, dtype=torch.int32, device=kernel_device), torch.zeros(5, 3, 64))

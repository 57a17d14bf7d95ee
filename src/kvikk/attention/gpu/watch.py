"""Keeps the queries of some of a step's tokens, for policies that will look at them: in graphs too."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from kvikk.models.gpu.launch import overlapping, wait_for_inputs

NUMBERS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class QueryWatch:
    """Where queries are kept.

    Args:
        buffer: `[layers, places, q_heads, head_dim]`, in the dtype of the queries.
        places: `[tokens]` int32, where each token of the step goes; -1: nowhere.
        scales: of each layer's attention, as the last step had them.
    """

    buffer: Tensor
    places: Tensor
    scales: list[float]


def keep_queries(q: Tensor, places: Tensor, target: Tensor) -> None:
    """Copy the queries that have a place.

    Args:
        q: `[tokens, q_heads, head_dim]`, contiguous.
        places: `[tokens]` int32; -1: not kept. No place twice.
        target: `[places, q_heads, head_dim]`, contiguous: one layer of the buffer.
    """
    tokens, q_heads, head_dim = q.shape
    if target.shape[1:] != (q_heads, head_dim) or not q.is_contiguous() or not target.is_contiguous():
        raise ValueError(f"queries {tuple(q.shape)} do not fit a buffer of {tuple(target.shape)}, or lie scattered")
    _keep[(tokens,)](
        q, places, target, NUMBERS=q_heads * head_dim, BLOCK=NUMBERS_AT_ONCE, num_warps=4, **overlapping(q.device)
    )


@triton.jit
def _keep(q, places, target, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    token = tl.program_id(0)
    place = tl.load(places + token).to(tl.int64)
    wait_for_inputs(OVERLAP)
    if place >= 0:
        for start in range(0, NUMBERS, BLOCK):
            number = start + tl.arange(0, BLOCK)
            mask = number < NUMBERS
            numbers = tl.load(q + token.to(tl.int64) * NUMBERS + number, mask=mask)
            tl.store(target + place * NUMBERS + number, numbers, mask=mask)

"""One route over one placed case: planned, checked against the reference, captured and timed."""

from __future__ import annotations

import time
from typing import Final

import torch
from torch import Tensor

from kvikk.bench.attention_shape import AttentionShape
from kvikk.bench.contenders import MOST_ERROR, Contender, Contenders, Row
from kvikk.bench.decode_cases import Case, Placed
from kvikk.bench.device import capture, timed_us

PLANS: Final = 3
"""Plans that are timed: the first may compile."""


def queries(case: Case, shape: AttentionShape, device: torch.device) -> Tensor:
    """Random queries of a case, `[rows, q_heads, head_dim]`."""
    generator = torch.Generator(device).manual_seed(case.seed)
    return torch.randn(case.rows, shape.q_heads, shape.head_dim, dtype=shape.dtype, device=device, generator=generator)


def measured(contenders: Contenders, name: str, placed: Placed, q: Tensor, *, fixed: bool = False) -> Row:
    """Time of a layer and of a plan in microseconds, or why the output is not to be trusted.

    Args:
        contenders: makes the route.
        name: of the route.
        placed: the case.
        q: its queries.
        fixed: as of `Contenders.make`.

    Raises:
        CannotServe: the route is not made for the case.
    """
    contender = contenders.make(name, placed, fixed=fixed)
    scale = q.shape[-1] ** -0.5
    out = torch.empty_like(q)
    plan_us = min(_plan_us(contender) for _ in range(PLANS))
    error = contender.error(q, scale=scale)
    if error > MOST_ERROR:
        return {"error": error, "failure": f"the output is off by {error:.3g} of its length, allowed is {MOST_ERROR}"}
    if contender.plans_on_device:
        plan_us = timed_us(capture(contender.plan).replay)

    def layers() -> None:
        contender.attend_all(q, out, scale=scale)

    layers()  # whatever is compiled for a layer is compiled here, not while capturing
    graph = capture(layers)
    return {
        "time_us": timed_us(graph.replay) / placed.store.geometry.layers,
        "plan_us": plan_us,
        "error": error,
        "is_apart": contender.is_apart,
    }


def _plan_us(contender: Contender) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    contender.plan()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6

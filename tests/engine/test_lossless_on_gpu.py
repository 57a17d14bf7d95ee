"""The runner of a GPU drafts and verifies: its texts are those of the plain runner without drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from engine.test_gpu_runner import KINDS, VOCABULARY, Job, Ran, few_runs, run
from kvikk.engine.gpu.runner import GpuRunner

__all__ = ["few_runs"]

SMALL: dict[str, Any] = {"budget": 0.8, "sinks": 2, "window": 16, "lossless": True, "draft_tokens": 3}
METHODS: list[dict[str, Any] | None] = [
    SMALL | {"policy": "snapkv", "trigger": "every:4"},
    {"lossless": True, "drafter": "ngram", "draft_tokens": 3},
    SMALL | {"policy": "knorm"},
    None,
    SMALL | {"policy": "h2o", "draft_tokens": None, "allocator": "pooled"},
    SMALL | {"policy": "streaming", "draft_tokens": 12},
]
LOOPS: dict[str, Any] = {"frequency_penalty": -2.0}


def jobs_of(count: int, max_tokens: int) -> list[tuple[Job, Job]]:
    """Of every kind, as they are without drafts and with them."""
    rng, jobs = random.Random(8), []
    for index in range(count):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.choice([34, 40, 50]))]
        method = METHODS[index % len(METHODS)]
        options = KINDS[index % len(KINDS)] | {"max_tokens": max_tokens, "seed": index}
        if method is not None and method.get("drafter") == "ngram":
            options |= LOOPS
        jobs.append(((prompt, options), (prompt, options | {"kv_cache": method})))
    return jobs


def accepted(ran: Ran) -> int:
    return ran.engine.scheduler.rounds.counters.accepted


@pytest.mark.usefixtures("few_runs")
def test_drafts_change_no_text(kernel_device: torch.device) -> None:
    """Few rows and tokens: where programs are interpreted a verification takes seconds."""
    jobs = jobs_of(2, max_tokens=9)
    plain = run("plain", [without for without, _ in jobs], kernel_device, passes=1)
    ours = run("eager", [drafting for _, drafting in jobs], kernel_device, passes=1, watch_window=64)
    assert ours.texts == plain.texts
    assert accepted(ours) > 3
    assert isinstance(ours.runner, GpuRunner)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("preempt_every", [0, 9])
def test_captured_graphs_draft_and_verify_and_change_no_text(preempt_every: int) -> None:
    device = torch.device("cuda")
    jobs = jobs_of(40, max_tokens=40)
    plain = run("plain", [without for without, _ in jobs], device, blocks=500)
    ours = run(
        "graph", [drafting for _, drafting in jobs], device, blocks=500, watch_window=64, preempt_every=preempt_every
    )
    assert ours.texts == plain.texts
    assert accepted(ours) > 100
    assert isinstance(ours.runner, GpuRunner)
    assert any(shape.ragged for shape in ours.runner._captured)

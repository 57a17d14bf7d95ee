"""Computes steps with a real model: one flattened batch, its attention plan, its samples."""

from __future__ import annotations

import torch

from kvikk.attention import AttentionBackend
from kvikk.engine.sampler import SampledToken, SamplingTask, sample
from kvikk.engine.scheduler import ScheduledRow, StepPlan
from kvikk.memory import KVStore
from kvikk.models import CausalLM


class ModelRunner:
    """Turns a plan into tensors, runs the model over the paged KV and samples.

    Args:
        model: on the store's device.
        store: the pool's bytes.
        backend: attention over that store.
    """

    def __init__(self, model: CausalLM, store: KVStore, backend: AttentionBackend) -> None:
        self.model = model
        self.store = store
        self.backend = backend

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> list[list[SampledToken]]:
        """See `engine.core.Runner`."""
        self.store.copy_blocks(plan.copies)
        runs = [run for scheduled in plan.rows for run in scheduled.runs]
        token_ids: list[int] = []
        positions: list[int] = []
        logits_at: list[int] = []
        for scheduled in plan.rows:
            for run in scheduled.runs:
                token_ids.extend(scheduled.row.tokens[run.start : run.stop])
                positions.extend(range(run.start, run.stop))
            if scheduled.samples:
                logits_at.append(len(token_ids) - 1)
        device = self.store.device
        logits = self.model.forward(
            torch.tensor(token_ids, device=device),
            torch.tensor(positions, device=device),
            self.backend.begin(self.backend.plan(runs)),
            torch.tensor(logits_at, dtype=torch.int64, device=device),
        )
        return self._sample(plan.rows, logits)

    def _sample(self, rows: list[ScheduledRow], logits: torch.Tensor) -> list[list[SampledToken]]:
        sampling = [scheduled for scheduled in rows if scheduled.samples]
        tasks = [task for scheduled in sampling for task in _tasks(scheduled)]
        if len(tasks) != len(sampling):  # a prompt that forks: its choices share one row of logits
            repeats = torch.tensor([scheduled.samples for scheduled in sampling], device=logits.device)
            logits = logits.repeat_interleave(repeats, dim=0)
        tokens = iter(sample(logits, tasks) if tasks else [])
        results = []
        for scheduled in rows:
            drawn = [next(tokens) for _ in range(scheduled.samples)]
            results.append([token for token in drawn if token is not None] if None not in drawn else [])
        return results


def _tasks(scheduled: ScheduledRow) -> list[SamplingTask]:
    """One task for each token that a row samples in this step."""
    row, request = scheduled.row, scheduled.row.request
    generated = len(row.tokens) - len(request.prompt_token_ids)
    barred = request.stop_ids if generated < request.params.min_tokens else frozenset()
    return [
        SamplingTask(request.params, request.seed, len(row.tokens), row.choice + i, barred)
        for i in range(scheduled.samples)
    ]

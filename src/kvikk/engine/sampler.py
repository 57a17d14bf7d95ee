"""From logits to tokens, in vLLM's order: barred tokens, temperature, top-k, top-p, noise, argmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvikk.engine.noise import gumbel
from kvikk.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability, before temperature, and its rank (1 = likeliest)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and, when asked for, the log-probabilities of the likeliest tokens and of itself, where it is not one."""

    token_id: int
    logprobs: tuple[Logprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class SamplingTask:
    """One token to sample.

    Args:
        params: the request's.
        seed: 64 bits.
        position: of the token to be, in its sequence.
        choice: which of the request's texts.
        barred: token ids that must not come (end tokens before `min_tokens`).
    """

    params: SamplingParams
    seed: int
    position: int
    choice: int
    barred: frozenset[int]


def sample(logits: Tensor, tasks: Sequence[SamplingTask]) -> list[SampledToken | None]:
    """Sample one token for each task.

    A task's token depends on its own logits and its own seed only: the noise is a function of (seed, choice, position,
    token).

    Args:
        logits: `[tasks, vocabulary]`.
        tasks: one for each row of the logits.

    Returns:
        One token for each task; None where no logit is finite or any is NaN.
    """
    random = [row for row, task in enumerate(tasks) if not task.params.is_greedy]
    shaped = logits  # greedy rows need neither a copy nor fp32
    if random or any(task.barred for task in tasks):
        shaped = logits.to(torch.float32, copy=True)
        for row, task in enumerate(tasks):
            shaped[row, list(task.barred)] = float("-inf")
    if random:
        shaped[random] = _noisy(shaped[random], [tasks[row] for row in random])
    best = shaped.max(dim=-1)  # NaN wins, the first of equals wins
    logprobs = _logprobs(logits, best.indices, tasks)
    return [
        SampledToken(token, found) if math.isfinite(value) else None
        for token, found, value in zip(best.indices.tolist(), logprobs, best.values.tolist(), strict=True)
    ]


def _noisy(logits: Tensor, tasks: Sequence[SamplingTask]) -> Tensor:
    """Logits whose argmax is a sample: `[tasks, vocabulary]` fp32."""
    device = logits.device
    temperature = torch.tensor([task.params.temperature for task in tasks], device=device)
    logits = _keep_likeliest(logits / temperature[:, None], tasks)
    seeds = torch.tensor([_signed(task.seed) for task in tasks], dtype=torch.int64, device=device)
    positions = torch.tensor([task.position for task in tasks], dtype=torch.int64, device=device)
    choices = torch.tensor([task.choice for task in tasks], dtype=torch.int64, device=device)
    return logits + gumbel(seeds, positions, choices, logits.shape[-1])


def _keep_likeliest(logits: Tensor, tasks: Sequence[SamplingTask]) -> Tensor:
    """Mask what top-k and top-p leave out; ties at top-k's border stay, the likeliest token always stays."""
    vocabulary = logits.shape[-1]
    top_k = [task.params.top_k if 0 < task.params.top_k < vocabulary else vocabulary for task in tasks]
    top_p = [task.params.top_p for task in tasks]
    if min(top_k) == vocabulary and min(top_p) >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, stable=True)
    k = torch.tensor(top_k, device=logits.device)
    border = ordered.gather(-1, (vocabulary - k)[:, None])
    ordered = ordered.masked_fill(ordered < border, float("-inf"))
    if min(top_p) < 1:
        p = torch.tensor(top_p, device=logits.device)
        below = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - p[:, None]
        below[:, -1] = False
        ordered = ordered.masked_fill(below & (p < 1)[:, None], float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def _logprobs(logits: Tensor, chosen: Tensor, tasks: Sequence[SamplingTask]) -> list[tuple[Logprob, ...] | None]:
    """For each task that asks, the likeliest tokens and the chosen one."""
    wanted = [row for row, task in enumerate(tasks) if task.params.logprobs is not None]
    results: list[tuple[Logprob, ...] | None] = [None] * len(tasks)
    for row in wanted:
        count = min(tasks[row].params.logprobs or 0, logits.shape[-1])
        values = logits[row].float().log_softmax(dim=-1)
        own = values[chosen[row]]
        own_id, own_rank = int(chosen[row]), int((values > own).sum()) + 1
        top = values.topk(count)
        found = [
            Logprob(int(token), float(value), rank)
            for rank, (token, value) in enumerate(zip(top.indices.tolist(), top.values.tolist(), strict=True), 1)
        ]
        if own_id not in {entry.token_id for entry in found}:
            found.append(Logprob(own_id, float(own), own_rank))
        results[row] = tuple(found)
    return results


def _signed(seed: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return seed - 2**64 if seed >= 2**63 else seed

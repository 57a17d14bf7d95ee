"""From logits to tokens, in vLLM's order.

Raw log-probabilities are of the logits as they come. Then: grammar, logit bias and barred tokens, penalties,
temperature, min-p, top-k, top-p, noise, argmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvikk.engine.history import TokenHistory
from kvikk.engine.logprobs import ROWS_AT_ONCE, Logprob, token_logprobs
from kvikk.engine.noise import gumbel
from kvikk.engine.sampling_params import SamplingParams


class SampledToken(NamedTuple):
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
        history: of the row, where it has penalties.
        allowed: `[vocabulary]`, which tokens its grammar allows, where it has one.
    """

    params: SamplingParams
    seed: int
    position: int
    choice: int
    barred: frozenset[int] = frozenset()
    history: TokenHistory | None = None
    allowed: NDArray[np.bool_] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token of the logits as they are is the one."""
        return (
            self.params.is_greedy
            and not self.barred
            and self.history is None
            and self.allowed is None
            and not self.params.logit_bias
        )


def sample(logits: Tensor, tasks: Sequence[SamplingTask]) -> list[SampledToken | None]:
    """Sample one token for each task.

    A task's token depends on its own logits and its own seed only: the noise is a function of (seed, choice, position,
    token).

    Args:
        logits: `[tasks, vocabulary]`.
        tasks: one for each row of the logits.

    Returns:
        One token for each task; None where no logit is finite or any is NaN, or none of the tokens may come.
    """
    best = logits.max(dim=-1)  # NaN wins, the first of equals wins
    tokens, values = best.indices.tolist(), best.values.tolist()
    shaped = [row for row, task in enumerate(tasks) if not task.is_plain]  # the others need neither a copy nor fp32
    if shaped:
        best = _shaped(logits[shaped].float(), [tasks[row] for row in shaped]).max(dim=-1)
        for row, token, value in zip(shaped, best.indices.tolist(), best.values.tolist(), strict=True):
            tokens[row] = token
            values[row] = value if math.isfinite(values[row]) else values[row]
    logprobs = _logprobs(logits, tokens, tasks)
    return [
        SampledToken(token, found) if math.isfinite(value) else None
        for token, found, value in zip(tokens, logprobs, values, strict=True)
    ]


def leads(logits: Tensor) -> Tensor:
    """By how much the largest logit of each row leads the next one: `[rows]` fp32, of `[rows, vocabulary]`."""
    first = logits.argmax(dim=-1, keepdim=True)
    second = logits.scatter(-1, first, float("-inf")).amax(dim=-1)
    return logits.gather(-1, first).squeeze(-1).float() - second.float()


def _shaped(logits: Tensor, tasks: Sequence[SamplingTask]) -> Tensor:
    """Logits whose argmax is the token to come: `[tasks, vocabulary]` fp32. Those given are overwritten."""
    _mask_(logits, tasks)
    _bias_(logits, tasks)
    _penalise_(logits, tasks)
    random = [row for row, task in enumerate(tasks) if not task.params.is_greedy]
    if random:
        logits[random] = _noisy(logits[random], [tasks[row] for row in random])
    return logits


def _mask_(logits: Tensor, tasks: Sequence[SamplingTask]) -> None:
    """Bar what grammars do not allow."""
    for row, task in enumerate(tasks):
        if task.allowed is not None:
            logits[row].masked_fill_(torch.from_numpy(~task.allowed).to(logits.device), float("-inf"))


def _bias_(logits: Tensor, tasks: Sequence[SamplingTask]) -> None:
    """Add what requests want added, and bar tokens by adding minus infinity."""
    entries = [
        (row, token, value)
        for row, task in enumerate(tasks)
        for token, value in [*(task.params.logit_bias or {}).items(), *((token, -math.inf) for token in task.barred)]
    ]
    if entries:
        rows, tokens, values = zip(*entries, strict=True)
        at = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
        logits.index_put_(at, torch.tensor(values, dtype=torch.float32, device=logits.device), accumulate=True)


def _penalise_(logits: Tensor, tasks: Sequence[SamplingTask]) -> None:
    """Apply penalties to the tokens that rows hold: repetition, then frequency, then presence, as vLLM does."""
    holding = [(row, task.history, task.params) for row, task in enumerate(tasks) if task.history is not None]
    if not holding:
        return
    device = logits.device
    lengths = torch.tensor([len(history.tokens) for _, history, _ in holding])

    def spread(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).repeat_interleave(lengths).to(device)

    rows = torch.tensor([row for row, _, _ in holding]).repeat_interleave(lengths).to(device)
    tokens = torch.from_numpy(np.concatenate([np.asarray(history.tokens) for _, history, _ in holding])).to(device)
    counts = torch.from_numpy(np.concatenate([np.asarray(history.counts) for _, history, _ in holding])).to(device)
    repetition = spread([params.repetition_penalty for _, _, params in holding])
    frequency = spread([params.frequency_penalty for _, _, params in holding])
    presence = spread([params.presence_penalty for _, _, params in holding])
    held = logits[rows, tokens]
    held = torch.where(held > 0, held / repetition, held * repetition)
    logits[rows, tokens] = held - frequency * counts - presence * (counts > 0)


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
    """Mask what min-p, top-k and top-p leave out; ties at top-k's border stay, the likeliest token always stays."""
    vocabulary, device = logits.shape[-1], logits.device
    min_p = [task.params.min_p for task in tasks]
    top_k = [task.params.top_k if 0 < task.params.top_k < vocabulary else vocabulary for task in tasks]
    top_p = [task.params.top_p for task in tasks]
    if max(min_p) > 0:  # a share of the largest probability is a distance from the largest logit
        least = logits.amax(dim=-1, keepdim=True) + torch.tensor(min_p, device=device).log()[:, None]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if min(top_k) == vocabulary and min(top_p) >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, stable=True)
    k = torch.tensor(top_k, device=device)
    border = ordered.gather(-1, (vocabulary - k)[:, None])
    ordered = ordered.masked_fill(ordered < border, float("-inf"))
    if min(top_p) < 1:
        p = torch.tensor(top_p, device=device)
        below = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - p[:, None]
        below[:, -1] = False
        ordered = ordered.masked_fill(below & (p < 1)[:, None], float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ordered)


def _logprobs(logits: Tensor, tokens: list[int], tasks: Sequence[SamplingTask]) -> list[tuple[Logprob, ...] | None]:
    """For each task that asks, the likeliest tokens and its own."""
    results: list[tuple[Logprob, ...] | None] = [None] * len(tasks)
    wanted = [(row, task.params.logprobs) for row, task in enumerate(tasks) if task.params.logprobs is not None]
    for start in range(0, len(wanted), ROWS_AT_ONCE):
        rows, counts = zip(*wanted[start : start + ROWS_AT_ONCE], strict=True)
        found = token_logprobs(logits[list(rows)], [tokens[row] for row in rows], counts)
        for row, entries in zip(rows, found, strict=True):
            results[row] = entries
    return results


def _signed(seed: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit number."""
    return seed - 2**64 if seed >= 2**63 else seed

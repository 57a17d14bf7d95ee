"""Log-probabilities of tokens: what a request is told of the choices that were made, and of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 32
"""Positions whose logits are looked at together: `[prompt tokens, vocabulary]` in fp32 would take gigabytes."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability, before anything but the model has shaped it, and its rank (1 = likeliest)."""

    token_id: int
    logprob: float
    rank: int


def token_logprobs(logits: Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[tuple[Logprob, ...]]:
    """For each row the likeliest tokens, then the chosen one where it is not among them.

    Args:
        logits: `[rows, vocabulary]`, in any dtype; copied to fp32.
        chosen: a token for each row.
        counts: how many of the likeliest for each row; no more than the vocabulary are given.
    """
    values = logits.float().log_softmax(dim=-1)
    own = values.gather(-1, torch.tensor(chosen, device=logits.device)[:, None])
    ranks = (values > own).sum(dim=-1) + 1
    top = values.topk(min(max(counts), values.shape[-1]), dim=-1)
    found = []
    rows = zip(
        chosen, counts, own[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
    )
    for token, count, logprob, rank, tokens, logprobs in rows:
        entries = [Logprob(*entry) for entry in zip(tokens[:count], logprobs, range(1, count + 1), strict=False)]
        if token not in tokens[:count]:
            entries.append(Logprob(token, logprob, rank))
        found.append(tuple(entries))
    return found

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
    """A token's log-probability, before anything but the model has shaped it, and its rank (1 = likeliest).

    No two tokens have one rank: of tokens with equal logits the one of the lowest id is the likeliest.
    """

    token_id: int
    logprob: float
    rank: int


def token_logprobs(logits: Tensor, chosen: Sequence[int], counts: Sequence[int]) -> list[tuple[Logprob, ...]]:
    """For each row the likeliest tokens, then the chosen one where it is not among them.

    Which tokens these are, their order and their ranks hang on the row's logits alone, ties included: neither on the
    rows and counts beside it nor on the device.

    Args:
        logits: `[rows, vocabulary]`, in any dtype; copied to fp32.
        chosen: a token for each row.
        counts: how many of the likeliest for each row; no more than the vocabulary are given.
    """
    values = logits.float().log_softmax(dim=-1)
    order = _order(logits)
    at = torch.tensor(chosen, device=logits.device)[:, None]
    own = values.gather(-1, at)[:, 0].tolist()
    ranks = ((order > order.gather(-1, at)).sum(dim=-1) + 1).tolist()
    top = order.topk(min(max(counts), order.shape[-1]), dim=-1).indices
    likeliest, logprobs = top.tolist(), values.gather(-1, top).tolist()
    found = []
    for row, (token, count) in enumerate(zip(chosen, counts, strict=True)):
        told = zip(likeliest[row][:count], logprobs[row], strict=False)
        entries = [Logprob(other, logprob, rank) for rank, (other, logprob) in enumerate(told, 1)]
        if ranks[row] > count:
            entries.append(Logprob(token, own[row], ranks[row]))
        found.append(tuple(entries))
    return found


def _order(logits: Tensor) -> Tensor:
    """`[rows, vocabulary]` int64, no two of a row alike: larger for a larger logit, of equal ones for the lower id.

    Where values tie, `topk` takes any, and others for another number of rows, another k and another device. Bits of
    fp32 numbers are ordered as the numbers are, once those of negative ones but for the sign are flipped.
    """
    bits = (logits.float() + 0.0).view(torch.int32)  # the sum makes -0 a 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) - torch.arange(logits.shape[-1], device=logits.device)

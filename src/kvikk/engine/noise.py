"""The noise of sampling: counter-based, so that a seed gives one text on any device and in any batch."""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four 32-bit words of noise for each counter.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Args:
        counter: four int64 tensors of 32-bit words that broadcast together.
        key: two int64 tensors of 32-bit words that broadcast with them.

    Returns:
        Four int64 tensors of 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wraps beyond 2**63, but every bit is right
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def gumbel(seeds: Tensor, positions: Tensor, choices: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise for every token of the vocabulary: adding it to the logits makes argmax a sample.

    The word of token `t` is word `t % 4` of the counter `(t // 4, position, choice, 0)` under the seed as key. Its
    upper 24 bits make a uniform number strictly between 0 and 1. The logarithms are taken in fp64 and rounded once, so
    that devices agree.

    Args:
        seeds: `[rows]` int64, the bits of a 64-bit seed.
        positions: `[rows]` int64, the position of the sampled token in its sequence.
        choices: `[rows]` int64.
        vocabulary: how many tokens.

    Returns:
        `[rows, vocabulary]` fp32.
    """
    words = torch.arange(-(-vocabulary // 4), device=seeds.device, dtype=torch.int64)[None, :]
    zero = torch.zeros((1, 1), dtype=torch.int64, device=seeds.device)
    key = ((seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None])
    noise = philox4x32((words, positions[:, None], choices[:, None], zero), key)
    bits = torch.stack(noise, dim=-1).flatten(1)[:, :vocabulary]
    uniform = ((bits >> 8).double() + 0.5) / 2**24
    return -torch.log(-torch.log(uniform)).float()

"""Queries to come as normal variables, and the attention that is to be expected of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvikk.compress.rotary import Rotary


@dataclass(frozen=True, eq=False)
class QueryModel:
    """A normal distribution of queries for each query head.

    Args:
        mean: `[kv_heads, group, head_dim]` fp32.
        covariance: `[kv_heads, group, head_dim, head_dim]` fp32.
    """

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, queries: Tensor) -> QueryModel:
        """That of the queries that were seen: `[kv_heads, group, w, head_dim]`."""
        mean = queries.mean(2)
        centred = queries - mean[:, :, None]
        return cls(mean, centred.transpose(2, 3) @ centred / queries.shape[2])

    def ahead(self, rotary: Rotary, start: int, count: int) -> QueryModel:
        """The model of these queries under the average rotation of positions `start..start + count - 1`."""
        turned = rotary.average(self.covariance, start=start, count=count)
        both = rotary.average(turned.transpose(2, 3), start=start, count=count)  # R C R^T
        return QueryModel(rotary.average(self.mean, start=start, count=count), both)

    def expected_logits(self, keys: Tensor, scale: float) -> Tensor:
        """The logarithm of the mean of exp(scale * query key): the mean logit and half its variance.

        Args:
            keys: `[kv_heads, slots, head_dim]`.
            scale: of attention's logits.

        Returns:
            `[kv_heads, group, slots]` fp32.
        """
        keys = keys.float()
        variance = (keys[:, None] @ self.covariance).mul(keys[:, None]).sum(-1)
        return torch.add(self.mean @ keys.transpose(1, 2) * scale, variance, alpha=scale**2 / 2)

"""An `AttentionStep` in plain torch for tests: rows are given by their lengths, K and V are kept in lists."""

from __future__ import annotations

import torch
from torch import Tensor


class DenseKV:
    """K and V of some rows, over all steps so far."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def step(self, lengths: list[int], rows: list[int] | None = None) -> DenseStep:
        """The next step, of `lengths[i]` new tokens for `rows[i]` (by default rows 0, 1, ...)."""
        return DenseStep(self, lengths, rows if rows is not None else list(range(len(lengths))))


class DenseStep:
    """Each query attends to its own row up to itself; records the layers that called."""

    def __init__(self, kv: DenseKV, lengths: list[int], rows: list[int]) -> None:
        self._kv, self._lengths, self._rows = kv, lengths, rows
        self.calls: list[int] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        self.calls.append(layer)
        assert q.shape[0] == k.shape[0] == v.shape[0] == sum(self._lengths)
        assert k.shape == v.shape
        outputs = []
        parts = zip(*(x.split(self._lengths) for x in (q, k, v)), self._rows, strict=True)
        for q_row, k_row, v_row, row in parts:
            before = self._kv.kept.get((layer, row))
            keys = k_row if before is None else torch.cat((before[0], k_row))
            values = v_row if before is None else torch.cat((before[1], v_row))
            self._kv.kept[layer, row] = (keys, values)
            outputs.append(dense_attention(q_row, keys, values, scale))
        return torch.cat(outputs)


def dense_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of the last `len(q)` tokens of one row: `[tokens, q_heads, head_dim]`."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * scale
    place = torch.arange(len(keys), device=q.device)
    position = place[len(keys) - len(q) :, None]
    scores = scores.masked_fill(place[None] > position, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.float()).to(q.dtype)

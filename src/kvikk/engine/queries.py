"""Queries that are kept while a step runs: those of the last positions before a row is compacted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvikk.models.protocol import AttentionStep


@dataclass(slots=True, eq=False)
class WatchedQueries:
    """A row's last queries, of all layers.

    Args:
        positions: which ones there is a place for.
        rotated: `[layers, len(positions), q_heads, head_dim]`, in the model's dtype; zero where not computed yet.
        scales: of each layer's attention.
        is_borrowed: `rotated` is part of a runner's own buffer, and the row's while it has its seat there.
    """

    positions: range
    rotated: Tensor
    scales: Sequence[float]
    is_borrowed: bool = False

    def own(self) -> WatchedQueries:
        """The same in memory of their own."""
        return WatchedQueries(self.positions, self.rotated.clone(), list(self.scales))

    def moved_to(self, positions: range) -> WatchedQueries:
        """The same for later positions; what was seen of them already is seen still. The old ones stay as they are."""
        known = self.rotated[:, max(0, positions.start - self.positions.start) :]
        rotated = self.rotated.new_zeros((len(known), len(positions), *known.shape[2:]))
        rotated[:, : known.shape[1]] = known
        return WatchedQueries(positions, rotated, self.scales)


class QueryRecorder:
    """A step that keeps the queries of some of its tokens. It costs one gather a layer.

    Args:
        step: what attends.
        tokens: `[watched]` int64 on the device, which tokens of the step.
        layers: of the model.
    """

    def __init__(self, step: AttentionStep, tokens: Tensor, layers: int) -> None:
        self._step = step
        self._tokens = tokens
        self.layers: list[Tensor] = [torch.empty(0)] * layers
        self.scales = [0.0] * layers

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """See `kvikk.models.protocol.AttentionStep.attend`."""
        self.layers[layer] = q.index_select(0, self._tokens)
        self.scales[layer] = scale
        return self._step.attend(layer, q, k, v, scale=scale)

"""One step on a GPU: single queries first, then runs of several, behind what a model's forward calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvikk.attention.gpu.attend import Bias
from kvikk.attention.gpu.rows import DecodeRoute, DecodeRows, RunRows
from kvikk.attention.gpu.store import store_heads
from kvikk.attention.gpu.watch import QueryWatch, keep_queries
from kvikk.attention.gpu.worklist import WorkListDecode, WorkListRuns
from kvikk.memory.storage import KVStore
from kvikk.models.protocol import HeadNorm


@dataclass(frozen=True, slots=True)
class Singles:
    """The step's first tokens: rows with one query each.

    Args:
        rows: on the device.
        route: what computes them.
        bias: of these rows, where one has a bias; only our own route knows it.
    """

    rows: DecodeRows
    route: DecodeRoute
    bias: Bias | None = None

    @property
    def tokens(self) -> int:
        """Tokens, padded rows included."""
        return self.rows.seats.shape[0]


@dataclass(frozen=True, slots=True)
class Runs:
    """The tokens after them: runs of several queries.

    Args:
        rows: on the device; their offsets count from the first of these tokens.
        attention: what computes them.
        bias: of these rows.
    """

    rows: RunRows
    attention: WorkListRuns
    bias: Bias | None = None


class GpuStep:
    """An `AttentionStep` over buffers on the device, which also stores and rotates in one kernel.

    Args:
        store: the pool.
        singles: rows with one query; None: there are none.
        runs: the other rows; None: there are none.
        slots: `[tokens]` int64, where each token's K and V are stored; -1: nowhere.
        positions: `[tokens]` int64, of each token.
        watch: where queries are kept; None: none are.
    """

    def __init__(
        self,
        store: KVStore,
        singles: Singles | None,
        runs: Runs | None,
        slots: Tensor,
        positions: Tensor,
        watch: QueryWatch | None = None,
    ) -> None:
        self.store = store
        self.singles = singles
        self.runs = runs
        self.slots = slots
        self.positions = positions
        self.watch = watch

    def plan(self) -> None:
        """Make the work lists; before the first layer, on the stream that the layers run on."""
        if self.singles is not None:
            self.singles.route.plan(self.singles.rows)
        if self.runs is not None:
            self.runs.attention.plan(self.runs.rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """See `kvikk.models.protocol.AttentionStep.attend`."""
        stored = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        store_heads(self.store, layer, torch.cat((q, k, v), dim=1), self.slots, stored)
        return self._attend(layer, stored, scale)

    def attend_packed(
        self, layer: int, heads: Tensor, rope: Tensor, *, scale: float, norm: HeadNorm | None = None
    ) -> Tensor:
        """See `kvikk.models.protocol.PackedAttentionStep.attend_packed`."""
        q_heads = heads.shape[1] - 2 * self.store.geometry.kv_heads[layer]
        q = torch.empty((heads.shape[0], q_heads, heads.shape[2]), dtype=heads.dtype, device=heads.device)
        store_heads(self.store, layer, heads, self.slots, q, rope=rope, positions=self.positions, norm=norm)
        return self._attend(layer, q, scale)

    def _attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        if self.watch is not None:
            self.watch.scales[layer] = scale
            keep_queries(q, self.watch.places, self.watch.buffer[layer])
        out = torch.empty_like(q)
        first = 0
        if self.singles is not None:
            first = self.singles.tokens
            route, bias = self.singles.route, self.singles.bias
            if bias is None:
                route.attend(layer, q[:first], out[:first], scale=scale)
            else:
                assert isinstance(route, WorkListDecode)
                route.attend(layer, q[:first], out[:first], scale=scale, bias=bias)
        if self.runs is not None:
            self.runs.attention.attend(layer, q[first:], out[first:], scale=scale, bias=self.runs.bias)
        return out

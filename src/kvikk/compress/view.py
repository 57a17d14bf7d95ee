"""What a policy is shown of one layer of one row, and the words that keep policies short."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor

from kvikk.compress.attending import attention_logits, attention_weights, mean_attention
from kvikk.compress.rotary import Rotary
from kvikk.compress.signals import Signal, Signals
from kvikk.compress.slots import LayerSlots
from kvikk.errors import PolicyFailed

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerView:
    """One layer of one row at a trigger. Read-only, but for what the policy remembers.

    Scores of dead slots are never looked at. What a policy computes over several slots must leave them out: they may
    hold NaN. `live_mean`, `attention` and `pool` do.

    Args:
        layer: of how many, from 0.
        layers: of the model.
        shown: layers of as many KV heads each, one after the other, that are shown as one.
        slots: which token each slot holds; a policy reads them as `positions` and `live`.
        budget: slots that a lane of this layer may keep, on average over its KV heads.
        scale: of attention's logits.
        seed: of the request; the same in all layers.
        since: the row's length at its last trigger, 0 at its first: tokens and queries from there on are new.
        signals: what the engine gathered for the policy.
        needs: what the policy declared; reading anything else raises.
        remembers: the names that the policy declared in `state`.
        states: what the policy remembered at earlier triggers, `[kv_heads, slots]` fp32 by name, 0 for new slots. A
            name that is missing was never remembered. `remember` writes here.
    """

    layer: int
    layers: int
    slots: LayerSlots
    budget: int
    scale: float
    signals: Signals
    needs: Collection[Signal]
    seed: int = 0
    shown: int = 1
    since: int = 0
    remembers: Collection[str] = ()
    states: dict[str, Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the row so far, kept or not."""
        return self.slots.length

    @property
    def live(self) -> Tensor:
        """`[kv_heads, slots]` bool: which slots hold a token."""
        return self.slots.live

    @property
    def positions(self) -> Tensor:
        """`[kv_heads, slots]` int64: the token's index in its text."""
        self._declared(Signal.POSITIONS)
        return self.slots.positions

    @property
    def keys(self) -> Tensor:
        """`[kv_heads, slots, head_dim]`, rotated, in the dtype of the cache."""
        return self._given(Signal.KEYS, self.signals.keys)

    @property
    def values(self) -> Tensor:
        """`[kv_heads, slots, head_dim]`, in the dtype of the cache."""
        return self._given(Signal.VALUES, self.signals.values)

    @property
    def queries(self) -> Tensor:
        """`[q_heads, w, head_dim]`, rotated, oldest first: the last that the policy asked for with `query_window`."""
        return self._given(Signal.QUERIES, self.signals.queries)

    @property
    def query_positions(self) -> Tensor:
        """`[w]` int64, ascending."""
        return self._given(Signal.QUERIES, self.signals.query_positions)

    @property
    def attention_mass(self) -> Tensor:
        """`[kv_heads, slots]` fp32: the attention that the row's last `observed` queries gave to each slot, added up.

        Averaged over the query heads of a KV head. What is no longer held is gone from it.
        """
        return self._given(Signal.ATTENTION_MASS, self.signals.attention_mass)

    @property
    def observed(self) -> int:
        """How many queries `attention_mass` holds."""
        self._declared(Signal.ATTENTION_MASS)
        return self.signals.observed

    @property
    def rotary(self) -> Rotary:
        """How the model rotates queries and keys."""
        return self._given(Signal.ROTARY, self.signals.rotary)

    def logits(self) -> Tensor:
        """`[q_heads, w, slots]` fp32: queries times keys, scaled, before any mask; anything where a slot is dead."""
        return attention_logits(self.queries, self.keys, self.scale)

    def attention(self) -> Tensor:
        """`[q_heads, w, slots]` fp32: what each query gives to each live slot up to its own position."""
        return attention_weights(self.logits(), self.query_positions, self.slots)

    def mean_attention(self, *, only_older: bool = False) -> Tensor:
        """`[kv_heads, slots]` fp32: `attention`, in the mean over the queries and the query heads of each KV head.

        Where it is enough, it is much cheaper on a GPU than the attention of each query.

        Args:
            only_older: 0 where a slot is not one of `before_window`.
        """
        queries, at, keys = self.queries, self.query_positions, self.keys
        return mean_attention(queries, at, keys, self.slots, scale=self.scale, only_older=only_older)

    def before_window(self) -> Tensor:
        """`[kv_heads, slots]` bool: live slots older than the oldest of `queries`, which all of them can see."""
        return self.live & (self.slots.positions < self.query_positions[0])

    def grouped(self, per_query_head: Tensor) -> Tensor:
        """`[q_heads, ...]` to `[kv_heads, group, ...]`: the query heads of each KV head together."""
        return per_query_head.reshape(len(self.live), -1, *per_query_head.shape[1:])

    def group_mean(self, per_query_head: Tensor) -> Tensor:
        """`[q_heads, ...]` to `[kv_heads, ...]`: the mean over the query heads of each KV head."""
        return self.grouped(per_query_head).mean(1)

    def group_max(self, per_query_head: Tensor) -> Tensor:
        """`[q_heads, ...]` to `[kv_heads, ...]`: the maximum over the query heads of each KV head."""
        return self.grouped(per_query_head).amax(1)

    def layer_mean(self, per_slot: Tensor) -> Tensor:
        """`[kv_heads, slots]`: for each slot, the mean over the layer's lanes that hold its token."""
        return self.slots.mean_over_lanes(per_slot, len(self.live) // self.shown)

    def norms(self, vectors: Tensor) -> Tensor:
        """`[kv_heads, slots, dim]` to `[kv_heads, slots]` fp32: the length of each vector."""
        norms: Tensor = torch.linalg.vector_norm(vectors.float(), dim=-1)
        return norms

    def live_mean(self, vectors: Tensor) -> Tensor:
        """`[kv_heads, slots, dim]` to `[kv_heads, 1, dim]`: the mean over live slots."""
        live = self.live[..., None]
        return torch.where(live, vectors, 0).sum(1, keepdim=True) / live.sum(1, keepdim=True).clamp(min=1)

    def pool(self, per_slot: Tensor, width: int, kind: Literal["mean", "max"]) -> Tensor:
        """`[kv_heads, slots]`: mean or maximum over `width` (odd) neighbours in the text among a lane's live slots."""
        return self.slots.pool(per_slot, width, kind)

    def state(self, name: str) -> Tensor:
        """`[kv_heads, slots]` fp32: what was remembered by this name at earlier triggers; 0 for slots that are new."""
        self._remembered(name)
        if name not in self.states:
            return torch.zeros(self.live.shape, dtype=torch.float32, device=self.live.device)
        return self.states[name]

    def remember(self, name: str, per_slot: Tensor) -> None:
        """Keep a number for each slot, `[kv_heads, slots]`, for later triggers; it goes where the slot's token goes."""
        self._remembered(name)
        if per_slot.shape != self.live.shape:
            wanted, found = tuple(self.live.shape), tuple(per_slot.shape)
            raise PolicyFailed(f"the state {name!r} is {found}, not [kv_heads, slots] = {wanted}")
        self.states[name] = per_slot.float()

    def _remembered(self, name: str) -> None:
        if name not in self.remembers:
            raise PolicyFailed(f"the policy uses the state {name!r} and does not declare it: add it to `state`")

    def _declared(self, signal: Signal) -> None:
        if signal not in self.needs:
            raise PolicyFailed(f"the policy reads the signal {signal.name} and does not declare it: add it to `needs`")

    def _given(self, signal: Signal, value: T | None) -> T:
        self._declared(signal)
        if value is None:
            raise PolicyFailed(f"the signal {signal.name} was declared and not gathered")
        return value

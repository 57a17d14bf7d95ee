"""Layers to try a policy on: random keys, values and queries in the shapes that an engine comes with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvikk.compress import LayerSlots, LayerView, Policy, Rotary, Signal, Signals, query_window, state_names

HEAD_DIM = 16
ALWAYS_HELD = (4, 12)
"""First and last positions that every lane holds."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of one row, with everything that a policy could ask for.

    Args:
        slots: which token each slot holds.
        signals: all of them; `queries` are those of every position.
        budget: slots that a lane may keep on average.
        since: the row's length at its last trigger.
        shown: layers that it stands for.
    """

    slots: LayerSlots
    signals: Signals
    budget: int
    since: int = 0
    shown: int = 1

    def view(
        self, policy: Policy, *, needs: Collection[Signal] | None = None, states: dict[str, Tensor] | None = None
    ) -> LayerView:
        """The layer as a policy is shown it: nothing that it did not declare.

        Args:
            policy: who looks.
            needs: what it may read, in place of what it declares.
            states: what it remembered; written to.
        """
        signals, asked = self.signals, policy.needs
        window = min(query_window(policy), self.slots.length)
        assert signals.queries is not None
        assert signals.query_positions is not None
        last = slice(self.slots.length - window, None)
        return LayerView(
            layer=1,
            layers=4,
            slots=self.slots,
            budget=self.budget,
            scale=HEAD_DIM**-0.5,
            signals=Signals(
                keys=signals.keys if Signal.KEYS in asked else None,
                values=signals.values if Signal.VALUES in asked else None,
                queries=signals.queries[:, last] if Signal.QUERIES in asked else None,
                query_positions=signals.query_positions[last] if Signal.QUERIES in asked else None,
                attention_mass=signals.attention_mass if Signal.ATTENTION_MASS in asked else None,
                observed=signals.observed if Signal.ATTENTION_MASS in asked else 0,
                rotary=signals.rotary if Signal.ROTARY in asked else None,
            ),
            needs=policy.needs if needs is None else needs,
            seed=7,
            shown=self.shown,
            since=self.since,
            remembers=state_names(policy),
            states={} if states is None else states,
        )

    def with_dead(self, content: float) -> Layer:
        """The same, with this in all slots that are dead."""
        dead = ~self.slots.live
        signals = self.signals
        return replace(
            self,
            slots=replace(self.slots, positions=self.slots.positions.masked_fill(dead, -1)),
            signals=replace(
                signals,
                keys=_given(signals.keys).masked_fill(dead[..., None], content),
                values=_given(signals.values).masked_fill(dead[..., None], content),
                attention_mass=_given(signals.attention_mass).masked_fill(dead, 0),
            ),
        )

    def in_order(self, order: Tensor) -> Layer:
        """The same with slots taken in another order: `[kv_heads, any number]` indices, each slot at most once."""
        rows = torch.arange(len(order))[:, None]
        signals = self.signals
        return replace(
            self,
            slots=replace(self.slots, positions=self.slots.positions[rows, order], live=self.slots.live[rows, order]),
            signals=replace(
                signals,
                keys=_given(signals.keys)[rows, order],
                values=_given(signals.values)[rows, order],
                attention_mass=_given(signals.attention_mass)[rows, order],
            ),
        )

    def stored_as(self, dtype: torch.dtype) -> Layer:
        """The same with keys, values and queries in another type."""
        signals = self.signals
        return replace(
            self,
            signals=replace(
                signals,
                keys=_given(signals.keys).to(dtype),
                values=_given(signals.values).to(dtype),
                queries=_given(signals.queries).to(dtype),
            ),
        )


def fresh_layer(*, kv_heads: int, group: int, length: int, spare: int = 3, seed: int = 0) -> Layer:
    """A layer that holds its whole text, in order, with `spare` dead slots at its end."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    columns = length + spare
    positions = torch.arange(columns).repeat(kv_heads, 1)
    slots = LayerSlots(positions=positions, live=positions < length, length=length)
    signals = Signals(
        keys=normal(kv_heads, columns, HEAD_DIM),
        values=normal(kv_heads, columns, HEAD_DIM),
        queries=2 * normal(kv_heads * group, length, HEAD_DIM),
        query_positions=torch.arange(length),
        attention_mass=normal(kv_heads, columns).exp(),
        observed=length,
        rotary=Rotary(inv_freq=1000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2)),
    )
    return Layer(slots=slots, signals=signals, budget=max(1, length // 2)).with_dead(torch.nan)


def compacted_layer(*, kv_heads: int, group: int, length: int, seed: int = 0) -> Layer:
    """A layer after a trigger: each lane holds tokens of its own, in no order, another number of them in each."""
    layer = fresh_layer(kv_heads=kv_heads, group=group, length=length, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    positions, live = layer.slots.positions, layer.slots.live
    first, last = ALWAYS_HELD
    is_held = torch.rand(positions.shape, generator=generator) < torch.linspace(0.8, 0.1, kv_heads)[:, None]
    is_held |= (positions < first) | (positions >= length - last)
    layer = replace(layer, slots=replace(layer.slots, live=live & is_held), since=length - last)
    return layer.in_order(torch.rand(positions.shape, generator=generator).argsort(-1)).with_dead(torch.nan)


def stacked(layers: Sequence[Layer]) -> Layer:
    """Layers of one shape as one that has the KV heads of all of them."""

    def joined(parts: Iterable[Tensor | None]) -> Tensor:
        return torch.cat([_given(part) for part in parts])

    slots = LayerSlots(
        positions=torch.cat([layer.slots.positions for layer in layers]),
        live=torch.cat([layer.slots.live for layer in layers]),
        length=layers[0].slots.length,
    )
    signals = replace(
        layers[0].signals,
        keys=joined(layer.signals.keys for layer in layers),
        values=joined(layer.signals.values for layer in layers),
        queries=joined(layer.signals.queries for layer in layers),
        attention_mass=joined(layer.signals.attention_mass for layer in layers),
    )
    return replace(layers[0], slots=slots, signals=signals, shown=len(layers))


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor

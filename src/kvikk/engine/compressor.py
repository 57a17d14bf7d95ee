"""Asks a row's policy what stays, layer by layer, over the real bytes of the pool."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from kvikk.compress import (
    KVCacheParams,
    LayerSlots,
    LayerView,
    Method,
    Rotary,
    Signal,
    Signals,
    accumulated_attention,
    is_by_recency,
    is_lanewise,
    query_window,
    refuse_unscored,
    state_names,
)
from kvikk.engine.kv import Choice
from kvikk.engine.request import Row
from kvikk.errors import InvalidRequest
from kvikk.memory import Ends, Held, KVStore
from kvikk.types import Position

MASS: Final = "attention mass"
"""The state in which the engine carries a row's attention mass from trigger to trigger."""
PROMPT_QUERIES: Final = 64
"""Of a prompt, so many of the last queries enter the attention mass."""
NUMBERS_AT_ONCE: Final = 2**25
"""Of keys, or of attention weights, that a policy is shown at a time where it can be shown several layers: 128 MiB in
fp32."""
VECTORS: Final = frozenset({Signal.KEYS, Signal.VALUES, Signal.ATTENTION_MASS})
"""What takes K or V of each slot to be shown."""
NOTE_BYTES: Final = 4
"""Of a position, and of each number that is remembered, for every slot of every lane."""


class PolicyCompressor:
    """Scores what rows hold by their policies, and fills their budgets.

    Args:
        store: the pool.
        rotary: how the model rotates keys, for policies that ask; None: unknown.
    """

    def __init__(self, store: KVStore, rotary: Rotary | None) -> None:
        self._store = store
        self._rotary = rotary

    def check(self, params: KVCacheParams) -> None:
        """See `Compressor.check`."""
        method = params.method
        if Signal.ROTARY in method.policy.needs and self._rotary is None:
            raise InvalidRequest(
                f"kv_cache.policy {method.name!r} must know how the model rotates its keys, which is known of the "
                "Llama family only: choose another policy",
                param="kv_cache.policy",
            )
        always = method.sinks + method.window
        if method.budget.unit == "bytes" and method.budget.amount < always * self.token_bytes(method):
            raise InvalidRequest(
                f"kv_cache.budget is {method.budget}, sinks ({method.sinks}) and window ({method.window}) alone take "
                f"{always * self.token_bytes(method):,}: raise it, or lower these",
                param="kv_cache.budget",
            )

    def keeps_everything(self, row: Row) -> bool:
        """See `Compressor.keeps_everything`."""
        method = _method(row)
        budget = method.budget.slots(row.front, token_bytes=self.token_bytes(method))
        return budget >= row.front and not self._notes(method)

    def next_trigger(self, row: Row, after: int | None = None) -> tuple[int | None, range]:
        """See `Compressor.next_trigger`."""
        params = row.request.kv_cache
        assert params is not None
        if after is not None:
            window = watch_window(params, PROMPT_QUERIES)
            trigger = len(row.tokens) + max(after, window)
        elif row.compress_at is None:  # a lossless row that was preempted is computed again to its last token
            trigger = max(len(row.request.prompt_token_ids), len(row.tokens))
            window = watch_window(params, PROMPT_QUERIES)
        elif params.every is None:
            return None, range(0)
        else:
            trigger = row.compress_at + params.every
            window = watch_window(params, params.every)
        return trigger, range(max(0, trigger - window), trigger)

    @torch.inference_mode()
    def choose(self, row: Row, held: Held, kept_from: Position) -> Choice:
        """See `Compressor.choose`. It waits for the device, once, only where the allocator goes by scores."""
        method, geometry = _method(row), self._store.geometry
        unfinished = row.front - kept_from
        quotas = method.quotas(
            row.front, layers=geometry.layers, token_bytes=self.token_bytes(method), unfinished=unfinished
        )
        live = held.lengths + (row.front - row.tail_start)
        counts = method.known_counts(quotas, geometry.kv_heads, live, row.front, unfinished)
        if counts is not None and is_by_recency(method.policy) and not self._notes(method):
            return Choice(Ends(min(method.sinks, row.front)), counts, {})
        remembered = self._remembered(row, method, held)
        everything = LayerSlots(
            positions=held.positions,
            live=held.live,
            length=row.front,
            in_order=True,
            is_packed=row.body is None,
        )
        scores: list[Tensor] = []
        for layers in self._shown_together(row, method, held, quotas):
            first, last = layers[0], layers[-1]
            lanes = slice(geometry.first_frame[first], geometry.first_frame[last] + geometry.kv_heads[last])
            slots = everything.of_lanes(lanes.start, lanes.stop)
            of_layer = {name: values[lanes] for name, values in remembered.items()}
            view = LayerView(
                layer=first,
                layers=geometry.layers,
                slots=slots,
                budget=quotas[first],
                scale=1.0 if row.queries is None else row.queries.scales[first],
                signals=self._signals(row, method, slots, held.table[lanes], layers, of_layer.pop(MASS, None)),
                needs=method.policy.needs,
                seed=row.request.seed,
                shown=len(layers),
                since=_last_trigger(row),
                remembers=state_names(method.policy),
                states=of_layer,
            )
            scores.append(method.score(view))
            for name, values in remembered.items():
                values[lanes] = view.attention_mass if name == MASS else view.state(name)
        of_lanes = scores[0] if len(scores) == 1 else torch.cat(scores)
        keep, unscored = method.select(of_lanes, everything, quotas, geometry.kv_heads, unfinished)
        refuse = partial(refuse_unscored, method.name, live=int(live.sum()))
        if counts is None:
            of_scores = torch.stack((keep.sum(1), unscored)).cpu()
            refuse(of_scores[1])
            return Choice(keep, of_scores[0].numpy(), remembered)
        return Choice(keep, counts, remembered, partial(refuse, unscored.to("cpu", non_blocking=True)))

    def _shown_together(self, row: Row, method: Method, held: Held, quotas: list[int]) -> list[range]:
        """The layers, cut where two of them cannot be shown to the policy as one, or would be too large together."""
        geometry, slots = self._store.geometry, held.slots
        scales = [0.0] * geometry.layers if row.queries is None else row.queries.scales
        window = 0 if row.queries is None else len(row.queries.positions) * row.queries.rotated.shape[2]
        most = 1
        if is_lanewise(method.policy):
            width = geometry.head_dim if VECTORS & method.policy.needs else 1
            of_layer = slots * max(max(geometry.kv_heads) * width, window)
            most = max(1, NUMBERS_AT_ONCE // of_layer)
        kinds = list(zip(geometry.kv_heads, scales, strict=True))
        cuts = [0]
        for layer in range(1, geometry.layers):
            if layer - cuts[-1] == most or kinds[layer] != kinds[cuts[-1]]:
                cuts.append(layer)
        return [range(start, stop) for start, stop in pairwise([*cuts, geometry.layers])]

    def _signals(
        self, row: Row, method: Method, slots: LayerSlots, frames: Tensor, layers: range, mass: Tensor | None
    ) -> Signals:
        """What the policy asked for, of one layer or of several in one.

        Args:
            row: of which.
            method: whose policy.
            slots: of these layers.
            frames: `[lanes, columns]` int64.
            layers: which, one after another.
            mass: `[lanes, slots]`, carried from before; None: not asked for.
        """
        needs = method.policy.needs
        keys = values = queries = positions = None
        if needs & {Signal.KEYS, Signal.ATTENTION_MASS}:
            keys = self._store.keys(frames).flatten(1, 2)
        if Signal.VALUES in needs:
            values = self._store.values(frames).flatten(1, 2)
        if row.queries is not None:
            queries = row.queries.rotated[layers.start : layers.stop].transpose(1, 2).flatten(0, 1)
            positions = torch.arange(row.queries.positions.start, row.front, device=self._store.device)
        if mass is not None:
            assert keys is not None and queries is not None and positions is not None  # noqa: PT018 - as watched
            assert row.queries is not None
            new = row.front - max(_last_trigger(row), row.queries.positions.start)
            mass = mass + accumulated_attention(
                queries[:, -new:], positions[-new:], keys, slots, scale=row.queries.scales[layers[0]]
            )
        window = query_window(method.policy)
        return Signals(
            keys=keys,
            values=values,
            queries=queries[:, -window:] if queries is not None and window else None,
            query_positions=positions[-window:] if positions is not None and window else None,
            attention_mass=mass,
            observed=row.front - max(0, len(row.request.prompt_token_ids) - PROMPT_QUERIES),
            rotary=self._rotary,
        )

    def _remembered(self, row: Row, method: Method, held: Held) -> dict[str, Tensor]:
        """`[lanes, slots]` fp32 for each name: what the body remembers, 0 for the slots of the tail."""
        remembered = {}
        for name in self._notes(method):
            values = torch.zeros(held.live.shape, dtype=torch.float32, device=held.live.device)
            if row.body is not None and name in row.body.state:
                old = row.body.state[name]
                values[:, : old.shape[1]] = old
            remembered[name] = values.masked_fill_(~held.live, 0)
        return remembered

    def token_bytes(self, method: Method) -> int:
        """What one token takes in all lanes: K and V, its position, and what is remembered of it."""
        notes = 1 + len(self._notes(method))
        return self._store.geometry.token_bytes + NOTE_BYTES * notes * self._store.lanes

    def _notes(self, method: Method) -> tuple[str, ...]:
        """What goes with each slot from trigger to trigger besides its position."""
        mass = (MASS,) if Signal.ATTENTION_MASS in method.policy.needs else ()
        return (*state_names(method.policy), *mass)


def watch_window(params: KVCacheParams, new: int | None = None) -> int:
    """How many of the last queries before a trigger a policy will look at.

    Args:
        params: of the request.
        new: of those that came since the trigger before, so many enter the attention mass; None: as many as ever do.
    """
    policy = params.method.policy
    if new is None:
        new = max(PROMPT_QUERIES, params.every or 0)
    return max(query_window(policy), new if Signal.ATTENTION_MASS in policy.needs else 0)


def _method(row: Row) -> Method:
    assert row.request.kv_cache is not None
    return row.request.kv_cache.method


def _last_trigger(row: Row) -> int:
    """The position at which the row was last at a trigger; 0: never."""
    params, now = row.request.kv_cache, row.compress_at
    assert params is not None
    assert now is not None
    return 0 if now == len(row.request.prompt_token_ids) or params.lossless else now - (params.every or 0)

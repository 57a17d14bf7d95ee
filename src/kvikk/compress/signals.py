"""What a policy may look at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from kvikk.compress.rotary import Rotary


class Signal(StrEnum):
    """What a policy may read of a layer. It names those that it reads in `needs`; the others cost nothing."""

    KEYS = "keys"
    VALUES = "values"
    QUERIES = "queries"
    ATTENTION_MASS = "attention mass"
    POSITIONS = "positions"
    ROTARY = "rotary"


@dataclass(frozen=True, kw_only=True, eq=False)
class Signals:
    """What an engine hands over of one layer of one row; None for what the policy does not need.

    Args:
        keys, values: `[kv_heads, slots, head_dim]`, as stored: keys are rotated at their own positions. Where a slot is
            dead they hold anything, NaN included.
        queries: `[q_heads, w, head_dim]`, the row's last queries, rotated, oldest first. Query head h belongs to KV
            head `h // (q_heads // kv_heads)`. Fewer than the policy asked for where the row is younger.
        query_positions: `[w]` int64, ascending.
        attention_mass: `[kv_heads, slots]` fp32, as `accumulated_attention` counts it.
        observed: how many queries `attention_mass` holds: the last so many of the row.
        rotary: how the model rotates keys and queries.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    queries: Tensor | None = None
    query_positions: Tensor | None = None
    attention_mass: Tensor | None = None
    observed: int = 0
    rotary: Rotary | None = None

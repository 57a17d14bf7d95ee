"""Joins the parts of queries whose slots were cut into several items, in the order of the slots."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvikk.attention.gpu.attend import Partials, Tile
from kvikk.attention.gpu.planner import MERGE_FIELDS, WorkList
from kvikk.attention.gpu.running import join_part
from kvikk.models.gpu.launch import overlapping, wait_for_inputs

ROWS_AT_ONCE = 8
"""Programs that share the rows of a merge; most merges of a grid do not exist, and each of their programs costs."""
PARTS_AT_ONCE = 16
"""Parts that are loaded together; of a fixed number, as it sets the order of the sum."""


def merge_items(
    work: WorkList,
    partials: Partials,
    layer: int,
    out: Tensor,
    *,
    tile: Tile,
    group: int,
    lse: Tensor | None = None,
) -> None:
    """Write the outputs of all queries that have several items.

    Args:
        work: as computed by `attend_items`.
        partials: what it left.
        layer: which layer.
        out: `[tokens, q_heads, head_dim]`, contiguous.
        tile: with which the items were computed.
        group: query heads of a KV head.
        lse: `[tokens, q_heads]` fp32 for the natural log-sum-exp; None: not wanted.
    """
    plan = layer if work.merges.shape[0] > 1 else 0
    _, q_heads, head_dim = out.shape
    used = partials.sums.shape[1]
    _merge[(work.merges.shape[1], min(used, ROWS_AT_ONCE))](
        out, out if lse is None else lse, partials.sums, partials.states, work.merges[plan],
        Q_HEADS=q_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), USED=used,
        PARTS=PARTS_AT_ONCE, RECORD=MERGE_FIELDS, IN_ORDER=tile.part > 0, HAS_LSE=lse is not None,
        num_warps=4, **overlapping(out.device),
    )  # fmt: skip


@triton.jit
def _merge(
    out, lse, partial_sums, partial_states, merges,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, USED: tl.constexpr,
    PARTS: tl.constexpr, RECORD: tl.constexpr, IN_ORDER: tl.constexpr, HAS_LSE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    merge = merges + tl.program_id(0) * RECORD
    first = tl.load(merge).to(tl.int64)
    token = tl.load(merge + 1)
    head = tl.load(merge + 2)
    queries = tl.load(merge + 3)
    splits = tl.load(merge + 4)
    wait_for_inputs(OVERLAP)
    for row in range(tl.program_id(1), queries * GROUP, tl.num_programs(1)):
        number = tl.arange(0, BLOCK_D)
        states = partial_states + (first * USED + row) * 2
        sources = partial_sums + (first * USED + row) * HEAD_DIM
        sums = tl.zeros((BLOCK_D,), dtype=tl.float32)
        if IN_ORDER:
            largest = tl.full((), float("-inf"), dtype=tl.float32)
            weight_sum = tl.zeros((), dtype=tl.float32)
            for base in range(0, splits, PARTS):
                for step in tl.static_range(PARTS):
                    at = (base + step) * USED
                    is_part = base + step < splits
                    part_largest = tl.load(states + at * 2, mask=is_part, other=float("-inf"))
                    part_weight = tl.load(states + at * 2 + 1, mask=is_part, other=0.0)
                    width = tl.where(is_part & (part_weight > 0.0), HEAD_DIM, 0)  # what is left out may be NaN
                    part = tl.load(sources + at * HEAD_DIM + number, mask=number < width, other=0.0)
                    sums, largest, weight_sum = join_part(
                        sums, largest, weight_sum, part, part_largest, part_weight, -1
                    )
        else:
            part = tl.arange(0, PARTS)
            tops = tl.full((PARTS,), float("-inf"), dtype=tl.float32)
            for base in range(0, splits, PARTS):
                is_part = base + part < splits
                found = tl.load(states + (base + part) * (USED * 2), mask=is_part, other=float("-inf"))
                tops = tl.maximum(tops, found)
            largest = tl.max(tops, axis=0)
            origin = tl.where(largest == float("-inf"), 0.0, largest)
            weight_sums = tl.zeros((PARTS,), dtype=tl.float32)
            for base in range(0, splits, PARTS):
                is_part = base + part < splits
                at = (base + part) * USED
                found = tl.load(states + at * 2, mask=is_part, other=float("-inf"))
                weights = tl.load(states + at * 2 + 1, mask=is_part, other=0.0)
                factor = tl.exp2(found - origin)
                real = (is_part & (weights > 0.0))[:, None] & (number < HEAD_DIM)[None, :]
                parts = tl.load(sources + (at * HEAD_DIM)[:, None] + number[None, :], mask=real, other=0.0)
                sums += tl.sum(parts * factor[:, None], axis=0)
                weight_sums += weights * factor
            weight_sum = tl.sum(weight_sums, axis=0)
        divisor = tl.where(weight_sum == 0.0, 1.0, weight_sum)
        place = (token + row // GROUP).to(tl.int64) * Q_HEADS + head * GROUP + row % GROUP
        tl.store(out + place * HEAD_DIM + number, (sums / divisor).to(out.dtype.element_ty), mask=number < HEAD_DIM)
        if HAS_LSE:
            tl.store(lse + place, (largest + tl.log2(divisor)) * 0.6931471805599453)

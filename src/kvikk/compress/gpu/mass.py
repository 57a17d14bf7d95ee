"""How much attention each slot is given, without the weights lying in memory: see `compress.attending`.

A query's weights are known once all its logits are, so the keys are read twice: for the log-sum-exp of each query, then
for the sum over queries. Logits are products of numbers as stored, summed in fp32; of fp32 in three products of tf32,
which is nearly as exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.compress.slots import LayerSlots

ROWS, SLOTS = 32, 64
"""Of a tile: queries of all query heads of a KV head, and keys."""
SPLIT_SLOTS, MAX_SPLITS = 2048, 16
"""A query's log-sum-exp is taken of so many slots at a time, or of more where that were too many parts."""
LOG2_E = 1.4426950408889634


def accumulated_attention(
    queries: Tensor,
    query_positions: Tensor,
    keys: Tensor,
    slots: LayerSlots,
    *,
    scale: float,
    share: float = 1.0,
    only_older: bool = False,
) -> Tensor:
    """The attention mass of each slot, as `attending.accumulated_attention` gives it.

    Args:
        queries: `[q_heads, w, head_dim]`.
        query_positions: `[w]` int64.
        keys: `[kv_heads, slots, head_dim]`, of the same dtype or fp32.
        slots: which token each slot holds.
        scale: of the logits.
        share: of each mass that is wanted.
        only_older: 0 for slots that are not older than all queries.
    """
    (q_heads, window, head_dim), (kv_heads, columns, _) = queries.shape, keys.shape
    group = q_heads // kv_heads
    rows = group * window
    span = max(SPLIT_SLOTS, triton.cdiv(triton.cdiv(columns, MAX_SPLITS), SLOTS) * SLOTS)
    splits = triton.cdiv(columns, span)
    mass = torch.empty((kv_heads, columns), dtype=torch.float32, device=keys.device)
    parts = torch.empty((splits, kv_heads, rows), dtype=torch.float32, device=keys.device)
    inputs = (
        queries.contiguous(), query_positions.contiguous(), keys.contiguous(), slots.positions.contiguous(),
        slots.live.contiguous(), parts,
    )  # fmt: skip
    sizes = {
        "HEAD_DIM": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim)), "ROWS": ROWS, "SLOTS": SLOTS,
        "WIDE": torch.float32 in (queries.dtype, keys.dtype), "num_warps": 4,
    }  # fmt: skip
    _log_sums[(triton.cdiv(rows, ROWS), splits, kv_heads)](
        *inputs, scale * LOG2_E, columns, window, group, span, **sizes
    )
    _masses[(triton.cdiv(columns, SLOTS), kv_heads)](
        *inputs, mass, scale * LOG2_E, share, columns, window, group, splits,
        SPLITS=triton.next_power_of_2(splits), ONLY_OLDER=only_older, **sizes,
    )  # fmt: skip
    return mass


@triton.jit
def _logits(
    queries, query_positions, keys, positions, live, scale, lane, first_row, first_slot, slots, window, group,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Of a tile of one KV head: logits in base 2 `[ROWS, SLOTS]`, and which of them are seen."""
    row, slot, number = first_row + tl.arange(0, ROWS), first_slot + tl.arange(0, SLOTS), tl.arange(0, BLOCK_D)
    is_row, is_slot, is_number = row < group * window, slot < slots, number < HEAD_DIM
    query, key = lane * group * window + row, lane * slots + slot
    q = tl.load(
        queries + query[:, None] * HEAD_DIM + number[None, :], mask=is_row[:, None] & is_number[None, :], other=0.0
    )
    k = tl.load(keys + key[None, :] * HEAD_DIM + number[:, None], mask=is_slot[None, :] & is_number[:, None], other=0.0)
    if WIDE:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    logits = tl.dot(q, k, input_precision="tf32x3")
    limit = tl.load(query_positions + row % window, mask=is_row, other=-1)
    position = tl.load(positions + key, mask=is_slot, other=0)
    is_live = tl.load(live + key, mask=is_slot, other=0) != 0
    return logits * scale, is_row[:, None] & is_live[None, :] & (position[None, :] <= limit[:, None])


@triton.jit(do_not_specialize=["slots", "window", "group", "span"])
def _log_sums(
    queries, query_positions, keys, positions, live, parts, scale, slots, window, group, span,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    first_row, split, lane = tl.program_id(0) * ROWS, tl.program_id(1), tl.program_id(2).to(tl.int64)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for first_slot in range(split * span, tl.minimum(split * span + span, slots), SLOTS):
        logits, seen = _logits(
            queries, query_positions, keys, positions, live, scale, lane, first_row, first_slot, slots, window, group,
            HEAD_DIM, BLOCK_D, ROWS, SLOTS, WIDE,
        )  # fmt: skip
        before = top
        top = tl.maximum(top, tl.max(tl.where(seen, logits, float("-inf")), axis=1))
        shift = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.where(seen, tl.exp2(logits - shift[:, None]), 0.0)
        total = total * tl.exp2(before - shift) + tl.sum(weights, axis=1)
    row = first_row + tl.arange(0, ROWS)
    rows = group * window  # the largest weight of a sum is 1, where anything is seen
    tl.store(
        parts + (split * tl.num_programs(2) + lane) * rows + row, top + tl.log2(tl.maximum(total, 1.0)), mask=row < rows
    )


@triton.jit(do_not_specialize=["slots", "window", "group", "splits"])
def _masses(
    queries, query_positions, keys, positions, live, parts, mass, scale, share, slots, window, group, splits,
    SPLITS: tl.constexpr, ONLY_OLDER: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    first_slot, lane = tl.program_id(0) * SLOTS, tl.program_id(1).to(tl.int64)
    rows = group * window
    split = tl.arange(0, SPLITS)[:, None]
    total = tl.zeros((SLOTS,), dtype=tl.float32)
    for first_row in range(0, rows, ROWS):
        row = (first_row + tl.arange(0, ROWS))[None, :]
        part = tl.load(
            parts + (split * tl.num_programs(1) + lane) * rows + row, mask=(split < splits) & (row < rows),
            other=float("-inf"),
        )  # fmt: skip
        top = tl.max(part, axis=0)
        top = tl.where(top == float("-inf"), 0.0, top)
        log_sum = top + tl.log2(tl.maximum(tl.sum(tl.exp2(part - top[None, :]), axis=0), 1.0))
        logits, seen = _logits(
            queries, query_positions, keys, positions, live, scale, lane, first_row, first_slot, slots, window, group,
            HEAD_DIM, BLOCK_D, ROWS, SLOTS, WIDE,
        )  # fmt: skip
        total += tl.sum(tl.where(seen, tl.exp2(logits - log_sum[:, None]), 0.0), axis=0)
    slot = first_slot + tl.arange(0, SLOTS)
    if ONLY_OLDER:
        position = tl.load(positions + lane * slots + slot, mask=slot < slots, other=0)
        total = tl.where(position < tl.load(query_positions), total, 0.0)
    tl.store(mass + lane * slots + slot, total / group * share, mask=slot < slots)

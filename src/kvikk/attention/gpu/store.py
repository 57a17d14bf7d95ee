"""What lies between the QKV projection and attention, in one kernel: Q/K norm, RoPE, and the (quantised) KV write."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvikk.attention.gpu.rounding import halves, over_scales, turn_rows
from kvikk.memory.int4 import turn_width
from kvikk.memory.quantise import LARGEST
from kvikk.memory.storage import KVStore
from kvikk.models.gpu.launch import overlapping, wait_for_inputs
from kvikk.models.protocol import HeadNorm

HEADS_AT_ONCE = 4


def store_heads(
    store: KVStore,
    layer: int,
    heads: Tensor,
    slots: Tensor,
    q_out: Tensor,
    *,
    rope: Tensor | None = None,
    positions: Tensor | None = None,
    norm: HeadNorm | None = None,
) -> None:
    """Normalise and rotate Q and K of a layer, store K and V, and leave Q for attention.

    Rounding is that of `models.llama.rotate`: the product with the cosine is rounded to the table's dtype, the other is
    added in one step.

    Args:
        store: the pool.
        layer: which layer.
        heads: `[tokens, q_heads + 2 * kv_heads, head_dim]`, Q then K then V, heads and numbers contiguous.
        slots: `[tokens]` int64, `block * page_size + offset`; -1: K and V of the token are not stored.
        q_out: `[tokens, q_heads, head_dim]`, contiguous, in the dtype of `heads`; its own memory.
        rope: `[positions, 2, rotary_dim]`, cos and signed sin; None: the heads are rotated already.
        positions: `[tokens]` int64, needed with `rope`.
        norm: None: no norm of heads.
    """
    geometry = store.geometry
    tokens, all_heads, head_dim = heads.shape
    kv_heads = geometry.kv_heads[layer]
    q_heads = all_heads - 2 * kv_heads
    if q_out.shape != (tokens, q_heads, head_dim) or head_dim != geometry.head_dim or not q_out.is_contiguous():
        raise ValueError(f"heads {tuple(heads.shape)} and q_out {tuple(q_out.shape)} do not fit layer {layer}")
    if heads.stride()[1:] != (head_dim, 1):
        raise ValueError("heads must be contiguous within a token")
    if (rope is None) != (positions is None):
        raise ValueError("rope and positions go together")
    _store[(tokens, triton.cdiv(all_heads, HEADS_AT_ONCE))](
        heads, heads.stride(0), slots, q_out, store.frames, store.frames if store.scales is None else store.scales,
        geometry.frames_per_block, geometry.first_frame[layer],
        heads if rope is None else rope, slots if positions is None else positions,
        heads if norm is None else norm.q_weight, heads if norm is None else norm.k_weight,
        0.0 if norm is None else norm.eps,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        ROTARY=0 if rope is None else rope.shape[2], PAGE=geometry.page_size, HEADS=HEADS_AT_ONCE,
        FRAME=geometry.frame_bytes // geometry.stored.itemsize, WIDTH=geometry.row_elements,
        SCALES=geometry.row_scales, LARGEST=LARGEST.get(geometry.stored, 0.0), TURN=turn_width(head_dim),
        HAS_NORM=norm is not None, WIDE=norm is not None and norm.wide, num_warps=4,
        **overlapping(heads.device),
    )  # fmt: skip


@triton.jit
def _normed(x, scale, weight, dtype, WIDE: tl.constexpr):
    if WIDE:
        return (x * scale * weight).to(dtype).to(tl.float32)
    return ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def _store(
    heads, stride, slots, q_out, pool, scales, frames_per_block, first_frame, rope, positions, q_weight, k_weight, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr, WIDE: tl.constexpr,
    FRAME: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr, LARGEST: tl.constexpr, TURN: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    number = tl.arange(0, BLOCK_D)
    real = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & (number < HEAD_DIM)[None, :]
    is_query = head < Q_HEADS
    is_value = head >= Q_HEADS + KV_HEADS
    slot = tl.load(slots + token)
    wait_for_inputs(OVERLAP)
    source = heads + token * stride + head[:, None] * HEAD_DIM
    raw = tl.load(source + number[None, :], mask=real, other=0.0)
    dtype = raw.dtype
    x = raw.to(tl.float32)
    scale = x
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        q_w = tl.load(q_weight + number, mask=number < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        k_w = tl.load(k_weight + number, mask=number < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        x = tl.where(is_value[:, None], x, _normed(x, scale, tl.where(is_query[:, None], q_w, k_w), dtype, WIDE))
    if ROTARY > 0:
        half: tl.constexpr = ROTARY // 2
        partner = tl.where(number < half, number + half, number - half)
        turns = number < ROTARY
        other = tl.load(source + partner[None, :], mask=real & turns[None, :], other=0.0).to(tl.float32)
        if HAS_NORM:
            q_w = tl.load(q_weight + partner, mask=turns, other=0.0).to(tl.float32)[None, :]
            k_w = tl.load(k_weight + partner, mask=turns, other=0.0).to(tl.float32)[None, :]
            other = _normed(other, scale, tl.where(is_query[:, None], q_w, k_w), dtype, WIDE)
        angle = rope + tl.load(positions + token) * (2 * ROTARY) + number
        cos = tl.load(angle, mask=turns, other=1.0)
        sin = tl.load(angle + ROTARY, mask=turns, other=0.0).to(tl.float32)[None, :]
        straight = (x * cos.to(tl.float32)[None, :]).to(cos.dtype).to(tl.float32)
        turned = (straight + other * sin).to(cos.dtype).to(tl.float32)
        x = tl.where(is_value[:, None] | (number >= ROTARY)[None, :], x, turned)
    result = x.to(dtype)
    tl.store(
        q_out + (token * Q_HEADS + head)[:, None] * HEAD_DIM + number[None, :], result, mask=real & is_query[:, None]
    )
    lane = head - Q_HEADS - tl.where(is_value, KV_HEADS, 0)
    frame = slot // PAGE * frames_per_block + first_frame + lane
    row = tl.where(is_value, PAGE, 0) + slot % PAGE
    target = pool + (frame * FRAME + row * WIDTH)[:, None] + number[None, :]
    is_stored = (tl.where(slot < 0, -1, head) >= Q_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
    stored = is_stored[:, None] & (number < WIDTH)[None, :]
    if SCALES > 0:
        scale_at = scales + frame * (FRAME * pool.dtype.element_ty.primitive_bitwidth // 32) + row * SCALES
    if SCALES == 2:
        wide = result.to(tl.float32)
        wide = tl.where(is_value[:, None], wide, turn_rows(wide, HEADS, BLOCK_D, TURN))
        numbers, low_scale, high_scale = halves(wide, HEADS, HEAD_DIM, BLOCK_D)
        tl.store(target, numbers, mask=stored)
        tl.store(scale_at, low_scale, mask=is_stored)
        tl.store(scale_at + 1, high_scale, mask=is_stored)
    elif SCALES == 1:
        numbers, row_scale = over_scales(result.to(tl.float32), LARGEST)
        if pool.dtype.element_ty == tl.int8:
            numbers = (numbers + 12582912.0) - 12582912.0  # adding 1.5 * 2 ** 23 rounds, halves to even
        tl.store(target, numbers.to(pool.dtype.element_ty), mask=stored)
        tl.store(scale_at, row_scale, mask=is_stored)
    else:
        tl.store(target, result.to(pool.dtype.element_ty), mask=stored)

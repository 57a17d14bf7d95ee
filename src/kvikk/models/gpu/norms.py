"""RMS norm of rows, alone and after a residual sum, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.models.gpu.launch import overlapping, wait_for_inputs
from kvikk.models.gpu.layout import aligned, is_aligned

NUMBERS_PER_WARP = 256
"""Of a row: eight to a thread, one load of 16 bytes in the 16-bit types."""
MOST_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, wide: bool) -> Tensor:
    """RMS norm over the last dimension, as `LlamaModel` computes it in torch, up to the order of its fp32 sum.

    Args:
        x: `[rows, width]`, or `[rows, heads, width]`, a norm for each head; numbers contiguous, the rest strided.
        weight: `[width]`, in x's dtype.
        eps: added to the mean square.
        wide: multiply by the weight in fp32 and round once, instead of rounding before.

    Returns:
        Contiguous, of x's shape and dtype.

    Raises:
        ValueError: the shapes or dtypes do not fit.
    """
    if x.dim() not in (2, 3):
        raise ValueError(f"x of shape {tuple(x.shape)}: a norm takes [rows, width] or [rows, heads, width]")
    _check_weight(x, weight)
    x = aligned(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    groups = x.shape[1] if x.dim() == 3 else 1
    _launch(x, x, weight, out, (x.shape[0], groups), (x.stride(0), x.stride(-2)), eps=eps, add=False, wide=wide)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, *, eps: float, wide: bool) -> Tensor:
    """Add `delta` to x in place, rounding to x's dtype, and return the RMS norm of the sum.

    Args:
        x: `[rows, width]`, contiguous and aligned to 16 bytes; it is overwritten.
        delta: of x's shape and dtype.
        weight, eps, wide: as of `rms_norm`.

    Returns:
        `[rows, width]` in x's dtype.

    Raises:
        ValueError: the shapes or dtypes do not fit, or x is not laid out so.
    """
    if x.dim() != 2 or delta.shape != x.shape or delta.dtype != x.dtype:
        raise ValueError(f"{delta.dtype} {tuple(delta.shape)} cannot be added to {x.dtype} {tuple(x.shape)}")
    if not x.is_contiguous() or not is_aligned(x):
        raise ValueError("x is overwritten, so it must be contiguous and begin at a multiple of 16 bytes")
    _check_weight(x, weight)
    delta = aligned(delta.contiguous())
    out = torch.empty_like(x)
    _launch(x, delta, weight, out, (x.shape[0], 1), (x.shape[1], 0), eps=eps, add=True, wide=wide)
    return out


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"a {weight.dtype} weight of shape {tuple(weight.shape)} does not fit {x.dtype} rows of {x.shape[-1]}"
        )


def _launch(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    out: Tensor,
    grid: tuple[int, int],
    strides: tuple[int, int],
    *,
    eps: float,
    add: bool,
    wide: bool,
) -> None:
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    warps = max(1, min(MOST_WARPS, block // NUMBERS_PER_WARP))
    _norm[grid](
        x, delta, aligned(weight), out, *strides, eps, WIDTH=width, BLOCK=block, ADD=add, WIDE=wide, num_warps=warps,
        **overlapping(x.device),
    )  # fmt: skip


@triton.jit
def _norm(
    x, delta, weight, out, row_stride, group_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    number = tl.arange(0, BLOCK)
    real = number < WIDTH
    place = (row * tl.num_programs(1) + group) * WIDTH + number
    source = x + row * row_stride + group * group_stride + number
    dtype = x.dtype.element_ty
    factor = tl.load(weight + number, mask=real, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    value = tl.load(source, mask=real, other=0.0).to(tl.float32)
    if ADD:
        total = (value + tl.load(delta + place, mask=real, other=0.0).to(tl.float32)).to(dtype)
        tl.store(source, total, mask=real)
        value = total.to(tl.float32)
    mean = tl.div_rn(tl.sum(value * value, axis=0), WIDTH * 1.0)
    scaled = value * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    if not WIDE:
        scaled = scaled.to(dtype).to(tl.float32)
    tl.store(out + place, (scaled * factor).to(dtype), mask=real)

"""The gate of the MLP in one pass over what its projection returns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.models.gpu.launch import overlapping, wait_for_inputs

BLOCK = 1024


def silu_gate(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, with silu's result rounded to the dtype before the product, as torch does.

    Args:
        gate_up: `[rows, 2 * ffn]`, contiguous: gates, then what they gate.

    Returns:
        `[rows, ffn]` in the same dtype.

    Raises:
        ValueError: it is not of that shape, or strided.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"a gate takes contiguous [rows, 2 * ffn], not {tuple(gate_up.shape)} {gate_up.stride()}")
    rows, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, ffn), dtype=gate_up.dtype, device=gate_up.device)
    _gate[(rows, triton.cdiv(ffn, BLOCK))](gate_up, out, ffn, BLOCK=BLOCK, num_warps=4, **overlapping(out.device))
    return out


@triton.jit
def _gate(gate_up, out, ffn, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = number < ffn
    wait_for_inputs(OVERLAP)
    source = gate_up + row * 2 * ffn + number
    gate = tl.load(source, mask=real, other=0.0).to(tl.float32)
    up = tl.load(source + ffn, mask=real, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * ffn + number, (silu * up).to(dtype), mask=real)

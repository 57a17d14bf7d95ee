"""Copies scattered rows of bytes into the pool, by a kernel: from pinned host memory or from the device itself.

A kernel reads pinned memory through the link at the full rate from rows of some KiB on, needs no call for each row, and
its indices are data, so it can stand inside a captured graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS_AT_ONCE = 1024


def gather_rows(source: Tensor, target: Tensor, source_rows: Tensor, target_rows: Tensor, count: Tensor) -> None:
    """Copy `source[source_rows[i]]` to `target[target_rows[i]]` for every i below `count`.

    Args:
        source: `[rows, width]` int32, contiguous; on the device, or pinned host memory.
        target: `[rows, width]` int32, contiguous, on the device.
        source_rows, target_rows: `[capacity]` int64, on the device.
        count: `[1]` int32, on the device: how many are copied.
    """
    if source.shape[1] != target.shape[1] or source.dtype != torch.int32 or target.dtype != torch.int32:
        raise ValueError(
            f"rows of {source.shape[1]} and {target.shape[1]} numbers: both must be int32 and equally wide"
        )
    if target.device.type == "cuda" and source.device.type == "cpu" and not source.is_pinned():
        raise ValueError("a kernel cannot read pageable host memory: allocate the source with pin_memory=True")
    width = source.shape[1]
    grid = (source_rows.shape[0], triton.cdiv(width, WORDS_AT_ONCE))
    _gather[grid](source, target, source_rows, target_rows, count, width, BLOCK=WORDS_AT_ONCE, num_warps=4)


@triton.jit
def _gather(source, target, source_rows, target_rows, count, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(count):
        word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        start = tl.load(source_rows + row) * width
        value = tl.load(source + start + word, mask=word < width)
        tl.store(target + tl.load(target_rows + row) * width + word, value, mask=word < width)

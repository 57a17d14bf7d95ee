"""Copies scattered rows of words between the device and pinned host memory, by a kernel.

A kernel reads and writes pinned memory through the link at its full rate from rows of some KiB on, and takes one call
for any number of rows, where the copy engines take one for each. Few programs are enough to keep the link busy, so that
the steps that run beside it keep nearly all of the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS_AT_ONCE = 4096
"""Of a program: 16 KiB are under way at once."""
PROGRAMS = 16
"""256 KiB under way in all: what a link of 64 GB/s carries in 4 us."""


def copy_rows(
    source: Tensor, target: Tensor, source_rows: Tensor, target_rows: Tensor, *, programs: int = PROGRAMS
) -> None:
    """Copy `source[source_rows[i]]` to `target[target_rows[i]]` for every i.

    Args:
        source, target: `[rows, width]` int32, contiguous; each on the device, or in pinned host memory.
        source_rows, target_rows: `[copies]` int64, on the device.
        programs: that share the work, at the most.

    Raises:
        ValueError: the widths or types differ, or host memory is not pinned.
    """
    if source.shape[1] != target.shape[1] or source.dtype != torch.int32 or target.dtype != torch.int32:
        raise ValueError(
            f"rows of {source.shape[1]} and {target.shape[1]} numbers: both must be int32 and equally wide"
        )
    if source_rows.device.type == "cuda" and not all(x.is_cuda or x.is_pinned() for x in (source, target)):
        raise ValueError("a kernel cannot reach pageable host memory: have it pinned")
    copies, width = len(source_rows), source.shape[1]
    if copies:
        _copy[(min(programs, copies * triton.cdiv(width, WORDS_AT_ONCE)),)](
            source, target, source_rows, target_rows, copies, width, WORDS=WORDS_AT_ONCE, num_warps=8
        )  # fmt: skip


@triton.jit(do_not_specialize=["copies"])
def _copy(source, target, source_rows, target_rows, copies, width, WORDS: tl.constexpr):
    pieces = tl.cdiv(width, WORDS)
    for item in range(tl.program_id(0), copies * pieces, tl.num_programs(0)):
        row = item // pieces
        word = item % pieces * WORDS + tl.arange(0, WORDS)
        value = tl.load(source + tl.load(source_rows + row) * width + word, mask=word < width)
        tl.store(target + tl.load(target_rows + row) * width + word, value, mask=word < width)

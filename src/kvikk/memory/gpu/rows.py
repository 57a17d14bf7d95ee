"""Copies scattered rows of words, by a kernel: on the device, where blocks are gathered for the link to the host.

It reaches pinned host memory, too, at the link's full rate from rows of some KiB on. But what else runs on the device
then waits for its memory (`benchmarks/host_link.py`), so that nothing in the engine does so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS_AT_ONCE = 4096
"""Of a program: 16 KiB are under way at once."""
PROGRAMS = 64
"""1 MiB under way in all: at 2 us to the memory and back ten times what the link carries, and half of a large GPU."""


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


@triton.jit(do_not_specialize=["copies"], do_not_specialize_on_alignment=["source_rows", "target_rows"])
def _copy(source, target, source_rows, target_rows, copies, width, WORDS: tl.constexpr):
    pieces = tl.cdiv(width, WORDS)
    for item in range(tl.program_id(0), copies * pieces, tl.num_programs(0)):
        row = item // pieces
        word = item % pieces * WORDS + tl.arange(0, WORDS)
        value = tl.load(source + tl.load(source_rows + row) * width + word, mask=word < width)
        tl.store(target + tl.load(target_rows + row) * width + word, value, mask=word < width)

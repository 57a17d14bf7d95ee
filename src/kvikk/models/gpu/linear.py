"""The product of `exact` numerics: one tile and one order of summation for a weight, whatever the number of rows.

A product sums over `in` in parts, each part in blocks from left to right on the matrix units, and the parts in order in
fp32. The number of parts comes from the weight's shape alone. Few rows do not fill a GPU, so each part is a program of
its own and a second kernel adds them up; with many rows one program computes the parts of its tile in turn and adds
them up itself, which spares writing them. Both are the same additions in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvikk.models.gpu.layout import aligned
from kvikk.models.projection import Projection

PROGRAMS: Final = 264
"""Programs that fill a GPU: two on each of 132 multiprocessors. A constant, for the bits must not depend on the GPU."""
SUMMED_AT_ONCE: Final = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program computes at a time: `rows` by `features` numbers, `depth` products deep."""

    rows: int
    features: int
    depth: int
    warps: int
    stages: int


HALF_TILE: Final = Tile(rows=64, features=128, depth=64, warps=4, stages=4)
"""Of the 16-bit types, on the matrix units: one `wgmma` of 64 rows."""
SINGLE_TILE: Final = Tile(rows=64, features=64, depth=16, warps=4, stages=3)
"""Of fp32, in plain multiply-adds: a thread holds its share of both operands of a block in registers."""
TILES: Final = {torch.bfloat16: HALF_TILE, torch.float16: HALF_TILE, torch.float32: SINGLE_TILE}


@dataclass(frozen=True, slots=True)
class ExactProjection(Projection):
    """A linear map that gives a row the same bits at every number of rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        return exact_linear(x, self.weight, self.bias)


def parts_of(features: int, width: int, tile: Tile) -> tuple[int, int]:
    """How a weight `[features, width]` is summed: in how many parts, of how many blocks (the last may have fewer)."""
    blocks = triton.cdiv(width, tile.depth)
    wanted = triton.cdiv(PROGRAMS, triton.cdiv(features, tile.features))
    part_blocks = triton.cdiv(blocks, min(wanted, blocks))
    return triton.cdiv(blocks, part_blocks), part_blocks


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` with fp32 sums, rounded once; a row's bits depend on that row and the weight only.

    Args:
        x: `[rows, in]`, bf16, fp16 or fp32 (without tf32).
        weight: `[out, in]`, contiguous, in x's dtype.
        bias: `[out]`, in x's dtype, or None.

    Returns:
        `[rows, out]` in x's dtype.

    Raises:
        ValueError: the shapes or dtypes do not fit.
    """
    _check(x, weight, bias)
    x = aligned(x.contiguous())
    (rows, width), features = x.shape, weight.shape[0]
    tile = TILES[x.dtype]
    parts, part_blocks = parts_of(features, width, tile)
    tiles = (triton.cdiv(rows, tile.rows), triton.cdiv(features, tile.features))
    together = parts == 1 or tiles[0] * tiles[1] >= PROGRAMS
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    sums = out if together else torch.empty((parts, rows, features), dtype=torch.float32, device=x.device)
    added = out if bias is None else bias
    _product[(*tiles, 1 if together else parts)](
        x, weight, added, sums, rows, width, features, parts, part_blocks,
        TOGETHER=together, HAS_BIAS=bias is not None,
        ROWS=tile.rows, FEATURES=tile.features, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if not together:
        _add_parts[(rows, triton.cdiv(features, SUMMED_AT_ONCE))](
            sums, added, out, rows, features, parts, HAS_BIAS=bias is not None, BLOCK=SUMMED_AT_ONCE, num_warps=4
        )
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dtype not in TILES or weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(
            f"x {x.dtype}, weight {weight.dtype}: both, and the bias, must be one of {', '.join(map(str, TILES))}"
        )
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or not weight.is_contiguous():
        raise ValueError(f"{tuple(x.shape)} times {tuple(weight.shape)}: it takes [rows, in] and contiguous [out, in]")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit a weight of {tuple(weight.shape)}")


@triton.jit(do_not_specialize=["rows", "parts", "part_blocks"])
def _product(
    x, weight, bias, out, rows, width, features, parts, part_blocks,
    TOGETHER: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """`parts` and `part_blocks` stay numbers at run time: a loop that the compiler knows to turn once it dissolves, and
    then it would add a part's products onto the sum of the parts before, one by one."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    real = (row < rows)[:, None] & (feature < features)[None, :]
    if TOGETHER:
        total = tl.zeros((ROWS, FEATURES), dtype=tl.float32)
        for part in range(parts):
            total += _part_sum(x, weight, row, feature, rows, width, features, part, part_blocks, ROWS, FEATURES, DEPTH)
        if HAS_BIAS:
            total += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[None, :]
        place = row[:, None] * features + feature[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=real)
    else:
        part = tl.program_id(2)
        total = _part_sum(x, weight, row, feature, rows, width, features, part, part_blocks, ROWS, FEATURES, DEPTH)
        place = (part.to(tl.int64) * rows + row)[:, None] * features + feature[None, :]
        tl.store(out + place, total, mask=real)


@triton.jit
def _part_sum(
    x, weight, row, feature, rows, width, features, part, part_blocks,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """The sum of one part: `[ROWS, FEATURES]` fp32."""
    total = tl.zeros((ROWS, FEATURES), dtype=tl.float32)
    first = part * part_blocks
    for block in range(first, tl.minimum(first + part_blocks, tl.cdiv(width, DEPTH))):
        number = block * DEPTH + tl.arange(0, DEPTH)
        there = number < width
        xs = tl.load(x + row[:, None] * width + number[None, :], mask=(row < rows)[:, None] & there[None, :], other=0.0)
        source = weight + feature[None, :] * width + number[:, None]
        ws = tl.load(source, mask=(feature < features)[None, :] & there[:, None], other=0.0)
        total = tl.dot(xs, ws, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows", "parts"])
def _add_parts(sums, bias, out, rows, features, parts, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = feature < features
    size = rows.to(tl.int64) * features
    place = row * features + feature
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(parts):
        total += tl.load(sums + part * size + place, mask=real, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real)

"""Linear maps, and how a CPU holds their weights: in oneDNN's own layout.

Measured on two Zen cores, SmolLM2's layers: packed weights take 0.4 to 0.6 of the time of `F.linear` at 1 to 32 rows,
bf16 and fp32, and a row's result is the same bit for bit at every number of rows from two on. A single row may be
summed in another order, where weights are wide: in fp32 it is computed twice, side by side, in bf16 only for `exact`
numerics. `F.linear` in fp32 sums one to eleven rows in several orders. None of this is promised by the libraries, so
`exact` numerics does not trust it but tries each shape of weight when a model is loaded (`steady`).
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kvikk.errors import ModelError

PACKED_ROWS: Final = 8
"""Rows that the layout is chosen for; it serves any number."""
MOST_FILLED: Final = 32
"""Rows that a product is filled up to at most."""
TRIED_ROWS: Final = (*range(1, MOST_FILLED + 1), 37, 48, 63, 64, 65, 90, 96, 127, 128, 129, 192, 255, 256)
"""Numbers of rows at which a row's result is compared: each that may have to be filled up, then some larger ones that
divide into blocks of rows, or do not."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear map: `weight` `[out, in]`, `bias` `[out]` or None."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        return F.linear(x, self.weight, self.bias)

    def tensors(self) -> dict[str, Tensor]:
        """Weight and bias by name."""
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}


@dataclass(frozen=True, slots=True)
class PackedProjection:
    """A linear map whose weight oneDNN has reordered; nothing else can read it any more."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        if x.shape[0] == 1 and x.dtype == torch.float32:
            return _linear(x.expand(2, -1).contiguous(), self.weight, self.bias)[:1]
        return _linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class SteadyProjection:
    """A linear map that gives a row the same bits at every number of rows: fewer than `least` are filled up with zeros.

    Made by `steady`, which finds out how many that are.
    """

    inner: Projection | PackedProjection
    least: int

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        rows = x.shape[0]
        if rows >= self.least:
            return self.inner(x)
        return self.inner(F.pad(x, (0, 0, 0, self.least - rows)))[:rows]


AnyProjection = Projection | PackedProjection | SteadyProjection


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return out


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN computes with this weight's dtype at full speed here."""
    if weight.device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    if not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack(projection: Projection) -> Projection | PackedProjection:
    """Reorder a projection's weight for oneDNN, where that is possible. The result is the same map."""
    if not can_pack(projection.weight):
        return projection
    weight = torch.ops.mkldnn._reorder_linear_weight(projection.weight, PACKED_ROWS)
    return PackedProjection(weight, projection.bias)


def steady(projection: Projection, found: dict[tuple[int, ...], int]) -> SteadyProjection:
    """Pack a projection, and make a row's bits independent of the other rows.

    Args:
        projection: as it was loaded.
        found: how many rows a shape of weight needs; read and added to, so that each shape is tried once.

    Raises:
        ModelError: at no number of rows do this machine's products become independent of it.
    """
    shape = tuple(projection.weight.shape)
    if shape not in found:
        found[shape] = least_rows(projection)
    return SteadyProjection(pack(projection), found[shape])


def least_rows(like: Projection) -> int:
    """From how many rows on a row's result is the same to the bit, whatever their number and its place among them.

    It is tried on numbers made for it: each sum is of pairs that cancel, so nothing but rounding is left of it, and
    another order of summing shows in nearly every result. In sums of ordinary numbers it would hide behind the
    rounding to bf16, and then show once in some thousand.

    Args:
        like: gives shape, dtype and layout; its own numbers are not used.

    Raises:
        ModelError: it still is not at `MOST_FILLED` rows.
    """
    out_features, in_features = like.weight.shape
    dtype, generator = like.weight.dtype, torch.Generator().manual_seed(0)
    order = torch.randperm(in_features, generator=generator)

    def halves(rows: int, sign: int) -> Tensor:
        half = torch.randn(rows, in_features // 2, generator=generator).to(dtype)
        return torch.cat((half, sign * half, half.new_zeros(rows, in_features % 2)), dim=1)[:, order].contiguous()

    product = pack(Projection(halves(out_features, 1), None if like.bias is None else torch.zeros_like(like.bias)))
    x = halves(TRIED_ROWS[-1], -1)
    whole = product(x)
    unlike = [
        rows
        for rows in TRIED_ROWS
        if not (torch.equal(product(x[:rows]), whole[:rows]) and torch.equal(product(x[-rows:]), whole[-rows:]))
    ]
    least = max(unlike, default=0) + 1
    if least > MOST_FILLED:
        raise ModelError(
            f"--numerics exact: {dtype} products with weights of {out_features} x {in_features} differ in their last "
            f"bits between {least - 1} rows and {TRIED_ROWS[-1]} on this machine, and at most {MOST_FILLED} rows are "
            "filled up: try another --dtype, or use --numerics fast"
        )
    return least

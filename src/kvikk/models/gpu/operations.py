"""The operations of a layer on a GPU, as `LlamaModel` calls them."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from kvikk.models.gpu.gate import silu_gate
from kvikk.models.gpu.norms import add_rms_norm, rms_norm


class GpuOperations:
    """Norms and the gate, for tensors of one dtype on a GPU and any number of rows. A row's bits depend on it alone.

    Args:
        eps: of every norm.
        wide: whether a norm rounds only after the multiplication by its weight.
    """

    kind: ClassVar[Literal["gpu"]] = "gpu"

    def __init__(self, *, eps: float, wide: bool) -> None:
        self.eps = eps
        self.wide = wide

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of `[rows, width]` or of each head of `[rows, heads, head_dim]`, which may be strided."""
        return rms_norm(x, weight, eps=self.eps, wide=self.wide)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """Add `delta` to x in place, and return the RMS norm of the sum; all `[rows, width]`."""
        return add_rms_norm(x, delta, weight, eps=self.eps, wide=self.wide)

    def gate(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `[rows, 2 * ffn]`, each rounded."""
        return silu_gate(gate_up)

"""What attention on a GPU is asked: rows of a batch as tensors on the device, in buffers whose addresses stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bodies:
    """The compressed part of rows: for each lane a run of frames of its own length. Lanes are layer-major.

    Args:
        frames: `[arena]` int32, frame ids.
        offsets: `[seats, lanes]` int32, where a lane's run begins in `frames`.
        lengths: `[seats, lanes]` int32, live slots of a lane; 0: the row has no body. The last frame may be part full.
    """

    frames: Tensor
    offsets: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows with one query each. A row is a body, if it has one, and then a uniform tail of whole blocks.

    Args:
        tables: `[seats, max_blocks]` int32, the block ids of each row's tail.
        seats: `[rows]` int32, which table each row of the batch has.
        lengths: `[rows]` int32, tail slots that each query attends to, its own token included; 0: a padded row.
        bodies: of the same seats; None when no row has one.
    """

    tables: Tensor
    seats: Tensor
    lengths: Tensor
    bodies: Bodies | None = None


@dataclass(frozen=True, slots=True)
class RunRows:
    """Runs of several queries at consecutive positions; the query at tail position p sees the body and tail 0..p.

    Args:
        tables: `[seats, max_blocks]` int32, as of `DecodeRows`.
        seats: `[runs]` int32.
        starts: `[runs]` int32, tail position of the first query.
        lengths: `[runs]` int32, queries; 0: a padded run.
        offsets: `[runs]` int32, the run's first token in the flattened step.
        bodies: as of `DecodeRows`.
    """

    tables: Tensor
    seats: Tensor
    starts: Tensor
    lengths: Tensor
    offsets: Tensor
    bodies: Bodies | None = None


class DecodeRoute(Protocol):
    """One way to compute a decode step's attention: plan once, then each layer."""

    @property
    def name(self) -> str:
        """As the cost model and the benchmarks know it."""
        ...

    def plan(self, rows: DecodeRows) -> None:
        """Prepare for the layers of one step. The rows' tensors must stay as they are until the last `attend`."""
        ...

    def attend(self, layer: int, q: Tensor, out: Tensor, *, scale: float) -> None:
        """Attend each row's query to its KV, which is stored already.

        Args:
            layer: which layer.
            q: `[rows, q_heads, head_dim]`, rotated, in the pool's dtype.
            out: the same shape and dtype; every row is written, padded ones with zeros.
            scale: factor on `q @ k`.
        """
        ...

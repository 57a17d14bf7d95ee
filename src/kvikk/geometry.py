"""How KV lies in memory: lanes, frames and blocks as numbers, per layer, without a tensor in sight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import torch

from kvikk.types import BlockId, FrameId

SCALE_BYTES: Final = 4
"""Of a scale: fp32."""


@dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """The shape of one block. Geometry is per layer: layers may differ in their number of KV heads.

    Args:
        kv_heads: KV heads of each layer.
        head_dim: width of one head's K, and of its V.
        page_size: slots (tokens) of one frame.
        dtype: of the model's K and V, and of its queries.
        quantised: what K and V are stored as, with a scale for each row of `head_dim` numbers; None: as `dtype`.

    Raises:
        ValueError: scales would not lie at multiples of their size.
    """

    kv_heads: tuple[int, ...]
    head_dim: int
    page_size: int
    dtype: torch.dtype
    quantised: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.quantised is not None and self.number_bytes % SCALE_BYTES:
            raise ValueError(f"pages of {self.page_size} slots of {self.head_dim} numbers cannot be {self.quantised}")

    @property
    def layers(self) -> int:
        """Attention layers of the model."""
        return len(self.kv_heads)

    @cached_property
    def first_frame(self) -> tuple[int, ...]:
        """Offset within a block of each layer's first frame."""
        return (0, *accumulate(self.kv_heads[:-1]))

    @property
    def frames_per_block(self) -> int:
        """Lanes of the model: the frames that make one block."""
        return sum(self.kv_heads)

    @property
    def stored(self) -> torch.dtype:
        """Of the numbers in a frame."""
        return self.quantised or self.dtype

    @property
    def format(self) -> str:
        """How K and V are stored, in a word, such as `bfloat16` or `int8`."""
        return str(self.stored).removeprefix("torch.")

    @property
    def frame_elements(self) -> int:
        """Numbers in one frame, scales not counted: K then V."""
        return 2 * self.page_size * self.head_dim

    @property
    def number_bytes(self) -> int:
        """Bytes of these numbers. Scales, where there are any, come behind them: `page_size` of K, then of V."""
        return self.frame_elements * self.stored.itemsize

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame."""
        scales = 0 if self.quantised is None else 2 * self.page_size
        return self.number_bytes + scales * SCALE_BYTES

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.frames_per_block * self.frame_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that one token takes over all lanes."""
        return self.block_bytes // self.page_size

    def frame(self, block: BlockId, layer: int, kv_head: int) -> FrameId:
        """The frame of a lane within a block."""
        return FrameId(block * self.frames_per_block + self.first_frame[layer] + kv_head)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

"""How KV lies in memory: lanes, frames and blocks as numbers, per layer, without a tensor in sight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from kvikk.types import BlockId, FrameId


@dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """The shape of one block. Geometry is per layer: layers may differ in their number of KV heads.

    Args:
        kv_heads: KV heads of each layer.
        head_dim: width of one head's K, and of its V.
        page_size: slots (tokens) of one frame.
        dtype: what K and V are stored as.
    """

    kv_heads: tuple[int, ...]
    head_dim: int
    page_size: int
    dtype: torch.dtype

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
    def frame_elements(self) -> int:
        """Numbers in one frame: K then V."""
        return 2 * self.page_size * self.head_dim

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame."""
        return self.frame_elements * self.dtype.itemsize

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

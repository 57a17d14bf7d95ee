"""How KV lies in memory: lanes, frames and blocks as numbers, per layer, without a tensor in sight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final

import torch

from kvikk.errors import ConfigError
from kvikk.types import BlockId, FrameId

SCALE_BYTES: Final = 4
"""Of a scale: fp32."""
INT4: Final[torch.dtype] = torch.int4  # type: ignore[attr-defined]  # torch's stubs have no small integers
"""Names the format of `memory.int4`; no tensor has this dtype."""


@dataclass(frozen=True, kw_only=True)
class KVGeometry:
    """The shape of one block. Geometry is per layer: layers may differ in their number of KV heads.

    Args:
        kv_heads: KV heads of each layer.
        head_dim: width of one head's K, and of its V.
        page_size: slots (tokens) of one frame.
        dtype: of the model's K and V, and of its queries.
        quantised: what K and V are stored as, with a scale for each row of `head_dim` numbers, or two in int4; None: as
            `dtype`.

    Raises:
        ConfigError: int4 for heads of an odd width.
        ValueError: scales would not lie at multiples of their size.
    """

    kv_heads: tuple[int, ...]
    head_dim: int
    page_size: int
    dtype: torch.dtype
    quantised: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.quantised is INT4 and self.head_dim % 2:
            raise ConfigError(f"int4 stores two numbers in a byte, and heads of {self.head_dim} are odd: choose int8")
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
        """Of the elements in a frame: numbers, or bytes that hold two in int4."""
        return torch.uint8 if self.quantised is INT4 else self.quantised or self.dtype

    @property
    def row_elements(self) -> int:
        """Elements that one token's K, or its V, takes in one KV head."""
        return self.head_dim // 2 if self.quantised is INT4 else self.head_dim

    @property
    def row_scales(self) -> int:
        """Scales of such a row."""
        return 0 if self.quantised is None else 2 if self.quantised is INT4 else 1

    @property
    def format(self) -> str:
        """How K and V are stored, in a word, such as `bfloat16` or `int8`."""
        return str(self.quantised or self.dtype).removeprefix("torch.")

    @property
    def frame_elements(self) -> int:
        """Elements in one frame, scales not counted: K then V."""
        return 2 * self.page_size * self.row_elements

    @property
    def number_bytes(self) -> int:
        """Bytes of these. Scales, where there are any, come behind them: those of `page_size` rows of K, then of V."""
        return self.frame_elements * self.stored.itemsize

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame."""
        return self.number_bytes + 2 * self.page_size * self.row_scales * SCALE_BYTES

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

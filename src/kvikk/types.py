"""The words of kvikk that are numbers, kept apart so that a type checker catches a mix-up."""

from __future__ import annotations

from typing import Literal, NewType

Position = NewType("Position", int)
"""A token's index in its sequence: RoPE, sampling and stop rules count in positions."""

Slot = NewType("Slot", int)
"""Where one token's K and V lie: `block * page_size + offset`, the same for all lanes of a uniform row."""

FrameId = NewType("FrameId", int)
"""A physical page of one lane: `page_size` slots, K then V."""

BlockId = NewType("BlockId", int)
"""`frames_per_block` consecutive frames: the same positions of all lanes."""

BlockKey = NewType("BlockKey", bytes)
"""Names a full block by its whole prefix (16 bytes)."""

NULL_BLOCK = BlockId(0)
"""Never given out: padding points at it, and nothing is ever written to it."""

Numerics = Literal["fast", "exact"]
"""`exact`: a token's numbers are the same to the bit however its step is made up; `fast`: the same up to rounding."""

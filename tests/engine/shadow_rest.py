"""The host's memory for whole KV, for the simulation: copies are under way for a while, and happen when they end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.shadow_tier import Content, NoFrames
from kvikk.types import BlockId


class Memory(Protocol):
    """What is asked here of `simulation.ShadowMemory`."""

    def save(self, frames: Any, blocks: list[BlockId]) -> Content: ...

    def restore(self, saved: Content, frames: Any, blocks: list[BlockId]) -> None: ...


class ShadowCopying:
    """One copy under way; when it ends, so do those that were begun before it in its direction."""

    seconds = 0.001

    def __init__(self, rest: ShadowRest, line: list[ShadowCopying], copy: Callable[[], None]) -> None:
        self._rest, self._line, self._copy = rest, line, copy
        line.append(self)

    @property
    def is_done(self) -> bool:
        if self in self._line and self._rest.rng.random() < 0.4:
            self.settle()
        return self not in self._line

    def wait(self) -> None:
        self.settle()

    def settle(self) -> None:
        while self in self._line:
            self._line.pop(0)._copy()


class ShadowRest:
    """Slots by number. What a slot holds is read and written when a copy ends, as late as may be."""

    block_bytes = 96

    def __init__(self, total: int, memory: Memory, rng: random.Random) -> None:
        self.total = total
        self.rng = rng
        self.loads = 0
        self._memory = memory
        self._free = list(range(total))
        self._held: dict[int, Content] = {}
        self._out: list[ShadowCopying] = []
        self._in: list[ShadowCopying] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def save(self, blocks: Sequence[BlockId]) -> tuple[list[int], ShadowCopying]:
        assert len(blocks) <= self.free
        slots = [self._free.pop(self.rng.randrange(self.free)) for _ in blocks]

        def copy() -> None:
            for slot, block in zip(slots, blocks, strict=True):
                self._held[slot] = self._memory.save(NoFrames(), [block])

        return slots, ShadowCopying(self, self._out, copy)

    def load(self, slots: Sequence[int], blocks: Sequence[BlockId], after: ShadowCopying) -> ShadowCopying:
        assert len(slots) == len(blocks)
        after.settle()
        self.loads += 1
        contents = [self._held[slot] for slot in slots]
        for block, content in zip(blocks, contents, strict=True):
            self._memory.restore([[-1] * len(frame) for frame in content], NoFrames(), [block])

        def copy() -> None:
            for block, content in zip(blocks, contents, strict=True):
                self._memory.restore(content, NoFrames(), [block])

        return ShadowCopying(self, self._in, copy)

    def give_back(self, slots: Sequence[int]) -> None:
        assert not set(slots) & set(self._free), "no slot is given back twice"
        self._free += slots

    def pass_time(self) -> None:
        """Copies go on, whether anyone looks or not."""
        for line in (self._out, self._in):
            if line and self.rng.random() < 0.2:
                line[0].settle()

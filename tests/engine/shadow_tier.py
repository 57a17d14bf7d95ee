"""A prefix tier without threads or bytes, for the simulation: it keeps what it likes and answers when it likes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kvikk.engine.kv import KVMemory
from kvikk.engine.tier import EngineTier
from kvikk.tier import Arrival, Ticket, TierCounters
from kvikk.types import BlockId, BlockKey

Content = list[list[int]]
"""What the slots of a block's frames hold."""


class Memory(Protocol):
    """What is asked here of `simulation.ShadowMemory`."""

    def save(self, frames: Any, blocks: list[BlockId]) -> Content: ...

    def restore(self, saved: Content, frames: Any, blocks: list[BlockId]) -> None: ...


MakeTier = Callable[[KVMemory, Callable[[], float], Memory], EngineTier]


class ShadowCopy:
    """A block's content outside the pool; whoever has it releases it or copies it in, once."""

    def __init__(self, content: Content, alive: set[ShadowCopy]) -> None:
        self.content = content
        self._alive = alive
        alive.add(self)

    def release(self) -> None:
        self._alive.remove(self)


class NoFrames(list[int]):
    def tolist(self) -> list[int]:
        return []


class ShadowTransfer:
    """Copies blocks of the shadow memory; where a generator says so, there is no room for all."""

    def __init__(self, memory: Memory, rng: random.Random | None) -> None:
        self.alive: set[ShadowCopy] = set()
        self._memory = memory
        self._rng = rng

    def copy_out(self, blocks: Sequence[BlockId]) -> list[ShadowCopy]:
        count = len(blocks)
        if self._rng is not None and self._rng.random() < 0.2:
            count = self._rng.randrange(len(blocks))
        return [ShadowCopy(self._memory.save(NoFrames(), [block]), self.alive) for block in blocks[:count]]

    def copy_in(self, blocks: Sequence[tuple[ShadowCopy, BlockId]]) -> None:
        for copy, block in blocks:
            self._memory.restore(copy.content, NoFrames(), [block])
            copy.release()


class RandomTier:
    """Stands for `PrefixTier`: it drops, loses and delays, and some tickets it never answers.

    Args:
        rng: decides.
        transfer: what it stages with.
    """

    host_bytes, pause_s, outlives_us, is_busy = 0, 0.0, False, False

    def __init__(self, rng: random.Random, transfer: ShadowTransfer) -> None:
        self.kept: dict[BlockKey, Content] = {}
        self.counters = TierCounters()
        self.news = threading.Event()
        self.arrived = 0
        self._rng = rng
        self._transfer = transfer
        self._tickets: list[Ticket] = []

    def wants(self, key: BlockKey) -> bool:
        return key not in self.kept and self._rng.random() < 0.9

    def offer(self, key: BlockKey, leaving: ShadowCopy) -> None:
        if self._rng.random() < 0.9:
            self.kept[key] = leaving.content
        leaving.release()

    def note_dropped(self, blocks: int) -> None:
        self.counters.dropped += blocks

    def forget(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self.kept.pop(key, None)

    def fetch(self, keys: Sequence[BlockKey], timeout_s: float) -> Ticket:
        ticket = Ticket(keys, timeout_s, self.news)
        if self._rng.random() < 0.1:
            ticket.finish()
        elif self._rng.random() < 0.9:
            self._tickets.append(ticket)
        return ticket

    def give_up(self, ticket: Ticket) -> None:
        self.counters.late += ticket.close()

    def wait(self, timeout_s: float) -> None:
        self.answer()

    def answer(self) -> None:
        """Some time passes: some blocks come."""
        for ticket in list(self._tickets):
            for key in ticket.left(self._rng.randrange(4)):
                if key not in self.kept or self._rng.random() < 0.1:
                    ticket.finish()
                    self._tickets.remove(ticket)
                    break
                self.arrived += 1
                ticket.add(Arrival(key, ShadowCopy(self.kept[key], self._transfer.alive), self._rng.random() < 0.5))
            else:
                if not ticket.left(1):
                    ticket.finish()
                    self._tickets.remove(ticket)

    def close(self, flush_s: float) -> None:
        self._tickets.clear()

"""What was asked of the tier, and what has come of it so far."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvikk.types import BlockKey


class Staged(Protocol):
    """A block's bytes where the pool can take them from."""

    def release(self) -> None:
        """They are not needed any more."""
        ...


class Arrival(NamedTuple):
    """A block that has come.

    Args:
        key: its name.
        staged: its bytes; whoever takes the arrival releases them, or has the pool take them.
        is_outside: whether it came from the outer store, and not from the host's memory.
    """

    key: BlockKey
    staged: Staged
    is_outside: bool


class Ticket:
    """Blocks that were asked for. The tier's threads add to it, one thread takes from it.

    Args:
        keys: in the order in which they come.
        until_s: after this time nothing more is read for it.
        news: set whenever something has come or nothing more will.
    """

    def __init__(self, keys: Sequence[BlockKey], until_s: float, news: threading.Event) -> None:
        self.until_s = until_s
        self.is_outside = False
        """Whether the outer store was asked."""
        self.outside_arrivals = 0
        self.keys = keys
        self._news = news
        self._added = 0
        self._arrivals: deque[Arrival] = deque()
        self._is_finished = False
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def is_spent(self) -> bool:
        """Whether nothing more will come, and all that has come was taken."""
        return self._is_finished and not self._arrivals

    def take(self, blocks: int) -> list[Arrival]:
        """What has come and was not taken, up to so many."""
        with self._lock:
            return [self._arrivals.popleft() for _ in range(min(blocks, len(self._arrivals)))]

    def close(self) -> bool:
        """Nobody waits for it any more: let go of what was not taken. Returns whether more could have come."""
        with self._lock:
            was_open = not (self._is_finished or self._is_closed)
            self._is_closed = True
            left, self._arrivals = self._arrivals, deque()
        for arrival in left:
            arrival.staged.release()
        return was_open

    # For the tier's threads

    def is_wanted(self, now_s: float) -> bool:
        """Whether reading on makes sense."""
        return not (self._is_closed or self._is_finished) and now_s < self.until_s

    def left(self, blocks: int) -> Sequence[BlockKey]:
        """The next keys that have not come, up to so many."""
        return self.keys[self._added : self._added + blocks]

    def add(self, arrival: Arrival) -> bool:
        """A block has come; False when nobody waits for it any more: it is let go."""
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._arrivals.append(arrival)
                self._added += 1
                self.outside_arrivals += arrival.is_outside
        if is_closed:
            arrival.staged.release()
        else:
            self._news.set()
        return not is_closed

    def finish(self) -> None:
        """All has come, or what is next is nowhere. A ticket that ran out of time is never finished: it is given up."""
        self._is_finished = True
        self._news.set()

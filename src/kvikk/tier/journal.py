"""What has happened in the tier: counted always, logged once a minute for each kind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

logger = logging.getLogger(__name__)

LOG_EVERY_S: Final = 60.0


@dataclass(slots=True)
class TierCounters:
    """Blocks since the start; only ever grow.

    Args:
        stored: were taken in by the host's memory.
        written: were written to the outer store, which did not have them.
        dropped: were not, as what carries them was busy or the outer store is left alone.
        damaged: records that were no good: deleted, and a miss.
        failures: calls of the outer store that failed.
        late: rows that no longer waited for what they had asked for.
    """

    stored: int = 0
    written: int = 0
    dropped: int = 0
    damaged: int = 0
    failures: int = 0
    late: int = 0


class Journal:
    """Counts and warns, from any thread.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counters = TierCounters()
        self._next_s: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def counters(self) -> TierCounters:
        """As they are now."""
        with self._lock:
            return replace(self._counters)

    def count(self, name: str, blocks: int = 1) -> None:
        """Add to the counter of that name."""
        with self._lock:
            setattr(self._counters, name, getattr(self._counters, name) + blocks)

    def warn(self, kind: str, text: str, *values: object) -> None:
        """Log a warning, unless there was one of its kind in the last minute: the counters tell how often."""
        now = self._clock()
        with self._lock:
            is_due = now >= self._next_s.get(kind, now)
            if is_due:
                self._next_s[kind] = now + LOG_EVERY_S
        if is_due:
            logger.warning(text, *values)

    def note_dropped(self, blocks: int) -> None:
        """So many blocks were not taken in, since there was no room for them on the way."""
        self.count("dropped", blocks)
        self.warn("dropped", "the prefix tier cannot keep up: %d blocks were not taken in", blocks)

    def note_failure(self, doing: str, error: Exception, pause_s: float | None) -> None:
        """A call of the outer store failed, and a pause begins, or has begun already (None)."""
        self.count("failures")
        if pause_s is not None:
            told = f"{type(error).__name__}: {error}"
            self.warn(doing, "%s the prefix tier's store failed, next try in %.0f s: %s", doing, pause_s, told)

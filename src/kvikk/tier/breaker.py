"""When a place that fails is left alone, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 300.0


class Breaker:
    """Lets everything through until something fails; then nothing for a pause, and then one attempt.

    If that fails the next pause is twice as long, up to `LONGEST_PAUSE_S`; a success lets everything through again.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pause_s = 0.0
        self._until_s = 0.0
        self._is_trying = False
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether nothing passes now. Asking is no attempt."""
        with self._lock:
            return self._pause_s > 0 and self._clock() < self._until_s

    @property
    def pause_s(self) -> float:
        """How long the present pause is; 0: everything passes."""
        return self._pause_s

    def allows(self) -> bool:
        """Whether to make an attempt. After a pause the first to ask may; others wait as long again for its outcome."""
        with self._lock:
            if self._pause_s == 0:
                return True
            now = self._clock()
            if now < self._until_s:
                return False
            self._is_trying = True
            self._until_s = now + self._pause_s
            return True

    def note_success(self) -> None:
        """An attempt went well."""
        with self._lock:
            self._pause_s = 0.0
            self._is_trying = False

    def note_failure(self) -> bool:
        """An attempt failed, or took too long. Returns whether a pause begins: attempts made together fail together."""
        with self._lock:
            if self._pause_s and not self._is_trying:
                return False
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s) if self._pause_s else FIRST_PAUSE_S
            self._until_s = self._clock() + self._pause_s
            self._is_trying = False
            return True

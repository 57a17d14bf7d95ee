"""The engine's last minute, remembered second by second."""

from __future__ import annotations

from collections import deque

from kvikk.server.messages import Stats

WINDOW_S = 60


class RecentStats:
    """Keeps the last `Stats` of each second, as far back as a minute needs.

    Between two of them nothing happened, so the one before a moment is how the engine was at that moment.

    Args:
        now_s: the start, when all counters are 0.
    """

    def __init__(self, now_s: float) -> None:
        self._samples: deque[tuple[float, Stats]] = deque([(now_s, Stats())])

    def note(self, now_s: float, stats: Stats) -> None:
        """The engine is like this now. Times do not go back."""
        if int(self._samples[-1][0]) == int(now_s) and len(self._samples) > 1:
            self._samples.pop()
        self._samples.append((now_s, stats))
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - WINDOW_S:
            self._samples.popleft()

    def before(self, now_s: float) -> tuple[float, Stats]:
        """How many seconds one can look back, a minute at most, and how the engine was then."""
        since_s, stats = self._samples[0]
        for at_s, later in self._samples:
            if at_s > now_s - WINDOW_S:
                break
            since_s, stats = at_s, later
        return min(float(WINDOW_S), now_s - since_s), stats

    def history(self, now_s: float) -> list[tuple[float, Stats]]:
        """What came in the last minute and the one before it, oldest first, each with its age in seconds."""
        span_s, oldest = self.before(now_s)
        return [(span_s, oldest), *((now_s - at_s, stats) for at_s, stats in self._samples if now_s - at_s < span_s)]

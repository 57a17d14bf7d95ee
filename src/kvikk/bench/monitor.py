"""Whether this client measured the server or itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np

INTERVAL_S = 0.01
BUSY = 0.8
"""Of one core: above it, events queue up in the client."""
LATE_SHARE, LATE_MS = 0.25, 2.0


@dataclass(kw_only=True)
class ClientLoad:
    """How busy and how late this process was during a load.

    Args:
        cpu_share: of one core.
        lags_ms: by how much the event loop woke up too late, every few milliseconds.
    """

    cpu_share: float = 0.0
    lags_ms: list[float] = field(default_factory=list)

    @property
    def lag_p99_ms(self) -> float:
        """99 of 100 times the loop was less late than this."""
        return float(np.percentile(self.lags_ms, 99)) if self.lags_ms else 0.0

    def warning(self, itl_median_ms: float | None) -> str | None:
        """What is wrong with figures measured from here, None when nothing is."""
        if self.cpu_share > BUSY:
            return (
                f"the client itself was busy for {self.cpu_share:.0%} of the time and may have been the bottleneck: "
                "give it a core of its own, or a lower --max-concurrency"
            )
        limit = max(LATE_MS, LATE_SHARE * (itl_median_ms or 0.0))
        if self.lag_p99_ms > limit:
            return (
                f"the client's event loop was up to {self.lag_p99_ms:.1f} ms late (p99; {limit:.1f} ms would do): the "
                "latencies hold its lateness too; give it a core of its own"
            )
        return None


@contextlib.asynccontextmanager
async def watched(clock: Callable[[], float], cpu_clock: Callable[[], float]) -> AsyncIterator[ClientLoad]:
    """Measure this process until the context ends; the figures are complete after it.

    Args:
        clock: monotonic seconds.
        cpu_clock: seconds of CPU time of this process.
    """
    load = ClientLoad()
    start, cpu_start = clock(), cpu_clock()
    task = asyncio.create_task(_sample(load.lags_ms, clock))
    try:
        yield load
    finally:
        task.cancel()
        load.cpu_share = (cpu_clock() - cpu_start) / max(clock() - start, 1e-9)


async def _sample(lags_ms: list[float], clock: Callable[[], float]) -> None:
    while True:
        before = clock()
        await asyncio.sleep(INTERVAL_S)
        lags_ms.append((clock() - before - INTERVAL_S) * 1000)

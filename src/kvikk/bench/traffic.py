"""When requests are sent: at a rate, more or less evenly, and so many at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvikk.bench.answer import Answer
from kvikk.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrafficConfig:
    """When requests are sent.

    Args:
        request_rate: requests a second; inf sends all at once.
        burstiness: 1 is a Poisson process; below, requests come in bursts; above, more evenly; inf is a clock.
        max_concurrency: requests underway at once at most; others wait in the client, and their time begins after.
        disable_tqdm: show no progress bar.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate {self.request_rate} must be above 0; inf sends all at once")
        if not self.burstiness > 0:
            raise ConfigError(f"--burstiness {self.burstiness} must be above 0; 1 is a Poisson process")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency {self.max_concurrency} must be at least 1")


def due_times(config: TrafficConfig, requests: int, seed: int) -> list[float]:
    """Seconds from the start at which each request's turn comes.

    Gaps follow a gamma distribution whose shape is the burstiness. They are stretched to `requests / request_rate`
    seconds in all, so that every seed loads the server with the same rate.
    """
    if math.isinf(config.request_rate):
        return [0.0] * requests
    if math.isinf(config.burstiness):
        gaps = np.ones(requests)
    else:
        gaps = np.random.default_rng(seed).gamma(config.burstiness, size=requests)
    until = np.cumsum(gaps)
    due: list[float] = (until * (requests / config.request_rate / until[-1])).tolist()
    return due


async def run_load(
    ask: Callable[[int, float], Awaitable[Answer]],
    due_s: Sequence[float],
    max_concurrency: int | None,
    clock: Callable[[], float],
) -> list[Answer]:
    """Ask every request at its time; the answers in the order of the requests.

    Args:
        ask: sends the request of an index, which was due at a time of the clock.
        due_s: from now on.
        max_concurrency: requests underway at once at most.
        clock: monotonic seconds.
    """
    places = asyncio.Semaphore(max_concurrency or len(due_s))
    start = clock()

    async def one(index: int) -> Answer:
        due = start + due_s[index]
        await asyncio.sleep(due - clock())
        async with places:
            return await ask(index, due)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in range(len(due_s))]
    return [task.result() for task in tasks]

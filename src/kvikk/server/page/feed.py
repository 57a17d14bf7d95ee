"""The feed of a page: server-sent events, of one sample a second for all pages together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import msgspec

from kvikk.server.messages import Ready, Snapshot
from kvikk.server.page.view import View

StateProvider = Callable[[], Awaitable[tuple[Ready, Snapshot, float, str | None]]]
"""Gives the engine's description, its state now, the server's uptime in seconds, and why the engine is dead, if it is.

With a dead engine the state is the last one known."""


class Sample(NamedTuple):
    """One state, and the event that tells the pages of it."""

    view: View
    event: bytes


class Sampler:
    """Takes a sample when someone asks for one, and not more often than the interval allows.

    Whoever asks while a sample is being taken gets that one. It goes on being taken when they leave, so that coming
    and going never means more of them. When nobody asks, none is taken.

    Args:
        take: gives the state as it is now.
        interval_s: between the beginnings of two samples.
    """

    def __init__(self, take: Callable[[], Awaitable[View]], interval_s: float) -> None:
        self._take = take
        self._interval_s = interval_s
        self._began_s = 0.0
        self._sample: asyncio.Task[Sample] | None = None

    async def latest(self) -> Sample:
        """A sample that is no older than the interval."""
        if self._sample is None or (self._sample.done() and self.due_in_s <= 0):
            self._began_s = asyncio.get_running_loop().time()
            self._sample = asyncio.create_task(self._take_one())
        return await asyncio.shield(self._sample)

    @property
    def due_in_s(self) -> float:
        """Seconds until the next one may be taken."""
        return self._began_s + self._interval_s - asyncio.get_running_loop().time()

    async def _take_one(self) -> Sample:
        view = await self._take()
        return Sample(view, b"data: " + msgspec.json.encode(view) + b"\n\n")


async def events(sampler: Sampler, stopping: asyncio.Event, *, heartbeat_s: float) -> AsyncIterator[bytes]:
    """The state at once, then each new one, until the server stops.

    While the next is waited for, as the engine is in a long step, a comment every `heartbeat_s` shows that the feed
    lives.
    """
    stopped = asyncio.create_task(stopping.wait())
    asked: asyncio.Task[Sample] | None = None
    sent: Sample | None = None
    try:
        while not stopped.done():
            asked = asyncio.create_task(sampler.latest())
            while not asked.done() and not stopped.done():
                await asyncio.wait({asked, stopped}, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():
                    yield b": waiting for the engine\n\n"
            if asked.done() and asked.result() is not sent:
                sent = asked.result()
                yield sent.event
            await asyncio.wait({stopped}, timeout=max(0.0, sampler.due_in_s))
    finally:
        stopped.cancel()
        if asked is not None:
            asked.cancel()

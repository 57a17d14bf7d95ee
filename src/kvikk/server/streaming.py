"""Answers that come in pieces, and clients that go away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from kvikk.errors import KvikkError
from kvikk.server.errors import ClientGone
from kvikk.server.openai.problems import problem_body, problem_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do some work while the client is there.

    Raises:
        ClientGone: it hung up; the work was cancelled and has finished its own cleaning up.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone("the client hung up")
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await each


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(body: BaseModel, *, exclude_unset: bool = False) -> bytes:
    """One server-sent event; with `exclude_unset`, of the fields that were given."""
    return b"data: " + body.model_dump_json(exclude_unset=exclude_unset).encode() + b"\n\n"


class EventStream(Response):
    """Server-sent events, ending with `[DONE]`, while the client is there.

    An error in the middle is an event of its own, in OpenAI's form, before the `[DONE]`.

    Args:
        events: whole events.
        close: called at the end, however it comes.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events."""
        with suppress(ClientGone, OSError):
            await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._safely():
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        finally:
            self._close()

    async def _safely(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._events:
                yield event
        except KvikkError as error:
            yield sse(problem_of(error))
        except Exception:
            logger.exception("a stream failed")
            yield sse(problem_body("a fault in the server; its log has more", 500, code="internal_error"))

"""One request: sent, streamed, timed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import aiohttp

from kvikk.bench.answer import Answer, AnswerReader, BrokenStream, error_text
from kvikk.bench.datasets import Request
from kvikk.bench.events import EventReader
from kvikk.bench.target import Target

EVENT_STREAM = "text/event-stream"


async def ask(
    session: aiohttp.ClientSession, target: Target, request: Request, *, due_s: float, clock: Callable[[], float]
) -> Answer:
    """The answer to one request. A request that fails is an answer with an error, never an exception."""
    body = target.body(request)
    reader = AnswerReader(allow_missing_done=target.allow_missing_done)
    sent_s = clock()
    error = None
    try:
        async with session.post(target.url, data=body, headers=target.headers) as response:
            await _check(response)
            events = EventReader()
            async for chunk in response.content.iter_any():
                now_s = clock()
                for event in events.feed(chunk):
                    reader.take(event, now_s)
            reader.finish()
    except (BrokenStream, aiohttp.ClientError, TimeoutError, OSError) as failure:
        error = str(failure) or type(failure).__name__
    return Answer(
        due_s=due_s,
        sent_s=sent_s,
        done_s=clock() if reader.last_s is None else reader.last_s,
        arrivals_s=tuple(reader.arrivals_s),
        text="".join(reader.text),
        usage=reader.usage,
        error=error,
    )


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise BrokenStream(f"HTTP {response.status}: {_said(await response.text(errors='replace'))}")
    if response.content_type != EVENT_STREAM:
        raise BrokenStream(f"the answer is {response.content_type}, not {EVENT_STREAM}: the endpoint does not stream")


def _said(body: str) -> str:
    """The error text of a response that failed."""
    said: Any = body
    with contextlib.suppress(ValueError):  # any text may be said
        said = json.loads(body)
    return error_text(said)

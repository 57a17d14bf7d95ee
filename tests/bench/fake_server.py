"""A server of OpenAI's API whose answers are scripted, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Body = dict[str, Any]


@dataclass
class Script:
    """One answer: pieces of the body as they are written, a float for a pause, `CUT` for a connection that breaks."""

    steps: Sequence[bytes | float | str]
    status: int = 200
    content_type: str = "text/event-stream"


CUT = "cut"
DONE = b"data: [DONE]\n\n"


def event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def piece(text: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}])


def usage(read: int, written: int, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": read, "completion_tokens": written, "prompt_tokens_details": details}
    return event(choices=[], usage=counts)


def answer(words: Sequence[str], *, read: int = 7, cached: int | None = None, chat: bool = False) -> list[bytes]:
    """A stream as it should be: a chunk for each word, the reason for the end, usage, and the mark of the end."""
    if chat:
        deltas = [{"role": "assistant", "content": ""}, *({"content": word} for word in words)]
        chunks = [event(choices=[{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas]
        chunks.append(event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}]))
    else:
        chunks = [piece(word) for word in words[:-1]] + [piece(words[-1], "length")]
    return [*chunks, usage(read, len(words), cached), DONE]


@dataclass
class FakeServer:
    """What is asked of it, and what it answers.

    Args:
        script: the answer to a request, from its body.
        models: what /v1/models lists; None for a server without that endpoint.
        metrics: what /metrics says, one page after the other.
    """

    script: Callable[[Body], Script]
    models: list[Body] | None = field(default_factory=lambda: [{"id": "smollm2"}])
    metrics: list[str] = field(default_factory=list)
    bodies: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    underway: int = 0
    most_underway: int = 0
    url: str = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        if self.models is None:
            raise web.HTTPNotFound
        return web.json_response({"object": "list", "data": self.models})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.metrics:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics.pop(0))

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        script = self.script(body)
        self.underway += 1
        self.most_underway = max(self.most_underway, self.underway)
        try:
            return await self._play(request, script)
        finally:
            self.underway -= 1

    async def _play(self, request: web.Request, script: Script) -> web.StreamResponse:
        response = web.StreamResponse(status=script.status, headers={"Content-Type": script.content_type})
        await response.prepare(request)
        for step in script.steps:
            if step == CUT:
                assert request.transport is not None
                request.transport.abort()
                return response
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                assert isinstance(step, bytes)
                await response.write(step)
        await response.write_eof()
        return response


@contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """The server, listening on a free port of this machine."""
    started = threading.Event()
    stopping: list[Callable[[], Any]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        stopping.append(lambda: loop.call_soon_threadsafe(stop.set))
        runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=[serve()], daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        stopping[0]()
        thread.join(10)
        assert not thread.is_alive()

"""The routes of the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Depends, HTTPException
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from jinja2 import Environment

from kvikk.server.metrics import RecentStats
from kvikk.server.page.feed import Sampler, StateProvider, events
from kvikk.server.page.view import View, make_view

INTERVAL_S = 1.0
HEARTBEAT_S = 5.0
FIRST_STATE_S = 2.0
"""How long the page is held back so that it can come with a state."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
MEDIA_TYPES = {"live.js": "text/javascript", "live.css": "text/css", "icon.svg": "image/svg+xml"}


def page_router(
    provider: StateProvider,
    guard: Callable[..., Any],
    *,
    recent: RecentStats,
    needs_key: bool,
    stopping: asyncio.Event,
    clock: Callable[[], float] = time.monotonic,
) -> APIRouter:
    """The page at `/`, its files, and its feed at `/live`; none of them in the OpenAPI schema.

    Args:
        provider: gives the state; asked once a second at most, and only while someone looks.
        guard: a FastAPI dependency that lets only those through who may see the feed.
        recent: the engine's last minute.
        needs_key: the guard wants a key: the page comes without a state and asks its reader for the key.
        stopping: ends the feeds, which would otherwise keep the server from ending.
        clock: seconds, the one that dates `recent`.
    """
    folder = files(__package__)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((folder / "page.html").read_text(encoding="utf-8"))
    assets = {name: (folder / name).read_bytes() for name in MEDIA_TYPES}

    async def take() -> View:
        ready, snapshot, uptime_s, dead_reason = await provider()
        return make_view(ready, snapshot, uptime_s, dead_reason, recent, clock())

    sampler = Sampler(take, INTERVAL_S)
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page() -> HTMLResponse:
        """The page, with a state in it when anyone may see it and the engine tells it soon."""
        view = None
        if not needs_key:
            with suppress(TimeoutError):  # the engine is in a long step: the feed brings the state when there is one
                view = (await asyncio.wait_for(sampler.latest(), FIRST_STATE_S)).view
        return HTMLResponse(template.render(view=view, needs_key=needs_key), headers=HEADERS)

    @router.get("/page/{name}")
    async def asset(name: str) -> Response:
        """A file of the page."""
        if name not in assets:
            raise HTTPException(404)
        headers = {**HEADERS, "Cache-Control": "no-cache"}
        return Response(assets[name], media_type=MEDIA_TYPES[name], headers=headers)

    @router.get("/live", dependencies=[Depends(guard)])
    async def live() -> StreamingResponse:
        """The feed."""
        stream = events(sampler, stopping, heartbeat_s=HEARTBEAT_S)
        return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)

    return router

"""Counts answers by route and status."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvikk.server.metrics import Metrics

NO_ROUTE = "none"


class CountAnswers:
    """ASGI middleware around all others: what it sees is what the client gets."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and note the status with which the answer begins."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", NO_ROUTE)
                self._metrics.answered(route, message["status"])
            await send(message)

        await self._app(scope, receive, noting)

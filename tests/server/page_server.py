"""The operator's page over a provider that tells what the test wants, in a server of its own thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse

from kvikk.engine import KVCacheUsage
from kvikk.server.messages import Pin, Ready, RequestState, Snapshot, Stats
from kvikk.server.metrics import RecentStats
from kvikk.server.page import page_router

READY = Ready(
    model="smollm2",
    max_model_len=2048,
    length_reason="the model's own maximum",
    vocabulary=49152,
    max_num_seqs=64,
    blocks=1000,
    block_size=16,
    block_bytes=368640,
    capacity="KV memory: 351.6 MiB = 16,000 tokens in 1,000 blocks of 16; 7 requests of 2,048 tokens fit",
    dtype="bfloat16",
    device="cpu",
)

REQUEST = RequestState(
    id="cmpl-1",
    state="decode",
    age_s=3.4,
    prompt_tokens=1200,
    cached_tokens=800,
    generated_tokens=45,
    blocks=78,
    texts=1,
    preemptions=0,
    kv_cache=KVCacheUsage("snapkv", compactions=1, tokens=1200, kept_tokens=300.0),
)

STATS = Stats(
    running=1,
    total_blocks=1000,
    free_blocks=500,
    held_blocks=300,
    cached_blocks=200,
    pinned_blocks=100,
    steps=10,
    computed_tokens=5000,
    generated_tokens=600,
    prefix_queries=2000,
    prefix_hits=500,
)

SNAPSHOT = Snapshot(stats=STATS, pins=[Pin(name="system prompt", blocks=100)], requests=[REQUEST])


@dataclass
class PageServer:
    """The page as served at `url`; what it tells may be changed while it runs.

    Attributes:
        snapshot: what the provider gives.
        dead_reason: why the engine is dead.
        key: what the guard wants, when there is one.
        delay_s: how long the provider takes.
        asked_s: when it was asked.
    """

    snapshot: Snapshot = SNAPSHOT
    dead_reason: str | None = None
    key: str | None = None
    delay_s: float = 0.0
    asked_s: list[float] = field(default_factory=list)
    url: str = ""
    recent: RecentStats = field(default_factory=lambda: RecentStats(time.monotonic()))
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> FastAPI:
        """The page alone."""
        app = FastAPI()

        @app.exception_handler(HTTPException)
        async def in_openai_form(request: Request, error: HTTPException) -> JSONResponse:
            return JSONResponse({"error": {"message": error.detail}}, error.status_code)

        app.include_router(
            page_router(
                self._provide,
                self._guard,
                recent=self.recent,
                needs_key=self.key is not None,
                stopping=self.stopping,
            )
        )
        return app

    def change(self, **stats: int) -> None:
        """Other stats, the rest as it was."""
        changed = msgspec.structs.replace(self.snapshot.stats, **stats)
        self.snapshot = msgspec.structs.replace(self.snapshot, stats=changed)

    async def _provide(self) -> tuple[Ready, Snapshot, float, str | None]:
        self.asked_s.append(time.monotonic())
        await asyncio.sleep(self.delay_s)
        return READY, self.snapshot, 3723.0, self.dead_reason

    async def _guard(self, request: Request) -> None:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            raise HTTPException(401, "this key is not known here")


@contextmanager
def running(page: PageServer, port: int = 0) -> Iterator[PageServer]:
    """Serve the page, on a free port, until the block ends; the feeds must end by themselves when they are told."""
    server = uvicorn.Server(uvicorn.Config(page.app(), port=port, log_level="error"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(),), daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    host, bound_port = server.servers[0].sockets[0].getsockname()[:2]
    page.url = f"http://{host}:{bound_port}/"
    try:
        yield page
    finally:
        loop.call_soon_threadsafe(page.stopping.set)
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()
    loop.close()

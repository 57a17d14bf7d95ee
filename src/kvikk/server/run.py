"""`kvikk serve`: from a config to a server that runs until it is told to stop, or its engine dies."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from kvikk.errors import ConfigError
from kvikk.heap import frozen_heap
from kvikk.server.app import build_app
from kvikk.server.client import EngineClient
from kvikk.server.config import HttpConfig, ServeConfig
from kvikk.server.metrics import Metrics
from kvikk.server.security import Keys, read_keys
from kvikk.server.service import Front, Service

logger = logging.getLogger(__name__)

DEATH_NOTICE_S = 2.0
"""How long a server whose engine died still answers 503 before it ends."""
KEEP_ALIVE_S = 75
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_ANSWERS_S = 2
"""For the answers to requests that were not done in time when the server went down."""


def serve(config: ServeConfig) -> int:
    """Serve until a signal, or the engine's end. Returns the exit code: 0, or 1 when the engine died.

    Raises:
        ConfigError: the port is taken, or an option cannot be honoured.
        ModelError: the model cannot be loaded.
        KvikkError: the engine could not start.
    """
    keys = read_keys(config.http)
    template = read_template(config.serving.chat_template)
    with listen(config.http) as listener, asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        return runner.run(_serve(config, keys, template, listener))


async def _serve(config: ServeConfig, keys: Keys, template: str | None, listener: socket.socket) -> int:
    front = Front.load(config, template)
    client = await EngineClient.start(config.engine, max_waiting=config.serving.max_waiting_requests)
    try:
        metrics = Metrics(client.ready, model_name=front.names[0])
        client.on_stats = metrics.observe_stats
        service = Service(config, client, front, metrics)
        app = build_app(service, keys)
        server = Server(
            uvicorn.Config(
                app,
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=ceil(config.serving.drain_timeout_s) + LAST_ANSWERS_S,
                server_header=False,
            ),
            service,
        )
        watch = asyncio.create_task(_end_after_death(client, server))
        logger.info("serving %s at %s", " and ".join(service.names), address_of(listener))
        with frozen_heap():
            await server.serve(sockets=[listener])
        watch.cancel()
        service.close()
        return 0 if client.dead is None else 1
    finally:
        await client.stop()


class Server(uvicorn.Server):
    """uvicorn's, which drains the service before it ends, and then ends as any program that was asked to: with 0."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Within, SIGTERM and SIGINT drain; a second SIGINT does not wait. uvicorn's own would raise them again."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        self.force_exit = self.should_exit and number == signal.SIGINT
        self.should_exit = True
        self._service.drain()


async def _end_after_death(client: EngineClient, server: Server) -> None:
    await client.died.wait()
    await asyncio.sleep(DEATH_NOTICE_S)
    server.should_exit = True


def listen(config: HttpConfig) -> socket.socket:
    """A socket bound to the address: before the model is loaded, so that a taken port is known at once.

    Raises:
        ConfigError: the port is taken, not allowed, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host {config.host} --port {config.port} cannot be listened on ({error.strerror or error}): choose "
            "another port, or stop what listens there"
        ) from None
    return listener


def address_of(listener: socket.socket) -> str:
    """`http://127.0.0.1:8000`."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def read_template(path: str | None) -> str | None:
    """The text of `--chat-template`.

    Raises:
        ConfigError: it cannot be read.
    """
    if path is None:
        return None
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from None

"""A real Redis or Valkey server, and a slow line to it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A server on a port of its own, without a disk. It can be killed and started again, and is empty then."""

    def __init__(self, program: str, folder: Path) -> None:
        self.port = free_port()
        self._command = [
            program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--dir", str(folder), "--loglevel", "warning",
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        import redis

        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until_s = time.monotonic() + 20
        while True:
            with suppress(redis.exceptions.ConnectionError), redis.Redis.from_url(self.url) as client:
                client.ping()
                return
            assert time.monotonic() < until_s, "the server does not answer"
            time.sleep(0.02)

    def client(self):  # type: ignore[no-untyped-def]
        import redis

        return redis.Redis.from_url(self.url)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@contextmanager
def running_redis(folder: Path) -> Iterator[RedisServer]:
    """Skips the test where there is no server or no client library."""
    pytest.importorskip("redis", reason="redis-py is not installed")
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("neither redis-server nor valkey-server is installed")
    server = RedisServer(program, folder)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def slow_line(port: int, bytes_per_s: float) -> Iterator[int]:
    """A port on which the server of another port is reached, whose answers come at this speed."""
    listener = socket.create_server(("127.0.0.1", 0))
    sockets = [listener]

    def pump(source: socket.socket, target: socket.socket, speed: float | None) -> None:
        with suppress(OSError):
            while data := source.recv(16_384):
                if speed is not None:
                    time.sleep(len(data) / speed)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", port))
                sockets.extend((client, server))
                for pair in ((client, server, None), (server, client, bytes_per_s)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

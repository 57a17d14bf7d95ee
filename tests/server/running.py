"""A real server in a process of its own, as an operator starts it.

Clients here check no certificates: to read those of all authorities takes longer than most requests.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil

START_S = 120
SMALL = ("--kv-memory", "64MiB", "--max-model-len", "1024")


@dataclass
class Running:
    """A server that answers at `url`. Threads may share `http`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    http: httpx.Client = field(default_factory=lambda: httpx.Client(verify=False, timeout=60))

    @property
    def engine(self) -> psutil.Process:
        """The engine's process."""
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if "spawn_main" in " ".join(child.cmdline()))

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client, which does not try again on its own."""
        options = {"http_client": openai.DefaultHttpxClient(verify=False)} | options
        return openai.OpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0} | options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """The same for many requests at once."""
        options = {"http_client": openai.DefaultAsyncHttpxClient(verify=False)} | options
        return openai.AsyncOpenAI(**{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0} | options)

    def get(self, path: str, **options: Any) -> Any:
        """A JSON answer."""
        return self.http.get(self.url + path, **options).raise_for_status().json()

    def post(self, path: str, **options: Any) -> httpx.Response:
        """Any answer."""
        return self.http.post(self.url + path, **options)

    def said(self) -> str:
        """What the server has logged."""
        return self.log.read_text()

    def metric(self, name: str, **labels: str) -> float:
        """The value of a series: the sum over all that have these labels."""
        total = 0.0
        for line in self.http.get(f"{self.url}/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            wanted = all(f'{label}="{text}"' in series for label, text in labels.items())
            if series.partition("{")[0] == f"kvikk:{name}" and wanted:
                total += float(value)
        return total

    def wait_until_idle(self, timeout_s: float = 30) -> dict[str, Any]:
        """The cache's state once nothing runs or waits."""
        until = time.monotonic() + timeout_s
        while True:
            state = self.get("/v1/cache")
            if not state["running"] and not state["waiting"]:
                return dict(state)
            assert time.monotonic() < until, f"still busy after {timeout_s} s: {state}"
            time.sleep(0.05)

    def stop(self, timeout_s: float = 60) -> int:
        """End it as an operator does; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


@contextmanager
def serving(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[Running]:
    """`kvikk serve` with these arguments on a free port, ready to answer; ended on leaving."""
    port = free_port()
    log = folder / f"serve-{port}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvikk", "serve", "--port", str(port), *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
        )
    running = Running(process, f"http://127.0.0.1:{port}", log)
    try:
        until = time.monotonic() + START_S
        while not _is_healthy(running):
            assert process.poll() is None, f"the server ended at once:\n{running.said()}"
            assert time.monotonic() < until, f"the server is not ready after {START_S} s:\n{running.said()}"
            time.sleep(0.1)
        yield running
    finally:
        running.http.close()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_healthy(running: Running) -> bool:
    try:
        return running.http.get(f"{running.url}/health").status_code == 200
    except httpx.TransportError:
        return False

"""A server's process tree: started, waited for, its CPU time taken, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

START_TIMEOUT_S = 600.0
GOODBYE_S = 30.0


class ServerFailed(Exception):
    """A server did not start, or ended."""


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """Seconds of CPU that a server's processes have used.

    Args:
        front: of the process that was started; of its first thread where it is the only one.
        engine: of all others.
    """

    front: float
    engine: float

    def __sub__(self, earlier: CpuTimes) -> CpuTimes:
        return CpuTimes(front=self.front - earlier.front, engine=self.engine - earlier.engine)


class Server:
    """A server in its own process group, listening on this machine.

    Args:
        name: for people.
        process: that was started.
        port: where it listens.
        log: file with all that it prints.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.name, self.port, self.log = name, port, log
        self._process = process

    def wait_until_healthy(self) -> None:
        """Wait for /health to answer 200.

        Raises:
            ServerFailed: it ended instead, or took too long; the text holds the end of its log.
        """
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise ServerFailed(f"{self.name} has ended: {self.last_words()}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            time.sleep(0.5)
        raise ServerFailed(f"{self.name} was not healthy within {START_TIMEOUT_S:.0f} s: {self.last_words()}")

    def cpu_times(self) -> CpuTimes:
        """What its processes have used until now."""
        root = psutil.Process(self._process.pid)
        children = root.children(recursive=True)
        if children:
            return CpuTimes(front=_seconds(root), engine=sum(map(_seconds, children)))
        first = next(thread for thread in root.threads() if thread.id == root.pid)
        front = first.user_time + first.system_time
        return CpuTimes(front=front, engine=_seconds(root) - front)

    def processes(self) -> list[str]:
        """Names of its processes, the one that was started first."""
        root = psutil.Process(self._process.pid)
        return [_name(process) for process in (root, *root.children(recursive=True))]

    def last_words(self) -> str:
        """The end of its log."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or "it wrote no log"

    def close(self) -> None:
        """End it and all that it started; by force what does not go by itself."""
        try:
            tree = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            tree = []
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GOODBYE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for process in psutil.wait_procs(tree, timeout=5)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def running(name: str, command: Sequence[str], variables: Mapping[str, str], port: int, log: Path) -> Iterator[Server]:
    """A server that is healthy; ended on leaving.

    Raises:
        ServerFailed: it did not start.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(variables), start_new_session=True
        )
    server = Server(name, process, port, log)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.close()


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _name(process: psutil.Process) -> str:
    """What a process calls itself: its title, its script and first arguments, or the module that spawned it."""
    words = [Path(word).name if word.startswith("/") else word for word in process.cmdline()]
    if "-c" in words:
        return " ".join(words[words.index("-c") + 1].split()[:2])  # `from multiprocessing.spawn`
    return " ".join(words[:4]).strip() or str(process.name())

"""A worker process: spoken to in JSON lines, frozen while another one is measured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 900.0
GOODBYE_S = 20.0


class WorkerError(Exception):
    """A worker did not start, could not do what was asked, or ended."""


class Worker:
    """An engine in its own process and process group.

    Args:
        name: for people.
        command: what to run.
        environment: of the process.
        log: file for its standard error.
    """

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
                text=True,
            )
        self.description: dict[str, Any] = {}

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def has_prefix_cache(self) -> bool:
        """Whether the engine keeps prompts from one request to the next."""
        return bool(self.description["has_prefix_cache"])

    def wait_until_ready(self) -> None:
        """Wait for the model to be loaded.

        Raises:
            WorkerError: it ended instead; the text holds the end of its log.
        """
        self.description = self._receive(START_TIMEOUT_S)

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        """Greedy tokens of a batch, and the seconds as the worker took them.

        Raises:
            WorkerError: the engine refused, failed or ended.
        """
        answer = self._ask({"op": "generate", "prompts": prompts, "tokens": tokens})
        return answer["seconds"], answer["tokens"]

    def reset(self) -> None:
        """Empty the engine's prefix cache."""
        self._ask({"op": "reset"})

    @contextlib.contextmanager
    def awake(self) -> Iterator[Worker]:
        """Let the process run for the length of this context; it is frozen after."""
        self._signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.freeze()

    def freeze(self) -> None:
        """Stop the whole process group, threads that spin included."""
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the process; by force when it does not go by itself."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            _pipe(self._process.stdin).close()
        try:
            self._process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        _pipe(self._process.stdout).close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            _pipe(self._process.stdin).write(json.dumps(request) + "\n")
            _pipe(self._process.stdin).flush()
        except OSError as error:
            raise WorkerError(f"{self.name} has ended: {self._last_words()}") from error
        answer = self._receive(ANSWER_TIMEOUT_S)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}")
        return answer

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        alarm = threading.Timer(timeout_s, self._signal, [signal.SIGKILL])
        alarm.start()
        try:
            line = _pipe(self._process.stdout).readline()
        finally:
            alarm.cancel()
        if not line:
            raise WorkerError(f"{self.name} has ended or took {timeout_s:.0f} s: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or "it wrote no log"


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise ValueError("the process was started without pipes")
    return pipe

"""A GPU as a measuring instrument: graphs timed by events, the copy rate, launches, the header of a result."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvikk.errors import ConfigError
from kvikk.version import __version__

log = logging.getLogger(__name__)

COPY_BYTES = 4 * 10**9
HOST_COPY_BYTES = 2**28
REPLAYS = 7
WARM_UPS = 2
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers")


def require_cuda(command: str) -> torch.device:
    """The GPU to measure.

    Raises:
        ConfigError: torch sees none.
    """
    if not torch.cuda.is_available():
        raise ConfigError(f"{command} measures a GPU, and torch sees none: `kvikk doctor` shows what this machine has")
    return torch.device("cuda", torch.cuda.current_device())


def header(device: torch.device) -> dict[str, Any]:
    """Where a result is from: device, versions, commit, date."""
    found: dict[str, Any] = {"device": device_name(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"multiprocessors": properties.multi_processor_count, "cuda": torch.version.cuda}
    versions = {name: _version(name) for name in PACKAGES}
    return {
        **found,
        "versions": {"kvikk": __version__, **versions, "python": platform.python_version()},
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def device_name(device: torch.device) -> str:
    """A GPU by its product name, a CPU as `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def commit() -> str | None:
    """The checked-out commit, marked when files of the package differ from it; None outside of a checkout."""
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).resolve().parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--", ":/src"], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit} with local changes" if changes else commit


def copy_tb_per_s(memory: Tensor) -> float:
    """The rate of a large copy on the device, read plus written, in TB/s. What lies in the memory is overwritten."""
    half = min(len(memory) // 2, COPY_BYTES // memory.element_size())
    source, target = memory[:half], memory[half : 2 * half]
    elapsed_us = timed_us(lambda: target.copy_(source))
    return 2 * half * memory.element_size() / elapsed_us / 1e6


def copy_rate_tb_per_s(device: torch.device) -> float:
    """The rate of a large copy in a device's memory, read plus written, in TB/s; the memory is given back."""
    if device.type == "cuda":
        return copy_tb_per_s(torch.empty(2 * COPY_BYTES, dtype=torch.uint8, device=device))
    source = torch.ones(HOST_COPY_BYTES, dtype=torch.uint8)
    target, taken = torch.zeros_like(source), []
    for _ in range(REPLAYS):
        start = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - start)
    return 2 * HOST_COPY_BYTES / statistics.median(taken) / 1e12


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Waited:
    """Seconds that this process has waited for events and streams of the GPU."""

    seconds: float = 0.0


@contextmanager
def waits() -> Iterator[Waited]:
    """Count the time that is spent waiting for the GPU, in whatever code."""
    waited = Waited()

    def counted(wait: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(wait)
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return wait(*arguments)
            finally:
                waited.seconds += time.perf_counter() - start

        return timed

    owners: list[Any] = [torch.cuda.Event, torch.cuda.Stream]
    kept = [owner.synchronize for owner in owners]
    for owner in owners:
        owner.synchronize = counted(owner.synchronize)
    try:
        yield waited
    finally:
        for owner, wait in zip(owners, kept, strict=True):
            owner.synchronize = wait


def capture(record: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what `record` launches. It must have run before: nothing is compiled or loaded while capturing."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # not torch.cuda.graph(), which collects garbage: too slow for hundreds of cases
        graph.capture_begin()
        try:
            record()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def timed_us(run: Callable[[], object], *, replays: int = REPLAYS) -> float:
    """The median time that the device takes for `run`, in microseconds, after some runs to warm up."""
    for _ in range(WARM_UPS):
        run()
    events = [(_timer(), _timer()) for _ in range(replays)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * float(statistics.median(start.elapsed_time(end) for start, end in events))


def count_launches(run: Callable[[], object]) -> int | None:
    """How many kernels `run` launches; None where the device cannot be traced."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            torch.cuda.synchronize()
        names = [event.name for event in profiler.events() or [] if event.device_type == DeviceType.CUDA]
    except Exception as error:
        log.warning("launches are not counted: the device cannot be traced (%s)", error)
        return None
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names) or None


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

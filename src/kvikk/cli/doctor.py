"""`kvikk doctor`: what this machine has, for a person and for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys

from kvikk.cli.arguments import add_logging_argument
from kvikk.version import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "numba", "numpy", "triton")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after the command."""
    add_logging_argument(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    for name, value in facts():
        print(f"{name:<22} {value}")
    return 0


def facts() -> list[tuple[str, str]]:
    """What the command prints, as (name, value)."""
    import psutil
    import torch

    from kvikk.attention.cpu.backend import numba_layer
    from kvikk.memory import format_bytes, why_no_fp8
    from kvikk.models.bundled import BUNDLED, CONVERSION, cache_folder

    memory = psutil.virtual_memory()
    bundled = cache_folder() / CONVERSION
    found = [
        ("kvikk", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", f"{platform.platform()}, {platform.machine()}"),
    ]
    found += [(name, _version(name)) for name in PACKAGES]
    found += [
        ("cpu threads", f"{torch.get_num_threads()} for torch, {psutil.cpu_count(logical=False)} physical cores"),
        ("cpu capability", torch.backends.cpu.get_cpu_capability()),
        ("compiled attention", numba_layer()),
        ("memory", f"{format_bytes(memory.available)} available of {format_bytes(memory.total)}"),
        ("cuda", "available" if torch.cuda.is_available() else "not available"),
    ]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found.append((f"cuda:{index}", f"{name}, {format_bytes(free)} free of {format_bytes(total)}"))
    no_fp8 = why_no_fp8(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    found.append(("kv dtypes", "auto, int8, int4, fp8" if no_fp8 is None else f"auto, int8, int4; fp8 {no_fp8}"))
    state = "ready" if bundled.is_dir() else "not converted yet: made on first use"
    found.append(("model cache", str(cache_folder())))
    found.append((f"bundled {BUNDLED}", state))
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"

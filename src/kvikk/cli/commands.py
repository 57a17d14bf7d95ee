"""The commands by name. A command is a module of this package, imported when it is typed.

It has `add_arguments(parser)`, `run(parsed) -> int` and, where it takes options of a config tree, that tree's root as
`CONFIG`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

COMMANDS = {
    "serve": "an OpenAI-compatible server",
    "bench": "latency, throughput, loads on any server, and the GPU path in parts",
    "eval": "what a smaller KV cache costs: quality beside bytes beside speed",
    "calibrate": "measure this GPU, so that each step takes its fastest attention",
    "generate": "continue one or several prompts",
    "chat": "talk with the model",
    "demo": "questions over a long document, computed once",
    "models": "architectures that run, and models on this machine",
    "policies": "policies for the KV cache: what they keep, read and cost",
    "config": "options, their values, and where each came from",
    "doctor": "versions, devices, memory, caches",
}
"""What each is for, in the order in which `kvikk --help` lists them."""


def command(name: str) -> ModuleType:
    """The module of a command."""
    return import_module(f"kvikk.cli.{name}")

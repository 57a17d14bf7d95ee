"""`kvikk models`: the architectures that run, those that are refused and why, and the models on this machine."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from kvikk.cli.arguments import add_logging_argument
from kvikk.memory import format_bytes
from kvikk.models.catalogue import Architecture, CachedModel, architectures, cached_models
from kvikk.models.support import Refused

WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_logging_argument(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    known, cached = architectures(), cached_models()
    print(json.dumps(as_json(known, cached), indent=2) if parsed.json else as_text(known, cached))
    return 0


def as_json(known: Sequence[Architecture], cached: Sequence[CachedModel]) -> dict[str, Any]:
    """What the command found as the object that `--json` prints."""
    return {
        "architectures": [asdict(architecture) for architecture in known],
        "cached": [asdict(model) | {"folder": str(model.folder)} for model in cached],
    }


def as_text(known: Sequence[Architecture], cached: Sequence[CachedModel]) -> str:
    """What the command found, for a person."""
    lines = ["On kvikk's own module:", *_names(each for each in known if each.way == "own")]
    lines += ["", "On transformers' module, unless a test at load finds that it computes otherwise:"]
    lines += _names(each for each in known if each.way == "transformers")
    lines += ["", "Refused:"]
    for kind in Refused:
        lines += [f"  {kind}", *_names((each for each in known if each.refused is kind), indent=4)]
    lines += ["", "On this machine:"]
    lines += [line for model in cached for line in _described(model)] or ["  none"]
    return "\n".join(lines)


def _names(listed: Iterable[Architecture], indent: int = 2) -> list[str]:
    margin = " " * indent
    names = ", ".join(architecture.name for architecture in listed)
    return textwrap.wrap(names, WIDTH, initial_indent=margin, subsequent_indent=margin)


def _described(model: CachedModel) -> list[str]:
    facts = (model.name, format_bytes(model.size_bytes), model.architecture or "")
    lines = ["  " + "  ".join(filter(None, facts)), f"    {model.folder}"]
    return [*lines, f"    {model.refused}"] if model.refused else lines

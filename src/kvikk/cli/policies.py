"""`kvikk policies`: which policies for the KV cache there are, what they read, and what that costs."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from kvikk.cli.arguments import add_logging_argument
from kvikk.compress.catalogue import Listed, listed
from kvikk.compress.registry import installed

WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    add_logging_argument(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    policies = listed(installed())
    print(json.dumps([asdict(each) for each in policies], indent=2) if parsed.json else as_text(policies))
    return 0


def as_text(policies: Sequence[Listed]) -> str:
    """The policies, for a person: a line of facts for each, and below it what it keeps, its cost and its options."""
    rows = [(each.name, each.origin, ", ".join(each.signals) or "no signals") for each in policies]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines: list[str] = []
    for each, (name, origin, signals) in zip(policies, rows, strict=True):
        if each.fault is None:
            lines += [f"{name:<{widths[0]}}  {origin:<{widths[1]}}  {signals}", *_explained(each)]
        else:
            lines += [f"{name:<{widths[0]}}  {origin:<{widths[1]}}  cannot be used", *_indented(each.fault)]
    return "\n".join(lines)


def _explained(each: Listed) -> Iterator[str]:
    yield from _indented(each.summary)
    yield from _indented(f"costs: {each.cost}")
    if each.options:
        yield from _indented("options: " + ", ".join(f"{name}={value}" for name, value in each.options.items()))


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="      ")

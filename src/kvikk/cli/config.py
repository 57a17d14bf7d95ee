"""`kvikk config`: every option of a command, its value, and where that came from."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from kvikk.cli.arguments import add_config_arguments, add_logging_argument, resolve
from kvikk.cli.commands import COMMANDS, command
from kvikk.configuration import Setting, build, given, options_of
from kvikk.errors import ConfigError

WIDEST = "serve"
"""The command whose options include those of all others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after the command."""
    trees = config_trees()
    parser.add_argument(
        "asked", nargs="?", metavar="COMMAND", choices=trees, default=WIDEST, help=f"{', '.join(trees)} (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_config_arguments(parser, trees[WIDEST])
    add_logging_argument(parser)


def config_trees() -> dict[str, type]:
    """The root of the config tree of each command that has one."""
    return {name: module.CONFIG for name in COMMANDS if hasattr(module := command(name), "CONFIG")}


def run(parsed: argparse.Namespace) -> int:
    """Run the command. What cannot be honoured is refused after the table, which then says whom to blame."""
    trees = config_trees()
    root = trees[parsed.asked]
    for name, option in options_of(trees[WIDEST]).items():
        if hasattr(parsed, name) and name not in options_of(root):
            raise ConfigError(f"{option.flag} is no option of kvikk {parsed.asked}, but of kvikk {WIDEST}")
    settings = resolve(parsed, root)
    print(json.dumps(as_json(settings), indent=2) if parsed.json else as_table(settings))
    build(root, given(settings))
    return 0


def as_json(settings: Mapping[str, Setting]) -> dict[str, dict[str, object]]:
    """The settings as the object that `--json` prints."""
    return {
        name: {"value": setting.shown, "origin": setting.origin, "source": setting.source}
        for name, setting in settings.items()
    }


def as_table(settings: Mapping[str, Setting]) -> str:
    """The settings, one a line: name, value as in a file, origin."""
    rows = [
        (name, "-" if setting.shown is None else json.dumps(setting.shown, ensure_ascii=False), _origin(setting))
        for name, setting in settings.items()
    ]
    name_width, value_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{name:<{name_width}}  {value:<{value_width}}  {origin}" for name, value, origin in rows)


def _origin(setting: Setting) -> str:
    return setting.origin if setting.source is None else f"{setting.origin} {setting.source}"

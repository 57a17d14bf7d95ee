"""The page of commands: what each takes, read from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from docs.generate.markdown import code, sentence, table

from kvikk.cli.commands import COMMANDS
from kvikk.cli.main import build_parser
from kvikk.configuration import options_of
from kvikk.engine import EngineConfig
from kvikk.server.config import ServeConfig

INTRODUCTION = """\
# Commands

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted. A command
that takes [options](options.md) takes them from environment variables and a file too. `kvikk COMMAND --help` prints all
of this.
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, table(["command", ""], [(code(f"kvikk {name}"), text) for name, text in COMMANDS.items()])]
    for parser in every_parser():
        parts.append(f"## {parser.prog}\n\n{sentence(parser.description or '')}.\n")
        shared = next((tree for tree in (ServeConfig, EngineConfig) if takes(parser, set(options_of(tree)))), None)
        parts += _groups(parser, set() if shared is None else set(options_of(shared)))
        if shared is not None:
            parts.append(f"And the [options]({'options.md' if shared is ServeConfig else 'options.md#engine'}).\n")
    return "\n".join(parts)


def every_parser(parser: argparse.ArgumentParser | None = None) -> Iterator[argparse.ArgumentParser]:
    """The parsers of all commands, and of the commands within them."""
    for action in (parser or build_parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield below
                yield from every_parser(below)


def takes(parser: argparse.ArgumentParser, names: set[str]) -> bool:
    """Whether a command has all these options."""
    return names <= {action.dest for action in parser._actions}


def _groups(parser: argparse.ArgumentParser, without: set[str]) -> Iterator[str]:
    for group in parser._action_groups:
        rows = [
            (_written(action), _help(parser, action))
            for action in group._group_actions
            if action.dest not in without and not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
        ]
        if rows:
            yield f"{sentence(group.description or group.title or '')}:\n"
            yield table(["argument", ""], rows)


def _written(action: argparse.Action) -> str:
    """`--stop TEXT`, as it is typed."""
    takes = "" if action.nargs == 0 else action.metavar or "|".join(action.choices or ()) or action.dest.upper()
    if isinstance(action, argparse.BooleanOptionalAction):
        takes = ""
    return ", ".join(code(f"{flag} {takes}".strip()) for flag in action.option_strings or [""])


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""

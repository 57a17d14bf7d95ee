"""Parses the command line and runs a command; errors become one line and an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Container, Sequence

from kvikk.cli.commands import COMMANDS, command
from kvikk.errors import ConfigError, InvalidRequest, KvikkError
from kvikk.logs import set_up_logging
from kvikk.version import __version__

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 failed, 2 bad input."""
    parsed = parse(sys.argv[1:] if arguments is None else arguments)
    set_up_logging(getattr(logging, parsed.log_level.upper()), "kvikk")
    try:
        return int(command(parsed.command).run(parsed))
    except KvikkError as error:
        print(f"kvikk: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ConfigError | InvalidRequest) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `kvikk generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What was typed. Only the command that was named is imported: `kvikk --version` does not wait for torch."""
    named = next((word for word in arguments if not word.startswith("-")), None)
    return build_parser({named}).parse_args(arguments)


def build_parser(filled: Container[str | None] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of all commands; those in `filled` are imported and know their arguments."""
    parser = argparse.ArgumentParser(
        prog="kvikk", description="An LLM inference engine whose subject is its KV cache.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvikk {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, purpose in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        if name in filled:
            command(name).add_arguments(subparser)
    return parser

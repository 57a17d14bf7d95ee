"""Parses the command line and runs a command; errors become one line and an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from kvikk.cli import chat, demo, doctor, generate
from kvikk.errors import ConfigError, InvalidRequest, KvikkError
from kvikk.version import __version__

COMMANDS = (generate, chat, demo, doctor)
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 1 failed, 2 bad input."""
    parser = argparse.ArgumentParser(
        prog="kvikk", description="An LLM inference engine whose subject is its KV cache.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvikk {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in COMMANDS:
        command.register(subparsers)
    parsed = parser.parse_args(arguments)
    logging.basicConfig(
        level=getattr(logging, parsed.log_level.upper()), format="kvikk: %(message)s", stream=sys.stderr, force=True
    )
    for noisy in ("numba", "httpx", "httpcore", "huggingface_hub", "filelock", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        return int(parsed.run(parsed))
    except KvikkError as error:
        print(f"kvikk: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ConfigError | InvalidRequest) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `kvikk generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED

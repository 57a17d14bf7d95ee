"""`kvikk serve`: OpenAI's API over HTTP."""

from __future__ import annotations

import argparse

from kvikk.cli.arguments import add_config_arguments, add_logging_argument, resolve
from kvikk.configuration import build, given
from kvikk.errors import ConfigError
from kvikk.server.config import ServeConfig

CONFIG = ServeConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after the command."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    add_config_arguments(parser, CONFIG)
    add_logging_argument(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    from kvikk.server.run import serve

    if parsed.positional_model is not None:
        if getattr(parsed, "model", parsed.positional_model) != parsed.positional_model:
            raise ConfigError(f"two models are named, {parsed.positional_model} and --model {parsed.model}: name one")
        parsed.model = parsed.positional_model
    return serve(build(CONFIG, given(resolve(parsed, CONFIG))))

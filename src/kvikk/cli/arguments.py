"""Flags made from config dataclasses, so that a new option is written once."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from kvikk.configuration import Option, from_environment, from_file, options_of
from kvikk.engine.config import EngineConfig
from kvikk.engine.sampling_params import SamplingParams
from kvikk.errors import ConfigError, InvalidRequest

LOG_LEVELS = ("debug", "info", "warning", "error")
_CLI_MAX_TOKENS = 256


def add_logging_argument(parser: argparse.ArgumentParser) -> None:
    """`--log-level`."""
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="what is told on stderr (%(default)s)")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """All engine options, and `--config`."""
    group = parser.add_argument_group("engine", "each is also an environment variable: KVIKK_MAX_MODEL_LEN and so on")
    group.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of these options")
    for option in options_of(EngineConfig).values():
        _add(group, option)


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    default = "" if option.default is None else f" ({option.default})"
    text = (option.help + default).replace("%", "%%")
    flags = ["-m", option.flag] if option.name == "model" else [option.flag]
    if option.kind is bool:
        group.add_argument(
            *flags, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, dest=option.name, help=text
        )
        return
    metavar = "|".join(option.choices) if option.choices else option.name.rsplit("_", 1)[-1].upper()
    group.add_argument(*flags, default=argparse.SUPPRESS, dest=option.name, metavar=metavar, help=text)


def engine_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """The options that flags, environment and file set, the first of these winning.

    Raises:
        ConfigError: a value of the wrong type, or an unknown name in the file.
    """
    options = options_of(EngineConfig)
    found = from_file(options, parsed.config) if parsed.config else {}
    found |= from_environment(options, os.environ)
    for option in options.values():
        if hasattr(parsed, option.name):
            value = getattr(parsed, option.name)
            found[option.name] = option.parsed(value, option.flag) if isinstance(value, str) else value
    return found


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The sampling options of one text, under vLLM's names."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", default=str(_CLI_MAX_TOKENS), metavar="N", help="tokens at most (%(default)s)")
    group.add_argument("--min-tokens", default="0", metavar="N", help="no end of text before this many (%(default)s)")
    group.add_argument("--temperature", default="0", metavar="T", help="0 takes the likeliest token (%(default)s)")
    group.add_argument("--top-k", default="0", metavar="K", help="sample among the K likeliest; 0: among all")
    group.add_argument("--top-p", default="1", metavar="P", help="sample among the likeliest that hold this mass")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the model's end-of-text token")


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """The sampling options that give more than one text."""
    group = parser.add_argument_group("results")
    group.add_argument("--n", default="1", metavar="N", help="texts for each prompt (%(default)s)")
    group.add_argument(
        "--logprobs", default=None, metavar="N", help="log-probabilities of the N likeliest tokens; with --json"
    )


def sampling_params(parsed: argparse.Namespace, options: dict[str, Any]) -> SamplingParams:
    """The sampling parameters that the flags say. The engine's seed, where one is set, is that of each request.

    Raises:
        InvalidRequest: a value of the wrong type or out of its limits.
    """
    given: dict[str, Any] = {"stop": parsed.stop, "ignore_eos": parsed.ignore_eos}
    for name in ("max_tokens", "min_tokens", "top_k", "n", "logprobs"):
        if getattr(parsed, name, None) is not None:
            given[name] = _number(name, getattr(parsed, name), int)
    for name in ("temperature", "top_p"):
        given[name] = _number(name, getattr(parsed, name), float)
    if "seed" in options:
        given["seed"] = options["seed"]
    return SamplingParams(**given)


def _number(name: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InvalidRequest(f"--{name.replace('_', '-')} is {text!r}: it must be {what}") from None


def read_text(path: str) -> str:
    """The text of a file.

    Raises:
        ConfigError: it cannot be read as UTF-8 text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from None

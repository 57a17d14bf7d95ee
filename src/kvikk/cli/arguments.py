"""Flags made from config dataclasses, so that a new option is written once."""

from __future__ import annotations

import argparse
import os
from itertools import groupby
from pathlib import Path
from typing import Any

from kvikk import configuration
from kvikk.configuration import Option, Setting, options_of
from kvikk.engine.sampling_params import SamplingParams
from kvikk.errors import ConfigError, InvalidRequest
from kvikk.grammar import StructuredOutputsParams

LOG_LEVELS = ("debug", "info", "warning", "error")
_CLI_MAX_TOKENS = 256
_NUMBERS: dict[type[int] | type[float], tuple[str, ...]] = {
    int: ("max_tokens", "min_tokens", "top_k", "n", "logprobs", "prompt_logprobs"),
    float: ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
}
"""Sampling parameters that are numbers, each with a flag of its name."""


def add_logging_argument(parser: argparse.ArgumentParser) -> None:
    """`--log-level`."""
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="what is told on stderr (%(default)s)")


def add_config_arguments(parser: argparse.ArgumentParser, config: type) -> None:
    """All options of a config tree, in a group for each of its dataclasses, and `--config`."""
    sources = parser.add_argument_group(
        "configuration", "each flag below is also a variable (KVIKK_MAX_MODEL_LEN and so on) and a line of the file"
    )
    sources.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of options")
    for owner, options in groupby(options_of(config).values(), key=lambda option: option.owner):
        group = parser.add_argument_group(title(owner), summary(owner))
        for option in options:
            _add(group, option)


def title(owner: type) -> str:
    """What a dataclass's group of flags is called: `MemoryConfig` is `memory`."""
    return owner.__name__.removesuffix("Config").lower()


def summary(owner: type) -> str:
    """The first line of a dataclass's docstring."""
    return (owner.__doc__ or "").partition("\n")[0]


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


def resolve(parsed: argparse.Namespace, config: type) -> dict[str, Setting]:
    """Every option of a config tree with its value and origin; `given` of it goes to `build` or `LLM`.

    Raises:
        ConfigError: a value of the wrong type, or an unknown name in the file.
    """
    flags = {name: getattr(parsed, name) for name in options_of(config) if hasattr(parsed, name)}
    return configuration.resolve(config, flags=flags, environment=os.environ, file=parsed.config)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The sampling options of one text, under vLLM's names."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", default=str(_CLI_MAX_TOKENS), metavar="N", help="tokens at most (%(default)s)")
    group.add_argument("--min-tokens", default="0", metavar="N", help="no end of text before this many (%(default)s)")
    group.add_argument("--temperature", default="0", metavar="T", help="0 takes the likeliest token (%(default)s)")
    group.add_argument("--top-k", default="0", metavar="K", help="sample among the K likeliest; 0: among all")
    group.add_argument("--top-p", default="1", metavar="P", help="sample among the likeliest that hold this mass")
    group.add_argument("--min-p", default="0", metavar="P", help="sample among those at least P times the likeliest's")
    group.add_argument("--presence-penalty", default="0", metavar="X", help="against tokens that the text holds; -2..2")
    group.add_argument("--frequency-penalty", default="0", metavar="X", help="the same, each time it holds them; -2..2")
    group.add_argument(
        "--repetition-penalty", default="1", metavar="X", help="above 1: against those of prompt and text"
    )
    group.add_argument(
        "--logit-bias", action="append", default=[], metavar="ID=X", help="add X to a token's logit; may be repeated"
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the model's end-of-text token")


def add_form_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what form a text must have."""
    group = parser.add_argument_group("form", "of the text; one of these")
    group.add_argument("--json-schema", default=None, metavar="FILE", help="JSON that this schema describes")
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--regex", default=None, metavar="REGEX", help="matches this regular expression")
    group.add_argument("--choice", action="append", default=None, metavar="TEXT", help="one of these; may be repeated")
    group.add_argument("--grammar", default=None, metavar="FILE", help="a sentence of this grammar, in Lark or GBNF")


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    """The sampling options that give more than one text."""
    group = parser.add_argument_group("results")
    group.add_argument("--n", default="1", metavar="N", help="texts for each prompt (%(default)s)")
    group.add_argument(
        "--logprobs", default=None, metavar="N", help="log-probabilities of the N likeliest tokens; with --json"
    )
    group.add_argument("--prompt-logprobs", default=None, metavar="N", help="the same of the prompt; with --json")


def sampling_params(parsed: argparse.Namespace, options: dict[str, Any]) -> SamplingParams:
    """The sampling parameters that the flags say. The engine's seed, where one is set, is that of each request.

    Raises:
        InvalidRequest: a value of the wrong type or out of its limits.
    """
    given: dict[str, Any] = {"stop": parsed.stop, "ignore_eos": parsed.ignore_eos}
    for kind, names in _NUMBERS.items():
        for name in names:
            if getattr(parsed, name, None) is not None:
                given[name] = _number(name, getattr(parsed, name), kind)
    if parsed.logit_bias:
        given["logit_bias"] = dict(map(_bias, parsed.logit_bias))
    if "seed" in options:
        given["seed"] = options["seed"]
    return SamplingParams(**given, structured_outputs=_form(parsed))


def _form(parsed: argparse.Namespace) -> StructuredOutputsParams | None:
    """The form that the flags of `add_form_arguments` say, where the command has them and one is used."""
    fields = {name: getattr(parsed, name, None) for name in ("json_object", "regex", "choice")}
    files = {"json": getattr(parsed, "json_schema", None), "grammar": getattr(parsed, "grammar", None)}
    fields |= {name: None if path is None else read_text(path) for name, path in files.items()}
    used = {name: value for name, value in fields.items() if value not in (None, False)}
    return StructuredOutputsParams(**used) if used else None


def _bias(text: str) -> tuple[int, float]:
    token, is_pair, value = text.partition("=")
    if not is_pair:
        raise InvalidRequest(f"--logit-bias is {text!r}: it must be ID=X, such as 50256=-100", param="logit_bias")
    return int(_number("logit_bias", token, int)), float(_number("logit_bias", value, float))


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

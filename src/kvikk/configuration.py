"""One tree of config dataclasses, filled from flags, environment and a file alike; help texts are the docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from kvikk.errors import ConfigError

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "KVIKK_"

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Option:
    """A leaf of the tree: a field of some config dataclass.

    Args:
        name: the field's name; unique in the tree.
        kind: `str`, `int`, `float` or `bool`.
        is_optional: whether None is allowed.
        choices: the values allowed, for a literal type.
        default: what it is when nothing is said.
        help: from the dataclass's docstring.
    """

    name: str
    kind: type
    is_optional: bool
    choices: tuple[str, ...]
    default: Any
    help: str

    @property
    def flag(self) -> str:
        """`--max-model-len`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`KVIKK_MAX_MODEL_LEN`."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    def checked(self, value: object, source: str) -> Any:
        """The value if it has the option's type.

        Raises:
            ConfigError: naming the value, its source and what is expected.
        """
        if value is None and self.is_optional:
            return None
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if self.kind is float and (is_number or isinstance(value, float)):
            return float(typing.cast("float", value))
        if isinstance(value, self.kind) and (self.kind is not int or is_number):
            if self.choices and value not in self.choices:
                raise ConfigError(f"{source} is {value!r}: choose from {', '.join(self.choices)}")
            return value
        raise ConfigError(f"{source} is {value!r}: it must be {_KIND_NAMES[self.kind]}")

    def parsed(self, text: str, source: str) -> Any:
        """The value that a flag's or variable's text stands for."""
        if self.kind is bool:
            if text.lower() not in _BOOLEANS:
                raise ConfigError(f"{source} is {text!r}: it must be true or false")
            return _BOOLEANS[text.lower()]
        try:
            return self.checked(self.kind(text), source)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{source} is {text!r}: it must be {_KIND_NAMES[self.kind]}") from None


_KIND_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def options_of(config: type) -> dict[str, Option]:
    """All leaves of a config dataclass and of those within it, by name."""
    found: dict[str, Option] = {}
    hints = typing.get_type_hints(config)
    help_of = _argument_help(config)
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            inner = options_of(typing.cast("type", hint))
        else:
            kind, is_optional, choices = _leaf_type(hint)
            option = Option(
                name=field.name,
                kind=kind,
                is_optional=is_optional,
                choices=choices,
                default=field.default,
                help=help_of.get(field.name, ""),
            )
            inner = {field.name: option}
        for name in inner.keys() & found.keys():
            raise TypeError(f"{config.__name__}: two options are called {name}")
        found |= inner
    return found


def build(config: type[T], values: Mapping[str, object]) -> T:
    """A config tree from a flat mapping of option names; what is not named keeps its default.

    Raises:
        ConfigError: an unknown name, a wrong type, or what the dataclasses themselves refuse.
    """
    options = options_of(config)
    for name in values:
        if name not in options:
            near = get_close_matches(name, options, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "known are: " + ", ".join(options)
            raise ConfigError(f"unknown option {name!r}: {hint}")
    return _build(config, {name: options[name].checked(value, name) for name, value in values.items()})


def _build(config: type[T], values: Mapping[str, object]) -> T:
    arguments: dict[str, Any] = {}
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(typing.cast("Any", config)):
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _build(hints[field.name], values)
        elif field.name in values:
            arguments[field.name] = values[field.name]
    return config(**arguments)


def from_environment(options: Mapping[str, Option], environment: Mapping[str, str]) -> dict[str, Any]:
    """Options that `KVIKK_...` variables set. One that is near an option's name and none of them is warned about."""
    known = {option.variable for option in options.values()}
    for name in environment:
        if name.startswith(ENVIRONMENT_PREFIX) and name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.8)
            if near:
                logger.warning("the environment sets %s, which is no option: did you mean %s?", name, near[0])
    return {
        option.name: option.parsed(environment[option.variable], option.variable)
        for option in options.values()
        if option.variable in environment
    }


def from_file(options: Mapping[str, Option], path: Path) -> dict[str, Any]:
    """Options that a TOML file sets; names with dashes or underscores.

    Raises:
        ConfigError: the file cannot be read, or names an unknown option.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    values = {}
    for written, value in content.items():
        name = written.replace("-", "_")
        if name not in options:
            near = get_close_matches(name, options, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{path} sets the unknown option {written!r}{hint}")
        values[name] = options[name].checked(value, f"{written} in {path}")
    return values


def _leaf_type(hint: Any) -> tuple[type, bool, tuple[str, ...]]:
    arguments = typing.get_args(hint)
    is_optional = isinstance(hint, types.UnionType) and type(None) in arguments
    if is_optional:
        (hint,) = (a for a in arguments if a is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return str, is_optional, typing.get_args(hint)
    if hint not in _KIND_NAMES:
        raise TypeError(f"an option cannot be {hint}")
    return hint, is_optional, ()


def _argument_help(config: type) -> dict[str, str]:
    """The `Args:` of a docstring, by name."""
    text = inspect.getdoc(config) or ""
    section = text.partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", help_text).strip().replace("`", "") for name, help_text in entries}

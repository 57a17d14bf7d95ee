"""One tree of config dataclasses, filled from flags, environment and a file alike; help texts are the docstrings.

`options_of` flattens a tree into its options, `resolve` gives each its value and says where that came from, and
`build` makes the tree of what was given.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvikk.errors import ConfigError

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "KVIKK_"
MASKED = "********"

Origin = Literal["default", "preset", "file", "environment", "flag"]

T = TypeVar("T")


def secret() -> Any:
    """The default (None) of a field whose value is never shown: `api_key: str | None = secret()`."""
    return dataclasses.field(default=None, repr=False, metadata={"secret": True})


def presets(values: Mapping[str, Mapping[str, Any]]) -> Any:
    """The default (None) of a field that names values of others: `preset: str | None = presets({...})`.

    `resolve` and `build` give an option that nobody sets the value that the preset has for it.

    Args:
        values: of options of the same tree, by the preset's name.
    """
    return dataclasses.field(default=None, metadata={"presets": values})


@dataclass(frozen=True, kw_only=True)
class Option:
    """A leaf of the tree: a field of some config dataclass.

    Args:
        name: the field's name; unique in the tree.
        owner: the dataclass that has the field.
        kind: `str`, `int`, `float` or `bool`.
        is_optional: whether None is allowed.
        choices: the values allowed, for a literal type or presets.
        default: what it is when nothing is said.
        help: from the dataclass's docstring.
        is_secret: whether its value must not be shown.
        presets: what each of its values means for other options, where it names presets.
    """

    name: str
    owner: type
    kind: type
    is_optional: bool
    choices: tuple[str, ...]
    default: Any
    help: str
    is_secret: bool
    presets: Mapping[str, Mapping[str, Any]]

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
        shown = MASKED if self.is_secret else repr(value)
        raise ConfigError(f"{source} is {shown}: it must be {_KIND_NAMES[self.kind]}")

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


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An option's value, and where it came from.

    Args:
        option: whose value.
        value: as checked.
        origin: who set it.
        source: the file's path, the variable, the flag, or the preset's name; None for a default.
    """

    option: Option
    value: Any = dataclasses.field(repr=False)
    origin: Origin = "default"
    source: str | None = None

    @property
    def shown(self) -> Any:
        """The value as anyone may see it: a secret is masked."""
        return MASKED if self.option.is_secret and self.value is not None else self.value


def options_of(config: type) -> dict[str, Option]:
    """All leaves of a config dataclass and of those within it, by name."""
    found: dict[str, Option] = {}
    hints = typing.get_type_hints(config)
    help_of = argument_help(config)
    for field in dataclasses.fields(config):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            inner = options_of(typing.cast("type", hint))
        else:
            kind, is_optional, choices = _leaf_type(hint)
            meanings = field.metadata.get("presets", {})
            option = Option(
                name=field.name,
                owner=config,
                kind=kind,
                is_optional=is_optional,
                choices=choices or tuple(meanings),
                default=field.default,
                help=help_of.get(field.name, ""),
                is_secret=field.metadata.get("secret", False),
                presets=meanings,
            )
            inner = {field.name: option}
        for name in inner.keys() & found.keys():
            raise TypeError(f"{config.__name__}: two options are called {name}")
        found |= inner
    return found


def resolve(
    config: type, *, flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None
) -> dict[str, Setting]:
    """Every option of a config tree with its value: of the flag, else the variable, else the file, else the default.

    What a preset says of an option comes before the default.

    Args:
        config: the root of the tree.
        flags: what the command line sets, by option name; text is parsed.
        environment: all variables of the process.
        file: TOML, names with dashes or underscores.

    Raises:
        ConfigError: a value of the wrong type, a file that cannot be read, or an unknown name in it.
    """
    options = options_of(config)
    settings = {name: Setting(option=option, value=option.default) for name, option in options.items()}
    if file is not None:
        settings |= _from_file(options, file)
    settings |= _from_environment(options, environment) | _from_flags(options, flags)
    meant = _from_presets(options, {name: setting.value for name, setting in settings.items()})
    return settings | {name: setting for name, setting in meant.items() if settings[name].origin == "default"}


def given(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """What was set, by name, without the defaults: for `build`."""
    return {name: setting.value for name, setting in settings.items() if setting.origin != "default"}


def build(config: type[T], values: Mapping[str, object]) -> T:
    """A config tree from a flat mapping of option names; what is not named is as a preset says, or has its default.

    Raises:
        ConfigError: an unknown name, a wrong type, or what the dataclasses themselves refuse.
    """
    options = options_of(config)
    for name in values:
        if name not in options:
            hint = _nearest(name, options) or "known are: " + ", ".join(options)
            raise ConfigError(f"unknown option {name!r}: {hint}")
    checked = {name: options[name].checked(value, name) for name, value in values.items()}
    meant = {name: setting.value for name, setting in _from_presets(options, checked).items()}
    return _build(config, meant | checked)


def _build(config: type[T], values: Mapping[str, object]) -> T:
    arguments: dict[str, Any] = {}
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(typing.cast("Any", config)):
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _build(hints[field.name], values)
        elif field.name in values:
            arguments[field.name] = values[field.name]
    return config(**arguments)


def _from_presets(options: Mapping[str, Option], values: Mapping[str, Any]) -> dict[str, Setting]:
    """What the presets that are named among all values say of other options."""
    return {
        name: Setting(option=options[name], value=options[name].checked(value, name), origin="preset", source=preset)
        for chooser, preset in values.items()
        for name, value in options[chooser].presets.get(preset, {}).items()
    }


def _from_flags(options: Mapping[str, Option], flags: Mapping[str, object]) -> dict[str, Setting]:
    found = {}
    for name, value in flags.items():
        option = options[name]
        checked = option.parsed(value, option.flag) if isinstance(value, str) else option.checked(value, option.flag)
        found[name] = Setting(option=option, value=checked, origin="flag", source=option.flag)
    return found


def _from_environment(options: Mapping[str, Option], environment: Mapping[str, str]) -> dict[str, Setting]:
    """What `KVIKK_...` variables set. One that is near an option's name and none of them is warned about."""
    by_variable = {option.variable: option for option in options.values()}
    found = {}
    for variable, text in environment.items():
        if variable in by_variable:
            option = by_variable[variable]
            value = option.parsed(text, variable)
            found[option.name] = Setting(option=option, value=value, origin="environment", source=variable)
        elif variable.startswith(ENVIRONMENT_PREFIX):
            near = _nearest(variable, by_variable, cutoff=0.8)
            if near:
                logger.warning("the environment sets %s, which is no option: %s", variable, near)
    return found


def _from_file(options: Mapping[str, Option], path: Path) -> dict[str, Setting]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}") from None
    found = {}
    for written, value in content.items():
        name = written.replace("-", "_")
        if name not in options:
            hint = _nearest(name, options) or "`kvikk config` lists them"
            raise ConfigError(f"{path} sets the unknown option {written!r}: {hint}")
        if name in found:
            raise ConfigError(f"{path} sets {name!r} twice, once with dashes and once with underscores: keep one")
        checked = options[name].checked(value, f"{written} in {path}")
        found[name] = Setting(option=options[name], value=checked, origin="file", source=str(path))
    return found


def _nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The question whether the name that is most like this one was meant; nothing when none is like it."""
    near = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else ""


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


def argument_help(described: type) -> dict[str, str]:
    """The `Args:` of a docstring, by name."""
    text = inspect.getdoc(described) or ""
    section = text.partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", help_text).strip().replace("`", "") for name, help_text in entries}

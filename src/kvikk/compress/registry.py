"""Policies by name: the built-in ones, and those that installed packages bring."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvikk.compress.policy import Policy
from kvikk.compress.signals import Signal
from kvikk.errors import ConfigError, KvikkError
from kvikk.quantities import real_number, whole_number

T = typing.TypeVar("T")

GROUP = "kvikk.policies"
"""The entry-point group that a package names its policies in."""
BUILT_IN = "built-in"
"""The origin of a policy that comes with kvikk."""
_MODULES = {
    "full": "full:Full",
    "streaming": "streaming:Streaming",
    "random": "random:Random",
    "snapkv": "snapkv:SnapKV",
    "h2o": "h2o:H2O",
    "tova": "tova:TOVA",
    "knorm": "knorm:KNorm",
    "keydiff": "keydiff:KeyDiff",
    "scissorhands": "scissorhands:Scissorhands",
    "expected-attention": "expected_attention:ExpectedAttention",
    "r-kv": "r_kv:RKV",
}


@dataclass(frozen=True)
class Entry:
    """A policy that can be asked for.

    Args:
        name: that it is asked for by.
        origin: `built-in`, or the package that brings it.
        target: `module:class`.
    """

    name: str
    origin: str
    target: str

    def load(self) -> type[Policy]:
        """Import the class, and look at it.

        Raises:
            ConfigError: it cannot be imported, or is no policy; the message names it and its package.
        """
        module, _, attribute = self.target.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (Exception, SystemExit) as error:  # whatever a package from outside does when imported
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"policy {self.name!r} of {self.origin} cannot be imported: {reason}") from error
        fault = fault_of(found)
        if fault:
            raise ConfigError(f"policy {self.name!r} of {self.origin} ({self.target}): {fault}")
        return typing.cast("type[Policy]", found)


def fault_of(found: Any) -> str | None:
    """Why a class is no policy, in words; None where it is one."""
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        return "a policy is a dataclass, and its fields are its options"
    options = {field.name for field in dataclasses.fields(found)}
    for name in ("needs", "state", "cost"):
        if name in options:
            return f"{name} is no option: annotate it as ClassVar"
    needs = getattr(found, "needs", None)
    if not isinstance(needs, frozenset) or not all(isinstance(signal, Signal) for signal in needs):
        return f"needs is {needs!r}: it must be a frozenset of Signal, such as frozenset({{Signal.KEYS}})"
    if not callable(getattr(found, "score", None)):
        return "it has no method score(view)"
    if Signal.QUERIES in needs and not hasattr(found, "query_window"):
        return "it needs QUERIES and does not say how many: give it a query_window"
    state = getattr(found, "state", ())
    if not isinstance(state, tuple) or not all(isinstance(name, str) for name in state):
        return f"state is {state!r}: it must be a tuple of names, such as ('hits',)"
    return None


class Registry:
    """Every policy that can be asked for. Nothing is imported until a policy is.

    Args:
        plugins: entry points of installed packages.
    """

    def __init__(self, plugins: Iterable[EntryPoint]) -> None:
        entries = [Entry(name, BUILT_IN, f"kvikk.compress.policies.{target}") for name, target in _MODULES.items()]
        for point in plugins:
            origin = point.dist.name if point.dist else "an unnamed package"
            entries.append(Entry(point.name, origin, point.value))
        self.entries = tuple(entries)

    def entry(self, name: str) -> Entry:
        """The policy of this name.

        Raises:
            ConfigError: there is none, or two packages bring one of the name.
        """
        named = [entry for entry in self.entries if entry.name == name]
        if not named:
            names = [entry.name for entry in self.entries]
            near = get_close_matches(name, names, n=1)
            known = "is its package installed in this environment? known are: " + ", ".join(names)
            hint = f"did you mean {near[0]!r}?" if near else known
            raise ConfigError(f"unknown policy {name!r}: {hint}")
        if len(named) > 1:
            origins = " and ".join(entry.origin for entry in named)
            raise ConfigError(
                f"policy {name!r} is there twice, of {origins}: uninstall one or ask its author to rename"
            )
        return named[0]


@cache
def installed() -> Registry:
    """The policies of this process: packages are looked through once."""
    return Registry(entry_points(group=GROUP))


def make(made: type[T], name: str, options: Mapping[str, object]) -> T:
    """A dataclass made of options as they come in JSON: names and types are checked, then by the class itself.

    Args:
        made: the dataclass.
        name: what people call it, for messages.
        options: by field.

    Raises:
        ConfigError: an unknown option, a value of a wrong type, or one that the class refuses.
    """
    hints = typing.get_type_hints(made)
    known = [field.name for field in dataclasses.fields(typing.cast("Any", made))]
    for option in options:
        if option not in known:
            near = get_close_matches(str(option), known, n=1)
            takes = ", ".join(known) if known else "it takes none"
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {takes}" if known else takes
            raise ConfigError(f"{name} has no option {option!r}: {hint}")
    try:
        return made(**{option: _typed(f"{name}: {option}", hints[option], value) for option, value in options.items()})
    except KvikkError as error:
        raise ConfigError(str(error)) from None


def _typed(label: str, hint: Any, value: object) -> object:
    if hint is int:
        return whole_number(label, value)
    if hint is float:
        return real_number(label, value)
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else None
    if choices and value not in choices:
        raise ConfigError(f"{label} is {value!r}: choose from {', '.join(map(str, choices))}")
    if hint is bool and not isinstance(value, bool):
        raise ConfigError(f"{label} is {value!r}: it must be true or false")
    if hint is str and not isinstance(value, str):
        raise ConfigError(f"{label} is {value!r}: it must be text")
    return value

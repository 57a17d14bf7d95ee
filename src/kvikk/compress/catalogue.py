"""Every policy as people choose one: where it is from, what it reads, what that costs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvikk.compress.policy import Policy
from kvikk.compress.registry import Registry
from kvikk.compress.signals import Signal
from kvikk.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A policy that can be asked for, or why it cannot.

    Args:
        name: that it is asked for by.
        origin: `built-in`, or the package that brings it.
        summary: what it keeps, in a line.
        signals: what it reads.
        cost: what a trigger, and all steps before it, pay for that.
        options: by name, with their defaults.
        fault: why it cannot be used; then the rest is empty.
    """

    name: str
    origin: str
    summary: str = ""
    signals: tuple[str, ...] = ()
    cost: str = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    fault: str | None = None


def listed(registry: Registry) -> list[Listed]:
    """All policies of a registry. Each is imported; one that cannot be says so, and the others are listed."""
    found = []
    for entry in registry.entries:
        try:
            policy: Any = registry.entry(entry.name).load()
        except ConfigError as error:
            found.append(Listed(name=entry.name, origin=entry.origin, fault=str(error)))
            continue
        found.append(
            Listed(
                name=entry.name,
                origin=entry.origin,
                summary=(policy.__doc__ or "").strip().partition("\n")[0],
                signals=tuple(signal.value for signal in Signal if signal in policy.needs),
                cost=cost(policy),
                options={field.name: _default(field) for field in dataclasses.fields(policy) if field.init},
            )
        )
    return found


def cost(policy: type[Policy]) -> str:
    """What a policy costs, in words: from its signals, and what it says itself in `cost`."""
    needs = policy.needs
    read = [word for signal, word in ((Signal.KEYS, "keys"), (Signal.VALUES, "values")) if signal in needs]
    parts = [f"{' and '.join(read)} read once"] if read else []
    if Signal.QUERIES in needs:
        window = getattr(policy, "query_window", None)
        parts.append(f"{'one query' if window == 1 else f'{window} queries'} held and attended with")
    if Signal.ATTENTION_MASS in needs:
        parts.append("attention weights added up in every step")
    parts += [policy.cost] if hasattr(policy, "cost") else []
    return "; ".join(parts) or "nothing"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()

"""Checks of the options of policies and allocators: fields of frozen dataclasses."""

from __future__ import annotations

from math import inf

from kvikk.errors import ConfigError

MAX_QUERY_WINDOW = 1024
"""An engine holds so many queries of each layer for a row at most."""
MAX_WIDTH = 1023
"""Of a window that is pooled over."""


def check_between(owner: object, low: float, high: float, *options: str) -> None:
    """Refuse options that are out of their limits, both included; `inf` for no upper one.

    Raises:
        ConfigError: naming the option, its value and the limits.
    """
    for option in options:
        value = getattr(owner, option)
        if not low <= value <= high:
            limits = f"be at least {low}" if high == inf else f"lie between {low} and {high}"
            raise ConfigError(f"{type(owner).__name__}: {option} is {value}: it must {limits}")


def check_odd(owner: object, *options: str) -> None:
    """Refuse widths that have no centre.

    Raises:
        ConfigError: naming the option, its value and what would do.
    """
    check_between(owner, 1, MAX_WIDTH, *options)
    for option in options:
        value = getattr(owner, option)
        if value % 2 == 0:
            raise ConfigError(
                f"{type(owner).__name__}: {option} is {value}: a window around a token is odd, such as {value + 1}"
            )

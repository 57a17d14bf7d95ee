"""Numbers and amounts as people and programs hand them in, checked."""

from __future__ import annotations

import math
import operator
import re

from kvikk.errors import ConfigError, InvalidRequest

BYTES = {"b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BYTES |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
"""Units of memory, in lower case."""


def parse_amount(text: str) -> tuple[float, str] | None:
    """The number and the unit of `4GiB`, `500 MB`, `2e9`, `1e-3` or `50%`; the unit in lower case, empty for none.

    None where the text is no such amount.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(%|[a-zA-Z]*)\s*", text, re.ASCII)
    unit = match[2].lower() if match else ""
    if match is None or unit not in {"", "%", *BYTES}:
        return None
    return float(match[1]), unit


def memory_size(flag: str, text: str) -> int:
    """Bytes that `8GiB` or `500MB` stand for.

    Raises:
        ConfigError: it is no size, or none that can be had; names the flag.
    """
    amount = parse_amount(text)
    if amount is None or amount[1] == "%":
        raise ConfigError(f"{flag} {text!r} is not a size: write 8GiB or 500MB")
    number, unit = amount
    size = number * BYTES[unit or "b"]
    if not 1 <= size < 2**60:
        raise ConfigError(f"{flag} {text!r} is not a size that can be had: write 8GiB or 500MB")
    return int(size)


def whole_number(name: str, value: object, *, param: str | None = None) -> int:
    """The value as an int, numpy's whole numbers included.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise InvalidRequest(f"{name} {value!r} is not a whole number", param=param)


def real_number(name: str, value: object, *, param: str | None = None) -> float:
    """The value as a float, numpy's numbers included.

    Raises:
        InvalidRequest: it is none, or not finite.
    """
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise InvalidRequest(f"{name} is {value!r}: it must be a number", param=param)
    try:
        number = float(value)
    except (TypeError, ValueError, ArithmeticError):  # an int above the largest float, an array of several
        number = math.nan
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} is {value}: it must be a finite number", param=param)
    return number

"""What the checks of requests have in common: every error names its field."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from kvikk.errors import InvalidRequest


def shown(value: object) -> str:
    """A value for an error message, shortened."""
    return reprlib.repr(value)


def wrong(param: str, value: object, wanted: str) -> InvalidRequest:
    """The error that says which field has which value, shortened, and what it must be."""
    return InvalidRequest(f"{param} is {shown(value)}: {wanted}", param=param)


def fields(given: object, param: str, *known: str) -> dict[str, Any]:
    """The fields of an object that have a value, null being none.

    Raises:
        InvalidRequest: it is no object, or has a field that is not known.
    """
    if not isinstance(given, Mapping):
        raise wrong(param, given, f"it must be an object with {', '.join(known)}")
    present = {key: value for key, value in given.items() if value is not None}
    for key in present:
        if key not in known:
            raise InvalidRequest(f"{param} has the field {shown(key)}: known are {', '.join(known)}", param=param)
    return present


def items(given: object, param: str) -> Sequence[Any]:
    """A list as it is.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(given, list | tuple):
        raise wrong(param, given, "it must be a list")
    return given


def text(given: object, param: str) -> str:
    """A text as it is.

    Raises:
        InvalidRequest: it is none, or holds half a surrogate pair, which no encoding can carry.
    """
    if not isinstance(given, str):
        raise wrong(param, given, "it must be text")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} is not valid Unicode text: {error}", param=param) from None
    return given


def flag(given: object, param: str) -> bool:
    """A truth value as it is.

    Raises:
        InvalidRequest: it is none.
    """
    if not isinstance(given, bool):
        raise wrong(param, given, "it must be true or false")
    return given


def check_json(value: object, param: str) -> None:
    """Check that a value can be written as JSON text.

    Raises:
        InvalidRequest: it holds NaN or infinity, half a surrogate pair, something that JSON does not know, or is nested
            too deeply.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} cannot be written as JSON: {error}", param=param) from None

"""The page of errors: the tree below `KvikkError`, with codes and HTTP statuses."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module

from docs.generate.markdown import code, table

import kvikk
from kvikk.errors import KvikkError
from kvikk.server.openai.problems import COMMON, TYPES

INTRODUCTION = """\
# Errors

Whatever kvikk raises on purpose is a `KvikkError`; its text names the value, the limit and the way out. The server
answers in OpenAI's form, `{"error": {"message", "type", "param", "code"}}`: `code` says what happened and is stable,
`param` names the field where it is one field. In a stream that has begun, the error is an event of the same form before
`[DONE]`.
"""
CODES = """\
503 comes with `Retry-After`. An API key that is missing or wrong has the code `invalid_api_key`, a body that is too
long `body_too_large`.
"""


def page() -> str:
    """The whole page."""
    for module in pkgutil.walk_packages(kvikk.__path__, "kvikk."):
        import_module(module.name)  # a class is in the tree once its module is imported
    rows = [
        (code(error.__name__), code(error.code), str(error.http_status), _when(error)) for error in _tree(KvikkError)
    ]
    statuses = [(str(status), code(TYPES.get(int(status), "server_error")), _said(status)) for status in COMMON]
    return "\n".join(
        [
            INTRODUCTION,
            table(["error", "code", "HTTP", "when"], rows),
            "## Statuses\n\nWhat any endpoint may answer besides success:\n",
            table(["HTTP", "type", "when"], statuses),
            CODES,
        ]
    )


def _tree(root: type[KvikkError]) -> Iterator[type[KvikkError]]:
    yield root
    for error in sorted(root.__subclasses__(), key=_place):
        if error.__module__.startswith("kvikk."):
            yield from _tree(error)


def _place(error: type) -> tuple[bool, str, int]:
    """Where a class is defined, those of `kvikk.errors` first: whatever was imported first, the order is the same."""
    return error.__module__ != "kvikk.errors", error.__module__, inspect.getsourcelines(error)[1]


def _when(error: type[KvikkError]) -> str:
    return (inspect.getdoc(error) or "").partition("\n\n")[0]


def _said(status: int | str) -> str:
    return str(COMMON[status]["description"])

"""The page of the HTTP API, from the server's own OpenAPI description."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import MagicMock

from docs.generate.markdown import code, table, value

from kvikk.server.app import build_app
from kvikk.server.config import ServeConfig
from kvikk.server.openai.requests import NOT_SUPPORTED
from kvikk.server.security import Keys

INTRODUCTION = """\
# HTTP

The server describes itself in OpenAPI: `GET /openapi.json`. A field that is not listed here is refused by name, a value
outside its limits with the limit; `null` stands for the default. Errors have [OpenAI's form](errors.md).
"""
RANGES = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " items"),
)
Schema = Mapping[str, Any]


def page() -> str:
    """The whole page."""
    description = _openapi()
    schemas: dict[str, Schema] = description["components"]["schemas"]
    parts = [INTRODUCTION, "## Endpoints\n", table(["endpoint", "", "body"], _endpoints(description))]
    names = [name for _, _, name in _operations(description) if name]
    for name in names:  # grows by what the bodies hold
        parts += _body(name, schemas[name])
        names += [inner for inner in _names_in(schemas[name]["properties"]) if inner not in names]
    parts.append("## Fields that are refused\n\nKnown from elsewhere, and what to do instead:\n")
    parts.append(table(["field", ""], [(code(name), instead) for name, instead in sorted(NOT_SUPPORTED.items())]))
    return "\n".join(parts)


def _openapi() -> dict[str, Any]:
    """Of an application without an engine: nothing is asked of it but its description."""
    return build_app(MagicMock(config=ServeConfig()), Keys()).openapi()


def _operations(description: Schema) -> Iterator[tuple[str, Schema, str | None]]:
    """Each endpoint as it is called, its operation, and the name of its body."""
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
            yield f"{method.upper()} {path}", operation, reference.rpartition("/")[2] or None


def _endpoints(description: Schema) -> Iterator[tuple[str, str, str]]:
    for called, operation, body in _operations(description):
        text = operation.get("description", "").replace("\n", " ")
        yield code(called), text, _link(body) if body else ""


def _body(name: str, schema: Schema) -> Iterator[str]:
    yield f"## {name}\n\n{schema.get('description', '')}\n"
    required = set(schema.get("required", ()))
    yield table(
        ["field", "type", "default", ""],
        [
            (
                code(field),
                _type(detail),
                "required" if field in required else _default(detail),
                detail.get("description", ""),
            )
            for field, detail in schema["properties"].items()
        ],
    )


def _default(schema: Schema) -> str:
    return "" if schema.get("default") is None else value(schema["default"])


def _type(schema: Schema) -> str:
    """A JSON schema in a few words. Null is left out: it means the default everywhere."""
    if "anyOf" in schema:
        return ", or ".join(_type(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    if "const" in schema or "enum" in schema:
        return ", ".join(code(json.dumps(each)) for each in schema.get("enum", [schema.get("const")]))
    name = str(schema.get("type", "any"))
    if name == "array":
        name = f"array of {_type(schema['items'])}"
    limits = ", ".join(_limits(schema))
    return f"{name} ({limits})" if limits else name


def _limits(schema: Schema) -> Iterator[str]:
    """`1 to 64 items`, `above 0`."""
    for low, high, unit in RANGES:
        if low in schema and high in schema:
            yield f"{_number(schema[low])} to {_number(schema[high])}{unit}"
        elif low in schema:
            yield f"at least {_number(schema[low])}{unit}"
        elif high in schema:
            yield f"at most {_number(schema[high])}{unit}"
    for key, word in (("exclusiveMinimum", "above"), ("exclusiveMaximum", "below")):
        if key in schema:
            yield f"{word} {_number(schema[key])}"


def _number(limit: float) -> str:
    return f"{int(limit):,}" if float(limit).is_integer() else f"{limit:,}"


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _names_in(schema: Any) -> Iterator[str]:
    """The schemas that a schema refers to."""
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for each in schema.values():
            yield from _names_in(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _names_in(each)

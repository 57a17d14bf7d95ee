"""The grammar that makes a model call tools as a request asks, in the form that the parser reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvikk.chat.forms import ToolForm
from kvikk.chat.tools import Tool, ToolUse
from kvikk.errors import InvalidRequest
from kvikk.grammar import StructuredOutputsParams, validate
from kvikk.grammar.compiler import JSON_OPTIONS

_ANY_TEXT = r"/(?s:.*)/"
_TEXT_THAT_IS_NO_OBJECT = r"/(\s*[^\s{](?s:.*))?/"

_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords of JSON schema that hold schemas by names, which are no keywords themselves."""
_DATA = frozenset({"const", "enum"})
_EXPLANATIONS = frozenset({"title", "description", "default", "examples", "$comment", "$schema", "$id"})


def constraint(
    use: ToolUse, form: ToolForm, answer: StructuredOutputsParams | None = None
) -> StructuredOutputsParams | None:
    """The form that a text must have so that tools are used as asked; None where it is free.

    - The model must call: one call, or several.
    - It may, and a tool is strict: any text, but a call that has begun is written to its end.
    - It may, and the answer has a form of JSON: calls, or that answer.
    - It may, and the answer is a choice, regex or grammar: that, which then says where calls may be, if anywhere.

    Arguments follow their tool's schema where the model must call or the tool is strict; else they are any object.

    Args:
        use: what the request says about tools.
        form: of the model's calls.
        answer: the form that the request wants of the text.

    Raises:
        InvalidRequest: a schema cannot be followed, or they are too long together.
    """
    if use.mode == "none":
        return answer
    if use.mode == "auto" and answer is None and not any(tool.strict for tool in use.tools):
        return None
    if use.mode == "auto" and answer is not None and answer.kind not in ("json", "json_object"):
        return answer
    rules = _rules(use, form, answer)
    lines = ["%llguidance {}", *(f"{name}: {body}" for name, body in rules.items())]
    try:
        made = StructuredOutputsParams(grammar="\n".join(lines))
        validate(made)
    except InvalidRequest as error:
        _check_each(use, answer)
        raise InvalidRequest(f"the tools cannot be held to their schemas: {error}", param="tools") from error
    return made


def _rules(use: ToolUse, form: ToolForm, answer: StructuredOutputsParams | None) -> dict[str, str]:
    """Lark's rules, by name. A text that ends with a marker goes before a call."""
    tools = {
        f"tool_{index}": f"%json {json.dumps(_schema(tool, use, form))}"
        for index, tool in enumerate(use.callable_tools)
    }
    marker = _literal(form.marker, form) if form.before else ""
    body = f"{_literal(form.before.removeprefix(form.marker), form)} ({' | '.join(tools)}) {_literal(form.after, form)}"
    more = f"({_literal(form.between, form)} {marker} call)*" if use.parallel else ""
    rules = {"start": "calls", "calls": f"{marker} call {more}", "call": body} | tools
    if use.mode == "required":
        return rules
    if answer is not None:
        schema = json.loads(answer.schema_text) | {"x-guidance": JSON_OPTIONS}
        return rules | {"start": "calls | answer", "answer": f"%json {json.dumps(schema)}"}
    if form.marker in form.tokens:  # a text holds no tokens of this kind, so it ends there by itself
        lead = {"lead": f"TEXT {_literal(form.marker, form)}"}
    else:
        lead = {"lead[lazy]": f"TEXT {_literal(form.marker, form)}"}
    if not form.before:
        return rules | lead | {"start": "calls | lead calls | TEXT", "TEXT": _TEXT_THAT_IS_NO_OBJECT}
    return rules | lead | {"start": "(lead call)* TEXT" if use.parallel else "lead call | TEXT", "TEXT": _ANY_TEXT}


def _schema(tool: Tool, use: ToolUse, form: ToolForm) -> dict[str, Any]:
    """A JSON schema for a whole call."""
    follows = use.mode == "required" or tool.strict
    arguments = _moved(tool.parameters, f"#/properties/{form.arguments_key}") if follows else {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, form.arguments_key: arguments},
        "required": ["name", form.arguments_key],
        "additionalProperties": False,
        "x-guidance": JSON_OPTIONS,
    }


def _moved(schema: Any, to: str) -> Any:
    """A schema as it is to be written when it stands at `to` within another: its references follow.

    What only explains it, and is most of its length, stays behind.
    """
    if isinstance(schema, list | tuple):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            moved[key] = {name: _moved(part, to) for name, part in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = to + value[1:]
        elif key not in _EXPLANATIONS:
            moved[key] = value if key in _DATA else _moved(value, to)
    return moved


def _literal(text: str, form: ToolForm) -> str:
    """A fixed text in Lark. Tokens of their own are named, since no text matches them."""
    if not text:
        return ""
    tokens = "|".join(map(re.escape, sorted(form.tokens))) or "(?!)"
    parts = re.split(f"({tokens})", text)
    return " ".join(part if part in form.tokens else json.dumps(part) for part in parts if part)


def _check_each(use: ToolUse, answer: StructuredOutputsParams | None) -> None:
    """Raises InvalidRequest for the answer's form, or for the first tool, whose own schema is at fault."""
    if answer is not None and use.mode == "auto":
        validate(answer)
    for index, tool in enumerate(use.tools):
        if tool in use.callable_tools and (use.mode == "required" or tool.strict):
            try:
                validate(StructuredOutputsParams(json=dict(tool.parameters)))
            except InvalidRequest as error:
                param = f"tools[{index}].function.parameters"
                raise InvalidRequest(f"{param} cannot be followed: {error}", param=param) from error

"""The tools of a request, and whether the model may or must call them: OpenAI's `tools` and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvikk.chat.checks import check_json, fields, flag, items, text, wrong
from kvikk.errors import InvalidRequest

MAX_TOOLS = 128
"""OpenAI's limit."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Args:
        name: 1 to 64 letters, digits, `_` or `-`.
        description: what it does, for the model.
        parameters: JSON schema of its arguments, which are an object.
        strict: hold the arguments to the schema also where the model is free to call or not.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any]
    strict: bool = False

    @classmethod
    def read(cls, given: object, param: str) -> Tool:
        """A tool as OpenAI's clients send it; `param` is its name in errors.

        Raises:
            InvalidRequest: naming the field that is wrong.
        """
        tool = fields(given, param, "type", "function")
        if tool.get("type") != "function":
            raise wrong(f"{param}.type", tool.get("type"), "it must be 'function'")
        param = f"{param}.function"
        function = fields(tool.get("function"), param, "name", "description", "parameters", "strict")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise wrong(f"{param}.name", name, "it must be 1 to 64 letters, digits, '_' or '-'")
        parameters = function.get("parameters", _NO_PARAMETERS)
        if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
            raise wrong(f"{param}.parameters", parameters, "it must be a JSON schema of type 'object'")
        check_json(parameters, f"{param}.parameters")
        return cls(
            name=name,
            description=text(function["description"], f"{param}.description") if "description" in function else None,
            parameters={"type": "object"} | dict(parameters),
            strict=flag(function.get("strict", False), f"{param}.strict"),
        )

    @property
    def definition(self) -> dict[str, Any]:
        """The tool as chat templates want it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """What a request says about tools.

    Args:
        tools: what the model is shown.
        mode: `none`: calls are not looked for; `auto`: the model decides; `required`: it must call.
        only: with `required`, the one tool that it must call, once.
        parallel: whether one answer may hold several calls.
    """

    tools: tuple[Tool, ...] = ()
    mode: Mode = "none"
    only: str | None = None
    parallel: bool = True

    @classmethod
    def read(cls, tools: object = None, tool_choice: object = None, parallel_tool_calls: object = None) -> ToolUse:
        """From the three fields of a request. Without tools, the choices none and auto ask for nothing.

        Raises:
            InvalidRequest: naming the field that is wrong.
        """
        known = () if tools is None else _read_tools(tools)
        mode, only = _read_choice(tool_choice, {tool.name for tool in known})
        parallel = parallel_tool_calls is None or flag(parallel_tool_calls, "parallel_tool_calls")
        return cls(tools=known, mode=mode, only=only, parallel=parallel and only is None)

    @property
    def may_call(self) -> bool:
        """Whether calls are to be looked for in the answer."""
        return self.mode != "none"

    @property
    def names(self) -> list[str]:
        """Of all tools."""
        return [tool.name for tool in self.tools]

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Those that the model may call."""
        return tuple(tool for tool in self.tools if self.only in (None, tool.name))


def _read_tools(given: object) -> tuple[Tool, ...]:
    listed = items(given, "tools")
    if len(listed) > MAX_TOOLS:
        raise InvalidRequest(f"tools holds {len(listed)} tools: give at most {MAX_TOOLS}", param="tools")
    tools = tuple(Tool.read(tool, f"tools[{index}]") for index, tool in enumerate(listed))
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise wrong(f"tools[{index}].function.name", tool.name, "another tool has the same name")
        seen.add(tool.name)
    return tools


def _read_choice(given: object, names: set[str]) -> tuple[Mode, str | None]:
    match given:
        case None | "auto":
            return ("auto" if names else "none"), None
        case "none":
            return "none", None
        case "required" | {"type": "function"} if not names:
            raise wrong("tool_choice", given, "there is no tool to call: give tools too")
        case "required":
            return "required", None
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not more and not others:
            if name not in names:
                raise wrong("tool_choice.function.name", name, f"the tools are {', '.join(sorted(names))}")
            return "required", name
    form = "{'type': 'function', 'function': {'name': ...}}"
    raise wrong("tool_choice", given, f"it must be 'none', 'auto', 'required' or {form}")

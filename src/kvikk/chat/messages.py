"""OpenAI's chat messages, checked and put as chat templates want them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvikk.chat.checks import check_json, fields, items, shown, text, wrong
from kvikk.errors import InvalidRequest

Message = dict[str, Any]
"""A message as templates want it: role, content as text, calls with their arguments as objects."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_OF_ONE_ROLE = {
    "tool_calls": "assistant",
    "reasoning_content": "assistant",
    "reasoning": "assistant",
    "tool_call_id": "tool",
}
"""Fields that only messages of one role have."""


def checked_messages(given: object) -> list[Message]:
    """The messages of a conversation.

    `developer` becomes `system`, which templates know. Text parts are joined by line breaks, as vLLM does. The JSON
    text of calls' arguments becomes an object. Fields that are null or an empty list are dropped: clients send back
    what they were sent.

    Raises:
        InvalidRequest: naming the field that is wrong.
    """
    messages = items(given, "messages")
    if not messages:
        raise wrong("messages", given, "a conversation has at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(given: object, param: str) -> Message:
    if isinstance(given, Mapping):
        given = {key: value for key, value in given.items() if value != []} | {"content": given.get("content")}
    message = fields(given, param, "role", "content", "name", *_OF_ONE_ROLE)
    role = message.get("role")
    if role not in ROLES:
        raise wrong(f"{param}.role", role, f"it must be one of {', '.join(ROLES)}")
    for key, value in message.items():
        owner = _OF_ONE_ROLE.get(key, role)
        if owner != role:
            raise wrong(f"{param}.{key}", value, f"only messages of role {owner} have it, this one's is {role}")
        match key:
            case "content":
                message[key] = _content(value, f"{param}.content")
            case "tool_calls":
                message[key] = _calls(value, f"{param}.tool_calls")
            case _:
                message[key] = text(value, f"{param}.{key}")
    if "content" not in message and "tool_calls" not in message:
        raise wrong(f"{param}.content", None, "only an assistant's message with tool_calls may lack it")
    return {"content": ""} | message | {"role": "system" if role == "developer" else role}


def _content(given: object, param: str) -> str:
    if isinstance(given, str):
        return text(given, param)
    if not isinstance(given, list | tuple) or not given:
        raise wrong(param, given, "it must be text, or a list of at least one text part")
    return "\n".join(_part(part, f"{param}[{index}]") for index, part in enumerate(given))


def _part(given: object, param: str) -> str:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind is not None and kind != "text":
        raise wrong(f"{param}.type", kind, "this model reads text only, in parts of type 'text'")
    return text(fields(given, param, "type", "text").get("text"), f"{param}.text")


def _calls(given: object, param: str) -> list[dict[str, Any]]:
    return [_call(call, f"{param}[{index}]") for index, call in enumerate(items(given, param))]


def _call(given: object, param: str) -> dict[str, Any]:
    call = fields(given, param, "id", "type", "function", "index")  # the index is left over from streams
    if call.get("type", "function") != "function":
        raise wrong(f"{param}.type", call["type"], "it must be 'function'")
    function = fields(call.get("function"), f"{param}.function", "name", "arguments")
    name = text(function.get("name"), f"{param}.function.name")
    if not name:
        raise wrong(f"{param}.function.name", name, "it must name a function")
    arguments = _arguments(function.get("arguments"), f"{param}.function.arguments")
    identity = {"id": text(call["id"], f"{param}.id")} if "id" in call else {}
    return identity | {"type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(given: object, param: str) -> Mapping[str, Any]:
    """From JSON text, or an object already. Empty text is what some models write for no arguments."""
    arguments = given
    if isinstance(given, str):
        try:
            arguments = json.loads(given) if given else {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param} is {shown(given)}, which is not valid JSON: {error}", param=param) from None
    if not isinstance(arguments, Mapping):
        raise wrong(param, given, "it must be the JSON text of an object")
    check_json(arguments, param)
    return arguments

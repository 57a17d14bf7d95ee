"""Tools for models whose chat template knows none: they are described in the system message, calls are plain text."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvikk.chat.forms import ToolForm
from kvikk.chat.messages import Message
from kvikk.chat.tools import Tool

_INSTRUCTIONS = """\
# Tools

You can call functions. Each line between these tags describes one of them, in JSON:
<tools>
{definitions}
</tools>

To call a function, write this, with a JSON object for the arguments:
{example}
What it returns is shown to you between <tool_response> and </tool_response>. When no function is of use, answer in \
plain text."""


def with_tools(messages: Sequence[Message], tools: Sequence[Tool], form: ToolForm) -> list[Message]:
    """The messages with the tools, and how to call them, in the system message."""
    definitions = "\n".join(json.dumps(tool.definition, ensure_ascii=False) for tool in tools)
    example = form.write("<function name>", {"<argument name>": "<value>"})
    instructions = _INSTRUCTIONS.format(definitions=definitions, example=example)
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": instructions}, *messages]
    first = messages[0]
    return [first | {"content": f"{first['content']}\n\n{instructions}"}, *messages[1:]]


def calls_as_text(messages: Sequence[Message], form: ToolForm) -> list[Message]:
    """The messages with calls in the assistant's text, and what tools returned in the user's.

    Results that follow each other go into one message, since many templates want user and assistant to alternate.
    """
    written: list[Message] = []
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if follows_result:
                written[-1]["content"] += f"\n{result}"
            else:
                written.append({"role": "user", "content": result})
        elif "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            calls = form.between.join(form.write(function["name"], function["arguments"]) for function in functions)
            content = "\n".join(filter(None, (message["content"], calls)))
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            written.append(others | {"content": content})
        else:
            written.append(message)
        follows_result = is_result
    return written

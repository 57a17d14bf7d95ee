"""Chat: from messages to a prompt, and from the model's text to an answer with tool calls.

    use = ToolUse.read(tools, tool_choice, parallel_tool_calls)
    conversation = Conversation(messages=messages, tools=use.tools)
    prompt = render(conversation, tokenizer)

    form = form_for("auto", tokenizer)
    params = ...(structured_outputs=constraint(use, form))
    parser, answer = form.read(use, make_id), Answer()
    answer.add(parser.push(text))                              # for each piece of text, as it comes
    answer.add(parser.finish())

- `render`: the chat template, with `messages` checking what goes in and `fallback` for templates that know no tools.
- `tools`: what a request says about tools; `constraint`: the grammar that follows from it.
- `parser`: reading calls while they are written; read this first. `hermes` and `llama` are the forms that it comes in,
  `forms` says which one a model writes.
- `events`: what parsers give, the answer that it adds up to, and why an answer ended.

Invariants: the events of a text, joined, do not depend on how it was cut; a plain answer is the fold of a streamed
one's events; what is not part of a call comes out as text; client input never chooses a template.
"""

from kvikk.chat.constraint import constraint
from kvikk.chat.events import Answer, ArgumentsDelta, CallBegan, Event, TextDelta, ToolCall, finish_reason
from kvikk.chat.forms import HERMES, LLAMA, ToolForm, form_for
from kvikk.chat.parser import CallParser
from kvikk.chat.render import Conversation, Rendered, check_template, render
from kvikk.chat.tools import Tool, ToolUse

__all__ = [
    "HERMES",
    "LLAMA",
    "Answer",
    "ArgumentsDelta",
    "CallBegan",
    "CallParser",
    "Conversation",
    "Event",
    "Rendered",
    "TextDelta",
    "Tool",
    "ToolCall",
    "ToolForm",
    "ToolUse",
    "check_template",
    "constraint",
    "finish_reason",
    "form_for",
    "render",
]

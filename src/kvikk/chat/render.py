"""From messages to a prompt, through the model's chat template."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateSyntaxError

from kvikk.chat.checks import check_json, flag, wrong
from kvikk.chat.fallback import calls_as_text, with_tools
from kvikk.chat.forms import HERMES, ToolForm
from kvikk.chat.messages import Message, checked_messages
from kvikk.chat.tools import Tool
from kvikk.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MAX_REASON = 300
"""Characters of a template's own words that go into an error: some of transformers' hold the whole prompt."""
_PROBE_TOOL = Tool(name="kvikk_probe", parameters={"type": "object", "properties": {}})
_PROBE_QUESTION: Message = {"role": "user", "content": "?"}
_PROBE_CALL = {"id": "call00001", "type": "function", "function": {"name": _PROBE_TOOL.name, "arguments": {}}}
_PROBE_TURN: list[Message] = [
    _PROBE_QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]},
    {"role": "tool", "content": "!", "tool_call_id": _PROBE_CALL["id"]},
]
"""Mistral's templates want ids of nine letters or digits."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a chat template is to write; checked when made.

    Args:
        messages: as OpenAI's clients send them.
        tools: what the model is shown.
        add_generation_prompt: end with the beginning of the assistant's answer.
        continue_final_message: leave the last message open, so that the model goes on within it; excludes
            `add_generation_prompt`.
        template_kwargs: variables for the template, such as `enable_thinking`.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        messages = checked_messages(self.messages)
        object.__setattr__(self, "messages", messages)
        flag(self.add_generation_prompt, "add_generation_prompt")
        if flag(self.continue_final_message, "continue_final_message"):
            if self.add_generation_prompt:
                raise wrong("continue_final_message", True, "it needs add_generation_prompt to be false")
            if not messages[-1]["content"] or "tool_calls" in messages[-1]:
                raise wrong("continue_final_message", True, "the last message has no text at its end to go on from")
        if not isinstance(self.template_kwargs, Mapping):
            raise wrong("chat_template_kwargs", self.template_kwargs, "it must be an object")
        check_json(self.template_kwargs, "chat_template_kwargs")


class Rendered(NamedTuple):
    """A prompt: its text, and its tokens."""

    text: str
    token_ids: list[int]


def render(
    conversation: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None = None,
    *,
    form: ToolForm = HERMES,
) -> Rendered:
    """The prompt that a chat template makes of a conversation.

    Templates run in transformers' sandbox. A template that shows no tools is given them in the system message; one that
    shows no calls is given them, and their results, as text.

    Args:
        conversation: what to write.
        tokenizer: the model's.
        template: overrides the tokenizer's own.
        form: of calls, where the template knows none.

    Raises:
        InvalidRequest: the model has no chat template, the template refuses the messages, or does not know one of
            `template_kwargs`.
    """
    writer = _Writer(tokenizer, template, conversation.tools, dict(conversation.template_kwargs))
    messages: list[Message] = [dict(message) for message in conversation.messages]
    tools = conversation.tools
    if tools and not writer.shows([_PROBE_QUESTION], [_PROBE_TOOL]):
        messages, tools = with_tools(messages, tools, form), ()
    has_calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
    if has_calls and not writer.shows(_PROBE_TURN, tools):
        messages = calls_as_text(messages, form)
    try:
        text = writer.write(
            messages,
            tools,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
        )
        return Rendered(text, tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    except Exception as error:  # templates raise what they like
        reason = str(error)[:MAX_REASON] or type(error).__name__
        raise InvalidRequest(f"the model's chat template refuses these messages: {reason}", param="messages") from error


def check_template(template: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check the template of `--chat-template`.

    Raises:
        ConfigError: it is not valid Jinja.
    """
    try:
        _Writer(tokenizer, template, (), {}).write([_PROBE_QUESTION], ())
    except TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template is not valid Jinja: line {error.lineno}: {error.message}") from error
    except Exception as error:
        logger.info("the chat template refuses a lone message of the user: %s", error)


class _Writer:
    """A chat template with its variables."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        tools: Sequence[Tool],
        variables: dict[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        try:
            self._template = tokenizer.get_chat_template(template, tools=_definitions(tools))
        except ValueError:
            raise InvalidRequest(
                "the model has no chat template, or several and no default: send it a plain prompt, or start with "
                "--chat-template",
                param="messages",
            ) from None
        self._variables = variables
        taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
        for name in variables:
            if name in taken or name in ("self", "messages"):
                raise InvalidRequest(f"chat_template_kwargs may not set {name}", param="chat_template_kwargs")
            if not re.search(rf"\b{re.escape(name)}\b", self._template):
                raise InvalidRequest(
                    f"chat_template_kwargs sets {name!r}, which the model's chat template does not know",
                    param="chat_template_kwargs",
                )

    def write(self, messages: list[Message], tools: Sequence[Tool], **options: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=_definitions(tools),
            chat_template=self._template,
            tokenize=False,
            **options,
            **self._variables,
        )
        return str(text)

    def shows(self, messages: list[Message], tools: Sequence[Tool]) -> bool:
        """Whether the probe's name is in what the template makes of this."""
        try:
            return _PROBE_TOOL.name in self.write(messages, tools)
        except Exception:
            return False


def _definitions(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    return [tool.definition for tool in tools] or None

"""What a parser finds in a model's text, in order, and the answer that these add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """The model calls a tool. At least one `ArgumentsDelta` follows."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of a call's arguments, as the model wrote them."""

    index: int
    text: str


Event = TextDelta | CallBegan | ArgumentsDelta


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events, neighbours that continue each other joined."""
    kept: list[Event] = []
    pieces: list[list[str]] = []
    for event in events:
        if not kept or not _continues(event, kept[-1]):
            kept.append(event)
            pieces.append([])
        if not isinstance(event, CallBegan):
            pieces[-1].append(event.text)
    return [
        event if isinstance(event, CallBegan) else replace(event, text="".join(texts))
        for event, texts in zip(kept, pieces, strict=True)
    ]


def _continues(event: Event, last: Event) -> bool:
    match last, event:
        case TextDelta(), TextDelta():
            return True
        case ArgumentsDelta(index, _), ArgumentsDelta(other, _):
            return index == other
    return False


@dataclass(slots=True)
class ToolCall:
    """A call. `arguments` is JSON text as the model wrote it: whole and valid only if the model made it so."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """What a model said: the fold of its events, for streamed and plain answers alike."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        """Take what came next."""
        for event in events:
            match event:
                case TextDelta(text):
                    self.text += text
                case CallBegan(_, call_id, name):
                    self.calls.append(ToolCall(call_id, name))
                case ArgumentsDelta(index, text):
                    self.calls[index].arguments += text


def finish_reason(engine_reason: str, has_tool_calls: bool) -> FinishReason:
    """Why an answer ended, in OpenAI's words.

    An answer with calls that ended by itself ended for them; one that was cut (`length`, `abort`, `error`) was cut,
    calls or not, since its last call may be incomplete.

    Args:
        engine_reason: the engine's word: stop, length, abort or error.
        has_tool_calls: whether the answer holds a call.
    """
    match engine_reason:
        case "stop":
            return "tool_calls" if has_tool_calls else "stop"
        case "length" | "abort" | "error":
            return engine_reason
    raise ValueError(f"{engine_reason!r} is no reason of the engine's")

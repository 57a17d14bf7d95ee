"""One answer as it was streamed: what came when, and whether it came to its end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvikk.bench.events import Event

DONE = "[DONE]"
FAILED_REASONS = frozenset({"error", "abort"})
"""Finish reasons with which servers say that it was not the model who ended the text."""


class BrokenStream(Exception):
    """The stream holds an error, is none that OpenAI's API has, or ended too early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request.

    Args:
        input_tokens: of the prompt.
        output_tokens: of the answer.
        cached_tokens: of the prompt, found in the server's cache; None where the server does not say.
        is_servers: whether the server counted, not this client's tokenizer.
    """

    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    is_servers: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How one request went, in seconds of one clock.

    Args:
        due_s: when its turn came.
        sent_s: when it was sent; later than `due_s` where others had to end first.
        arrivals_s: when each chunk with text came, in order; the end's time for an answer whose tokens have no text.
        done_s: when the last chunk of the text came, be it only the reason for the end.
        text: all of it; what had come until then for a failed request.
        usage: None until someone has counted.
        error: why the request failed, None for one that did not.
    """

    due_s: float
    sent_s: float
    done_s: float
    arrivals_s: tuple[float, ...] = ()
    text: str = ""
    usage: Usage | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """From sending to the first text."""
        return self.arrivals_s[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """From sending to the end of the text."""
        return self.done_s - self.sent_s

    @property
    def itls_s(self) -> list[float]:
        """Between one chunk with text and the next."""
        return [later - earlier for earlier, later in pairwise(self.arrivals_s)]

    @property
    def output_tokens(self) -> int:
        """Tokens of the text, as counted."""
        return 0 if self.usage is None else self.usage.output_tokens

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; None for an answer of one token."""
        after_first = self.output_tokens - 1
        return (self.e2el_s - self.ttft_s) / after_first if after_first > 0 else None


class AnswerReader:
    """Collects the events of one stream of completions or chat completions with a single choice.

    Args:
        allow_missing_done: take a stream that has its finish reason for complete without `[DONE]`.
    """

    def __init__(self, *, allow_missing_done: bool = False) -> None:
        self.text: list[str] = []
        self.arrivals_s: list[float] = []
        self.last_s: float | None = None
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.is_done = False
        self._allow_missing_done = allow_missing_done

    def take(self, event: Event, now_s: float) -> None:
        """One event, which came at `now_s`.

        Raises:
            BrokenStream: it is an error, or no chunk of an answer.
        """
        if event.data == DONE:
            self.is_done = True
            return
        try:
            chunk = json.loads(event.data)
        except ValueError:
            raise BrokenStream(f"an event is no JSON: {_shortened(event.data)}") from None
        if not isinstance(chunk, dict):
            raise BrokenStream(f"an event is no JSON object: {_shortened(event.data)}")
        if chunk.get("error") or chunk.get("object") == "error" or event.type == "error":
            raise BrokenStream(f"the stream broke off: {error_text(chunk)}")
        try:
            for choice in chunk.get("choices") or ():
                self._take_choice(choice, now_s)
            if chunk.get("usage"):
                self.usage = _usage(chunk["usage"])
        except (AttributeError, TypeError):
            raise BrokenStream(f"a chunk has not OpenAI's form: {_shortened(event.data)}") from None

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        piece = _text_of(choice)
        self.last_s = now_s
        if piece:
            self.text.append(piece)
            self.arrivals_s.append(now_s)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def finish(self) -> None:
        """The stream has ended.

        Raises:
            BrokenStream: the answer has not.
        """
        if self.finish_reason in FAILED_REASONS:
            raise BrokenStream(f"the server ended the text with finish_reason {self.finish_reason!r}")
        if not self.is_done and self.finish_reason is None:
            raise BrokenStream("the stream ended in the middle of the text, without finish_reason and without [DONE]")
        if not self.is_done and not self._allow_missing_done:
            raise BrokenStream(
                "the stream ended without [DONE], though with its finish_reason: for a server that never sends it, "
                "pass --allow-missing-done"
            )
        if self.last_s is None:
            raise BrokenStream("the stream ended without any text or finish_reason")
        if not self.arrivals_s:
            self.arrivals_s.append(self.last_s)


def error_text(body: Any) -> str:
    """What an error in one of the usual forms says: OpenAI's, a bare text, FastAPI's `detail`."""
    found = body
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return _shortened(found if isinstance(found, str) else json.dumps(found))


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    parts = [choice.get("text"), delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content")]
    parts += [part for call in calls for part in (call.get("name"), call.get("arguments"))]
    return "".join(part for part in parts if part)


def _usage(usage: dict[str, Any]) -> Usage | None:
    """What the server counted; None while it lacks the counts that matter."""
    read, written = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not isinstance(read, int) or not isinstance(written, int):
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(input_tokens=read, output_tokens=written, cached_tokens=details.get("cached_tokens"))


def _shortened(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[:limit] + "..."

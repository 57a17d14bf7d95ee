"""Reading tool calls out of a text while it is written: what the forms have in common."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

from kvikk.chat.events import ArgumentsDelta, CallBegan, Event, TextDelta, merged

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Code that reads: each `yield` waits for the next character."""

SPACE = " \t\n\r"
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
UNMARKED_KEYS = ARGUMENT_KEYS | {"name", "type", "id"}
"""An object without a mark before it that has any other key is data, not a call."""
_CLOSERS = {"{": "}", "[": "]"}
_SCALAR_ENDS = frozenset(SPACE + ',:"{}[]')


class _Broken(Exception):
    """What is being read is no call, or none any more, from the current character on."""


class CallParser(ABC):
    """Reads one answer, in pieces of any size; the events do not depend on how it is cut.

    A call is a JSON object with a `name` and an object of `arguments` (or `parameters`). It begins when both are in
    sight; from then on its arguments are given out as they come, exactly as written. Within the arguments only quotes
    and brackets are followed: whether they are valid JSON is for the client to find out. Text that turns out not to be
    a call comes out as text; space beside a call goes with it, unless it parts two texts.

    Args:
        tools: names of the request's tools.
        make_id: makes the id of a call.
        parallel: whether there may be several calls; if not, the end of the first ends the answer.
    """

    def __init__(self, tools: Collection[str], make_id: Callable[[], str], *, parallel: bool = True) -> None:
        self.has_ended = False
        """Nothing more will come: the first call is complete and there may be no other."""
        self._tools = frozenset(tools)
        self._make_id = make_id
        self._parallel = parallel
        self._char = ""
        """The character to be read next; empty at the end of the text."""
        self._held: list[str] = []
        """Read, and not yet known to be text or part of a call."""
        self._events: list[Event] = []
        self._calls = 0
        self._is_in_arguments = False
        self._is_after_call = False
        self._has_text = False
        self._reading = self._read()
        next(self._reading)

    def push(self, text: str) -> list[Event]:
        """Read more of the answer; returns what is new."""
        for char in text:
            if self.has_ended:
                break
            self._char = char
            next(self._reading, None)
        return self._drain()

    def finish(self) -> list[Event]:
        """The answer is over; returns what was held back. Call once, last."""
        self._char = ""
        next(self._reading, None)
        return self._drain()

    @abstractmethod
    def _answer(self) -> Reading[None]:
        """Read from the first character until the end, or until `has_ended`."""

    def _read(self) -> Reading[None]:
        yield
        yield from self._answer()
        self._give_text()

    def _drain(self) -> list[Event]:
        events, self._events = merged(self._events), []
        return events

    # Characters

    def _take(self) -> Reading[None]:
        """Read a character."""
        if not self._char:
            raise _Broken
        if self._is_in_arguments:
            self._events.append(ArgumentsDelta(self._calls - 1, self._char))
        else:
            self._held.append(self._char)
        yield

    def _space(self) -> Reading[None]:
        while self._char and self._char in SPACE:
            yield from self._take()

    def _text(self) -> Reading[None]:
        """Read what starts no call, up to space or an angle bracket, and give it out at once."""
        while self._char and self._char not in SPACE and self._char != "<":
            self._held.append(self._char)
            self._give_text()
            yield

    def _marker(self, *markers: str) -> Reading[str]:
        """Read one of some markers, as far as it is there; returns it, or nothing. `<` is only their first."""
        read = ""
        while self._char and any(marker.startswith(read + self._char) for marker in markers):
            read += self._char
            yield from self._take()
            if read in markers:
                return read
        return ""

    def _give_text(self) -> None:
        """What is held is text; but space after a call is only where it parts two texts."""
        text = "".join(self._held)
        self._held.clear()
        if self._is_after_call and not (self._has_text and text.strip(SPACE)):
            text = text.lstrip(SPACE)
        if text:
            self._events.append(TextDelta(text))
            self._has_text, self._is_after_call = True, False

    # Calls

    def _call(self, *, is_marked: bool) -> Reading[bool]:
        """Read a call; whether one has begun. What is not part of one has become text.

        Args:
            is_marked: the model has said that a call follows: its name need not be known then, and it may lack
                arguments.
        """
        calls = self._calls
        try:
            yield from self._space()
            yield from self._object(is_marked=is_marked)
            self.has_ended = not self._parallel
            if not self.has_ended:  # to wait for what follows would hold the end back
                yield from self._take()
            self._held.clear()
        except _Broken:
            self._is_in_arguments = False
            self._give_text()
            self.has_ended = self._calls > calls and not self._parallel
        return self._calls > calls

    def _object(self, *, is_marked: bool) -> Reading[None]:
        """Read a call's JSON object, up to its last bracket."""
        name: str | None = None
        arguments: str | None = None
        has_begun = False
        yield from self._expect("{")
        yield from self._space()
        while self._char != "}":
            key = (yield from self._string())[1:-1]
            if not (is_marked or has_begun or key in UNMARKED_KEYS):
                raise _Broken
            yield from self._space()
            yield from self._expect(":")
            yield from self._space()
            if key == "name" and name is None:
                name = _tool_name((yield from self._string()))
                if not is_marked and name not in self._tools:
                    raise _Broken
            elif key in ARGUMENT_KEYS and arguments is None:
                if self._char != "{":
                    raise _Broken
                has_begun = name is not None
                if name is not None:
                    self._begin(name)
                start = len(self._held)
                self._is_in_arguments = has_begun
                yield from self._value()
                self._is_in_arguments = False
                arguments = "".join(self._held[start:])
            else:
                yield from self._value()
            if name is not None and arguments is not None and not has_begun:
                has_begun = True
                self._begin(name, arguments)
            yield from self._space()
            if self._char != ",":
                break
            yield from self._take()
            yield from self._space()
        if self._char != "}":
            raise _Broken
        if not has_begun:
            if name is None or not is_marked:
                raise _Broken
            self._begin(name, "{}")

    def _begin(self, name: str, arguments: str = "") -> None:
        self._held.clear()
        self._events.append(CallBegan(self._calls, self._make_id(), name))
        if arguments:
            self._events.append(ArgumentsDelta(self._calls, arguments))
        self._calls += 1
        self._is_after_call = True

    # JSON, taken as models write it

    def _expect(self, char: str) -> Reading[None]:
        if self._char != char:
            raise _Broken
        yield from self._take()

    def _string(self) -> Reading[str]:
        """A string with its quotes and escapes. Line breaks pass, although JSON wants them escaped."""
        yield from self._expect('"')
        chars = ['"']
        while self._char != '"':
            is_escape = self._char == "\\"
            chars.append(self._char)
            yield from self._take()
            if is_escape:
                chars.append(self._char)
                yield from self._take()
        yield from self._take()
        chars.append('"')
        return "".join(chars)

    def _value(self) -> Reading[None]:
        """Anything, up to where it ends by its quotes and brackets."""
        if self._char == '"':
            yield from self._string()
        elif self._char in _CLOSERS:
            yield from self._nested()
        elif self._char in _SCALAR_ENDS:
            raise _Broken
        else:
            while self._char not in _SCALAR_ENDS:
                yield from self._take()

    def _nested(self) -> Reading[None]:
        open_brackets: list[str] = []
        while True:
            if self._char == '"':
                yield from self._string()
                continue
            if self._char in _CLOSERS:
                open_brackets.append(_CLOSERS[self._char])
            elif self._char in ("}", "]") and self._char != open_brackets.pop():
                raise _Broken
            yield from self._take()
            if not open_brackets:
                return


def _tool_name(written: str) -> str:
    """The name that a JSON string stands for."""
    try:
        name = json.loads(written, strict=False)
        name.encode()
    except ValueError:  # a wrong escape, or half a surrogate pair
        raise _Broken from None
    if not name:
        raise _Broken
    return str(name)

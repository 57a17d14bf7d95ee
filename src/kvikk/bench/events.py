"""Server-sent events, read from chunks of bytes that may be cut anywhere (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

from typing import NamedTuple

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event: its type, `message` where none was named, and its data, lines joined."""

    type: str
    data: str


class EventReader:
    """Turns chunks into events, each handed out with the chunk that holds the end of its blank line.

    Lines end with LF, CR or CRLF. They are decoded whole, so that a character may be cut by a chunk's border. An event
    without data, and one that the stream's end cuts off, is none.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._type = ""
        self._at_start = True
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that these bytes complete."""
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        lines = (self._rest + chunk).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        self._after_cr = bool(lines) and not self._rest and lines[-1].endswith(b"\r")
        events = []
        for line in lines:
            event = self._take(line.rstrip(b"\r\n"))
            if event is not None:
                events.append(event)
        return events

    def _take(self, line: bytes) -> Event | None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode(errors="replace")
        if name == b"data":
            self._data.append(text)
        elif name == b"event":
            self._type = text
        return None  # comments have no name; `id` and `retry` are for those who connect again

    def _dispatch(self) -> Event | None:
        event = Event(self._type or "message", "\n".join(self._data)) if self._data else None
        self._data, self._type = [], ""
        return event

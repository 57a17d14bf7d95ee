"""Server-sent events are the same however the network cuts them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvikk.bench.events import Event, EventReader

STREAM = (
    "\ufeffdata: one\n\n"
    ": a comment that keeps the connection open\n\n"
    "data: 한국어 🐘 é\r\n\r\n"
    "event: error\ndata:no space\ndata: second line\n\n"
    "id: 7\nretry: 100\ndata\n\n"
    "event: lost\n\n"
    "data: old\r\rdata:  two spaces\n\n"
    "data: never finished\n"
).encode()
EVENTS = [
    Event("message", "one"),
    Event("message", "한국어 🐘 é"),
    Event("error", "no space\nsecond line"),
    Event("message", ""),
    Event("message", "old"),
    Event("message", " two spaces"),
]


def read(chunks: list[bytes]) -> list[Event]:
    reader = EventReader()
    return [event for chunk in chunks for event in reader.feed(chunk)]


def test_every_form_that_the_standard_allows_is_read() -> None:
    assert read([STREAM]) == EVENTS


def test_a_byte_at_a_time_gives_the_same_events() -> None:
    assert read([STREAM[index : index + 1] for index in range(len(STREAM))]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_cuts_anywhere_give_the_same_events(cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(STREAM)]
    assert read([STREAM[start:end] for start, end in pairwise(borders)]) == EVENTS


def test_an_event_is_handed_out_with_the_last_byte_of_its_blank_line() -> None:
    reader = EventReader()
    assert reader.feed(b"data: x\n") == []
    assert reader.feed(b"\r") == [Event("message", "x")]
    assert reader.feed(b"\ndata: y\r\n\r") == [Event("message", "y")]
    assert reader.feed(b"\n") == []


@pytest.mark.parametrize("data", [b"data: \xff\n\n", b"data: \xe2\x82\n\n"])
def test_bytes_that_are_no_text_do_not_end_the_stream(data: bytes) -> None:
    assert [event.data for event in read([data])] == ["\N{REPLACEMENT CHARACTER}"]

"""What counts as an answer, and when it came."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvikk.bench.answer import AnswerReader, BrokenStream, Usage, error_text
from kvikk.bench.events import Event


def read(*chunks: Any, allow_missing_done: bool = False) -> AnswerReader:
    """The chunks as events that come a second apart, from second 1 on."""
    reader = AnswerReader(allow_missing_done=allow_missing_done)
    for second, chunk in enumerate(chunks, start=1):
        data = chunk if isinstance(chunk, str) else json.dumps(chunk)
        reader.take(Event("message", data), float(second))
    reader.finish()
    return reader


def text(piece: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": piece, "finish_reason": finish_reason}]}


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": finish_reason}]}


def test_only_chunks_with_text_are_arrivals_and_the_end_is_the_last_chunk_of_the_choice() -> None:
    reader = read(text("a"), text(""), text("b"), text("", "stop"), {"choices": [], "usage": None}, "[DONE]")
    assert (reader.arrivals_s, reader.last_s, "".join(reader.text)) == ([1.0, 3.0], 4.0, "ab")


def test_a_role_is_no_token_and_reasoning_and_tool_calls_are() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    reader = read(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="so"),
        delta(tool_calls=[call]),
        delta("tool_calls"),
        "[DONE]",
    )
    assert (reader.arrivals_s, "".join(reader.text)) == ([2.0, 3.0, 4.0], "hmsof{}")


def test_an_answer_of_special_tokens_arrives_with_its_end() -> None:
    assert read(text("", "length"), "[DONE]").arrivals_s == [1.0]


def test_usage_is_taken_wherever_it_comes_and_cached_tokens_with_it() -> None:
    last = text("a", "stop") | {"usage": {"prompt_tokens": 5, "completion_tokens": 1}}
    assert read(last, "[DONE]").usage == Usage(input_tokens=5, output_tokens=1)
    details = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    found = read(text("a", "stop"), {"choices": [], "usage": details}, "[DONE]").usage
    assert found == Usage(input_tokens=5, output_tokens=1, cached_tokens=4)


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([text("a")], "in the middle of the text"),
        ([text("a", "stop")], "without [DONE], though with its finish_reason"),
        (["[DONE]"], "without any text"),
        ([text("a", "abort"), "[DONE]"], "finish_reason 'abort'"),
        ([text("a"), {"error": {"message": "out of memory", "code": 500}}], "broke off: out of memory"),
        ([{"object": "error", "message": "too long"}], "broke off: too long"),
        (["{half"], "an event is no JSON: {half"),
        (["[1]"], "no JSON object: [1]"),
        ([{"choices": [5]}], "not OpenAI's form"),
        ([text(5)], "not OpenAI's form"),  # type: ignore[arg-type]
        ([{"choices": [], "usage": "much"}], "not OpenAI's form"),
    ],
)
def test_a_stream_that_does_not_come_to_its_end_is_broken(chunks: list[Any], said: str) -> None:
    with pytest.raises(BrokenStream) as broken:
        read(*chunks)
    assert said in str(broken.value)


def test_an_event_of_type_error_breaks_the_stream_whatever_its_form() -> None:
    with pytest.raises(BrokenStream, match="broke off: gone"):
        AnswerReader().take(Event("error", '{"message": "gone"}'), 1.0)


def test_a_server_that_never_sends_done_can_be_measured_but_not_a_stream_that_was_cut() -> None:
    assert read(text("a"), text("", "length"), allow_missing_done=True).arrivals_s == [1.0]
    with pytest.raises(BrokenStream, match="in the middle"):
        read(text("a"), allow_missing_done=True)


def test_errors_are_understood_in_every_usual_form_and_kept_short() -> None:
    assert error_text({"error": {"message": "m"}}) == "m"
    assert error_text({"error": "m"}) == "m"
    assert error_text({"detail": [{"msg": "m"}]}) == '[{"msg": "m"}]'
    assert error_text("a\n  b") == "a b"
    assert len(error_text("x" * 1000)) == 203

"""What is wrong with a message is refused with the field's name; what clients send back to us is not."""

from __future__ import annotations

from typing import Any

import pytest

from kvikk.chat import Conversation
from kvikk.errors import InvalidRequest

HELLO = {"role": "user", "content": "Hello"}


def call(arguments: object = "{}", **fields: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function} | fields]}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("Hello", "messages"),
        ([], "messages"),
        ({"role": "user", "content": "Hello"}, "messages"),
        (["Hello"], "messages[0]"),
        ([HELLO, None], "messages[1]"),
        ([{"content": "Hello"}], "messages[0].role"),
        ([{"role": "function", "content": "Hello"}], "messages[0].role"),
        ([{"role": ["user"], "content": "Hello"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": ["Hello"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "Hello", "colour": "red"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content[0].type"),
        ([HELLO | {"mood": "good"}], "messages[0]"),
        ([HELLO | {"name": 3}], "messages[0].name"),
        ([HELLO | {"tool_call_id": "1"}], "messages[0].tool_call_id"),
        ([HELLO | call() | {"role": "user"}], "messages[0].tool_calls"),
        ([HELLO | {"reasoning_content": "hm"}], "messages[0].reasoning_content"),
        ([{"role": "assistant", "tool_calls": "weather"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [3]}], "messages[0].tool_calls[0]"),
        ([call(type="custom")], "messages[0].tool_calls[0].type"),
        ([call(function=None)], "messages[0].tool_calls[0].function"),
        ([call(function={"name": ""})], "messages[0].tool_calls[0].function.name"),
        ([call(id=7)], "messages[0].tool_calls[0].id"),
        ([HELLO, call('{"city": "Os')], "messages[1].tool_calls[0].function.arguments"),
        ([call("[1]")], "messages[0].tool_calls[0].function.arguments"),
        ([call('{"a": NaN}')], "messages[0].tool_calls[0].function.arguments"),
        ([call('{"a": 1e999}')], "messages[0].tool_calls[0].function.arguments"),
        ([call('{"a": "\\ud800"}')], "messages[0].tool_calls[0].function.arguments"),
        ([call('{"a": ' + "[" * 100_000)], "messages[0].tool_calls[0].function.arguments"),
        ([call(None)], "messages[0].tool_calls[0].function.arguments"),
        ([call(7)], "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_the_field_that_is_wrong_is_named(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Conversation(messages=messages)
    assert caught.value.param == param
    assert param in str(caught.value)
    str(caught.value).encode()
    assert len(str(caught.value)) < 300, "a long value is shortened"


def test_what_was_sent_to_a_client_may_be_sent_back() -> None:
    answer = {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning_content": None,
    }
    assert Conversation(messages=[answer]).messages == [{"role": "assistant", "content": "Hello"}]
    streamed = call("", index=0)
    assert Conversation(messages=[streamed]).messages[0]["tool_calls"][0]["function"]["arguments"] == {}


def test_arguments_become_an_object_as_templates_want_it() -> None:
    for given in ('{"a": {"b": [1, "ü"]}}', {"a": {"b": [1, "ü"]}}):
        (message,) = Conversation(messages=[call(given)]).messages
        assert message == {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"a": {"b": [1, "ü"]}}}}
            ],
        }

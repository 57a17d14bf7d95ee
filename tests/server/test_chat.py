"""`/v1/chat/completions` through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from server.running import SMALL, Running, serving

MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "Name three colours."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12, "pattern": "^[A-Za-z ]+$"},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


def joined(chunks: Any) -> tuple[str, list[dict[str, Any]], str | None]:
    """Text, calls and reason of a streamed answer, put together as a client does."""
    text, calls, reason = "", [], None
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                if call.index == len(calls):
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments or ""
    return text, calls, reason


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_asked_of_the_prompt_comes_with_the_first_chunk_as_it_does_with_the_plain_answer(
    client: openai.OpenAI, n: int
) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 6, "temperature": 0, "n": n}
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    plain = client.chat.completions.create(**asked, extra_body=extra).model_extra
    first, *others = client.chat.completions.create(**asked, extra_body=extra, stream=True)
    assert plain is not None
    assert first.model_extra is not None
    assert len(plain["prompt_token_ids"]) == len(plain["prompt_logprobs"]) > 5
    assert first.model_extra["prompt_token_ids"] == plain["prompt_token_ids"]
    assert first.model_extra["prompt_logprobs"] == plain["prompt_logprobs"]
    assert not any(
        "prompt_logprobs" in chunk.model_extra or "prompt_token_ids" in chunk.model_extra for chunk in others
    )
    bare = list(client.chat.completions.create(**asked, stream=True))
    assert not any("prompt_logprobs" in chunk.model_extra or "prompt_token_ids" in chunk.model_extra for chunk in bare)


def test_the_streamed_answer_is_the_plain_answer(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 40, "temperature": 0.7, "seed": 1}
    plain = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text, calls, reason = joined(chunks)
    assert text == plain.choices[0].message.content
    assert calls == []
    assert reason == plain.choices[0].finish_reason
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert plain.choices[0].message.role == "assistant"
    assert plain.usage.prompt_tokens_details is not None


def test_a_conversation_that_goes_on_finds_its_beginning_cached(client: openai.OpenAI) -> None:
    messages = [{"role": "system", "content": "You are brief. " * 20}, *QUESTION]
    first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, temperature=0)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And three more?"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens - 32 <= cached <= second.usage.prompt_tokens


def test_n_answers_are_streamed_side_by_side(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 16, "temperature": 1, "n": 3, "seed": 8}
    plain = [choice.message.content for choice in client.chat.completions.create(**asked).choices]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == plain
    assert len(set(texts)) == 3


def test_every_token_of_the_answer_has_its_logprob_streamed_or_not(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0, "logprobs": True}
    plain = client.chat.completions.create(**asked, top_logprobs=3)
    content = plain.choices[0].logprobs.content
    assert "".join(token.token for token in content) == plain.choices[0].message.content
    assert all(len(token.top_logprobs) == 3 for token in content)
    assert all(token.logprob == token.top_logprobs[0].logprob for token in content)
    assert all(bytes(token.bytes).decode() == token.token for token in content)
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(**asked, top_logprobs=3, stream=True):
        for choice in chunk.choices:
            streamed += choice.logprobs.content if choice.logprobs else []
    assert [token.token for token in streamed] == [token.token for token in content]
    alone = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert all(token.top_logprobs == [] for token in alone)


def test_text_parts_and_the_developer_role_are_understood(client: openai.OpenAI) -> None:
    def said(messages: list[dict[str, Any]]) -> Any:
        return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, temperature=0)

    plain = said([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    parts = said(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        ]
    )
    assert parts.usage.prompt_tokens == plain.usage.prompt_tokens
    assert parts.choices[0].message.content == plain.choices[0].message.content


def test_the_last_message_can_be_gone_on_with(client: openai.OpenAI) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "Red, green and"}]
    done = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=3,
        temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert done.choices[0].message.content.strip().lower().startswith(("blue", "yellow", "purple"))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_is_a_call_with_valid_arguments_streamed_as_not(client: openai.OpenAI, choice: Any) -> None:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_tokens": 200,
        "temperature": 0,
        "parallel_tool_calls": False,
    }
    plain = client.chat.completions.create(**asked).choices[0]
    assert plain.finish_reason == "tool_calls"
    (call,) = plain.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("C", "F")
    chunks = list(client.chat.completions.create(**asked, stream=True))
    _, calls, reason = joined(chunks)
    assert reason == "tool_calls"
    assert [(c["name"], c["arguments"]) for c in calls] == [("get_weather", call.function.arguments)]
    pieces = [c for chunk in chunks for choice in chunk.choices for c in choice.delta.tool_calls or []]
    assert len(pieces) > 3, "arguments come as they are written, not all at the end"


def test_the_call_and_its_result_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    messages = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "unit": "C"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Minus 3 degrees and snow"},
    ]
    done = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[WEATHER, CLOCK], max_tokens=30, temperature=0
    )
    assert done.choices[0].message.content or done.choices[0].message.tool_calls


def test_without_calls_allowed_text_that_looks_like_one_stays_text(client: openai.OpenAI) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call>'
    asked = {
        "model": MODEL,
        "messages": QUESTION,
        "tools": [WEATHER],
        "max_tokens": 80,
        "temperature": 0,
        "extra_body": {"guided_choice": [call]},
    }
    none = client.chat.completions.create(**asked, tool_choice="none").choices[0]
    assert none.message.content == call
    assert none.finish_reason == "stop"
    auto = client.chat.completions.create(**asked, tool_choice="auto").choices[0]
    assert auto.message.tool_calls[0].function.name == "get_weather"
    assert auto.message.tool_calls[0].function.arguments == "{}"
    assert auto.message.content is None
    assert auto.finish_reason == "tool_calls"


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose template wants roles in turn, and reaches for the machine when a message says so."""
    folder = tmp_path_factory.mktemp("templated")
    template = folder / "strict.jinja"
    template.write_text(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must take turns') }}{% endif %}"
        "{% if m.content == 'reach' %}{{ ''.__class__.__mro__[1].__subclasses__() }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    )
    with serving(folder, "smollm2", *SMALL, "--chat-template", str(template)) as running:
        yield running


def test_a_template_that_wants_roles_in_turn_refuses_others_and_says_so(templated: Running) -> None:
    chat = templated.client().chat.completions
    with pytest.raises(openai.BadRequestError, match="roles must take turns") as refused:
        chat.create(model=MODEL, messages=QUESTION * 2, max_tokens=2)
    assert refused.value.param == "messages"
    chat.create(model=MODEL, messages=QUESTION, max_tokens=2)


def test_templates_cannot_reach_the_machine(templated: Running) -> None:
    chat = templated.client().chat.completions
    with pytest.raises(openai.BadRequestError, match="unsafe"):
        chat.create(model=MODEL, messages=[{"role": "user", "content": "reach"}], max_tokens=2)


def test_the_tokens_of_messages_are_those_that_a_chat_counts(server: Running, client: openai.OpenAI) -> None:
    counted = server.post("/tokenize", json={"messages": QUESTION}).json()
    done = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1)
    assert counted["count"] == done.usage.prompt_tokens
    text = server.post("/detokenize", json={"tokens": counted["tokens"]}).json()["prompt"]
    assert "Name three colours." in text
    assert text.endswith("assistant\n")

"""Structured output over HTTP: always valid, streaming and not, at any concurrency."""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from server.running import Running

MODEL = "smollm2"
MESSAGES = [{"role": "user", "content": "Give me JSON."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS = int(os.environ.get("KVIKK_JSON_SCHEMAS", "200"))


def test_a_json_schema_is_kept_to(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for temperature in (0.0, 1.5):
        done = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, response_format=form, max_tokens=200, temperature=temperature, seed=3
        )
        jsonschema.validate(json.loads(done.choices[0].message.content), PERSON)
        assert done.choices[0].finish_reason == "stop"


def test_json_object_gives_an_object(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "A JSON object with your name."}],
        response_format={"type": "json_object"},
        max_tokens=300,
        temperature=0,
    )
    if done.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(done.choices[0].message.content), dict)
    assert done.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"guided_regex": r"[A-Z]{3}-\d{4}"}, r"[A-Z]{3}-\d{4}"),
        ({"structured_outputs": {"regex": r"(yes|no), (never|always)"}}, r"(yes|no), (never|always)"),
        ({"guided_choice": ["red", "green", "blue"]}, "red|green|blue"),
        ({"guided_grammar": 'start: "<" /[a-z]{2,5}/ ">"'}, "<[a-z]{2,5}>"),
        ({"guided_grammar": 'root ::= "a" [0-9] "b"'}, "a[0-9]b"),
    ],
)
def test_a_text_has_the_form_asked_for(client: openai.OpenAI, asked: dict[str, Any], pattern: str) -> None:
    for seed in range(3):
        done = client.completions.create(
            model=MODEL, prompt="Answer: ", max_tokens=40, temperature=1.5, seed=seed, extra_body=asked
        )
        assert re.fullmatch(pattern, done.choices[0].text)
        assert done.choices[0].finish_reason == "stop"


def test_several_texts_follow_the_form_each_on_its_own(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model=MODEL,
        prompt="Code: ",
        n=6,
        max_tokens=40,
        temperature=2,
        seed=1,
        extra_body={"guided_regex": r"[a-z]{6}\d"},
    )
    texts = [choice.text for choice in done.choices]
    assert all(re.fullmatch(r"[a-z]{6}\d", text) for text in texts)
    assert len(set(texts)) > 1


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_json": {"type": "nonsense"}},
        {"guided_json": "not json"},
        {"guided_regex": "(unclosed"},
        {"guided_grammar": "start: undefined_rule"},
        {"guided_choice": []},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "json": {}}},
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_with_the_reason(
    client: openai.OpenAI, asked: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", max_tokens=5, extra_body=asked)
    assert refused.value.status_code == 400
    assert refused.value.param


VALUES = ["x", "y z", 1, 2.5, None, True, "ø", '"', "\\"]
KEYS = ["a", "b", "name", "größe", "key with space", "ключ"]
SIMPLE = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}]),
    st.fixed_dictionaries({"type": st.just("integer"), "minimum": st.integers(-99, 0), "maximum": st.integers(1, 500)}),
    st.fixed_dictionaries({"type": st.just("string"), "maxLength": st.integers(0, 8)}),
    st.fixed_dictionaries(
        {"type": st.just("string"), "pattern": st.sampled_from(["^[a-c]{1,3}$", "^(on|off)$", "^x?y{2}$"])}
    ),
    st.fixed_dictionaries({"enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=4, unique_by=repr)}),
    st.fixed_dictionaries({"const": st.sampled_from(["only", 7, False, [1], {"k": None}])}),
)
"""JSON schemas whose values are short enough to be written within a test."""


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas with others in them."""
    properties = st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    objects = st.builds(
        lambda properties, needed: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:needed],
            "additionalProperties": False,
        },
        properties,
        st.integers(0, 3),
    )
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 1),
        st.integers(0, 2),
    )
    return st.one_of(objects, arrays, st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner))


SCHEMA = st.recursive(SIMPLE, nested, max_leaves=5)


def test_output_follows_200_random_schemas_streaming_and_not_at_concurrency_8(server: Running) -> None:
    schemas: list[Any] = []

    @seeded(1)
    @settings(
        max_examples=SCHEMAS,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(SCHEMA)
    def collect(schema: Any) -> None:
        schemas.append(schema)

    collect()
    client = server.async_client(timeout=300)

    async def follow(index: int, schema: Any, gate: asyncio.Semaphore) -> str:
        asked = {
            "model": MODEL,
            "messages": MESSAGES,
            "max_tokens": 400,
            "temperature": 0.0 if index % 2 else 1.0,
            "seed": index,
            "response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}},
        }
        async with gate:
            if index % 4 < 2:
                done = (await client.chat.completions.create(**asked)).choices[0]
                text, reason = done.message.content or "", done.finish_reason
            else:
                text, reason = "", None
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    text += chunk.choices[0].delta.content or ""
                    reason = chunk.choices[0].finish_reason or reason
        assert reason == "stop", f"{schema} was not finished: {text!r}"
        jsonschema.validate(json.loads(text), schema)
        return text

    async def all_of_them() -> list[str]:
        gate = asyncio.Semaphore(8)
        return list(await asyncio.gather(*(follow(i, schema, gate) for i, schema in enumerate(schemas))))

    texts = asyncio.run(all_of_them())
    assert len(texts) >= SCHEMAS
    assert len(set(texts)) > SCHEMAS // 4
    assert server.wait_until_idle()["held_blocks"] == 0

from __future__ import annotations

import msgspec
import pytest

from kvikk.errors import InvalidRequest
from kvikk.grammar import StructuredOutputsParams, validate

NESTED = '{"items":' * 5000 + "{}" + "}" * 5000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar shapes a text, none is given"),
        ({"json_object": False}, "none is given"),
        ({"json": {}, "regex": "a"}, "json and regex are given"),
        ({"json": "{"}, "json is no JSON schema"),
        ({"json": "[1]"}, "json is no JSON schema: it must be an object"),
        ({"json": 5}, "json is no JSON schema: it must be an object"),
        ({"json": {"a": float("nan")}}, "json is no JSON schema"),
        ({"json": {"a": object()}}, "json is no JSON schema"),
        ({"json": NESTED}, "json is no JSON schema: it is nested too deeply"),
        ({"json": {"enum": ["x" * 70_000]}}, "json has 70,014 characters: it must have 1 to 65,536"),
        ({"json_object": 1}, "json_object is 1: it must be true or false"),
        ({"regex": ""}, "regex has 0 characters"),
        ({"regex": 5}, "regex is int: it must be text"),
        ({"choice": []}, "choice holds 0 strings: give 1 to 1024"),
        ({"choice": ["a"] * 1025}, "choice holds 1025 strings"),
        ({"choice": ["a", ""]}, "choice holds an empty string"),
        ({"choice": "ab"}, "choice is 'ab': it must be a list of strings"),
        ({"choice": [1]}, "choice is [1]: it must be a list of strings"),
        ({"grammar": "x" * 70_000}, "grammar has 70,000 characters"),
    ],
)
def test_a_form_that_is_none_is_refused_with_its_field(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        StructuredOutputsParams(**fields)  # type: ignore[arg-type]
    assert message in str(refusal.value)
    assert refusal.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(a"}, "regex cannot be used: .* unclosed group"),
        ({"regex": "(?=a)b"}, "regex cannot be used: .* look-around"),
        ({"regex": "lone \ud800"}, "regex cannot be used: .* surrogates not allowed"),
        ({"json": {"type": "strin"}}, "json cannot be used: Invalid type: strin"),
        ({"json": {"not": {}}}, 'json cannot be used: Unimplemented keys: ."not".'),
        ({"json": {"$ref": "http://localhost/x.json"}}, "json cannot be used: .* does not fetch resources"),
        ({"grammar": "start: foo"}, 'grammar cannot be used: .* unknown name: "foo"'),
        ({"grammar": "root ::= foo"}, "grammar cannot be used: .* Rule 'foo' not found"),
        ({"grammar": "no grammar"}, "grammar cannot be used: .* Expected ::="),
    ],
)
def test_a_form_that_llguidance_cannot_read_is_refused_with_its_reason_on_one_line(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        validate(StructuredOutputsParams(**fields))  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)
    assert refusal.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "params",
    [
        StructuredOutputsParams(
            json={"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {}}}
        ),
        StructuredOutputsParams(json='{"type": "integer"}'),
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(regex=r"\d{3}"),
        StructuredOutputsParams(choice=["ja", "nei", "😀"]),
        StructuredOutputsParams(grammar='root ::= "a" | "b"'),
        StructuredOutputsParams(grammar='start: "a" | "b"'),
    ],
)
def test_a_form_is_valid_without_a_model_and_survives_the_way_between_processes(
    params: StructuredOutputsParams,
) -> None:
    validate(params)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=StructuredOutputsParams) == params

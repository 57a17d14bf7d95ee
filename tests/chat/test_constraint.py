"""Whatever the model's taste, a forced call is one that the parser reads, with arguments as the schema wants them."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from kvikk.chat import Answer, ToolForm, ToolUse, constraint, form_for
from kvikk.errors import InvalidRequest
from kvikk.grammar import Grammar, GrammarCompiler, StructuredOutputsParams

PLACE = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$id": "https://example.org/place",
    "title": "Place",
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/City"},
        "unit": {"enum": ["C", "F", '"quoted" ü // %']},
        "title": {"type": "boolean", "description": "a property that is called as an explanation is"},
        "$ref": {"const": {"$ref": "#/not/a/reference"}},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["city", "unit", "title"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string", "maxLength": 6}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"weather": PLACE, "now": {"type": "object", "maxProperties": 0}}
RIGHT = {"city": "Oslo", "unit": "C", "title": True}
MAX_TOKENS = 400


class Walker:
    """A model without judgement: any token that the grammar allows, with a liking for ends."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.eos_token_id
        self.compiler = GrammarCompiler(tokenizer, len(tokenizer), [self.eos])
        self.ends = [self.eos, *tokenizer.convert_tokens_to_ids(['"', "}", '"}', '",'])]

    def walk(self, params: StructuredOutputsParams, seed: int, *, start: str = "") -> str:
        """The text of a walk that begins with `start`."""
        rng = random.Random(seed)
        grammar = self.compiler.compile(params)
        tokens = self.tokenizer.encode(start)
        assert self.follow(grammar, tokens)
        while len(tokens) < MAX_TOKENS:
            allowed = grammar.mask()
            ends = [token for token in self.ends if allowed[token]]
            token = rng.choice(ends) if ends and rng.random() < 0.7 else int(rng.choice(np.flatnonzero(allowed)))
            if token == self.eos:
                return self.tokenizer.decode(tokens)
            grammar.advance(token)
            tokens.append(token)
        raise AssertionError("the walk found no end")

    def allows(self, params: StructuredOutputsParams, text: str) -> bool:
        """Whether this may be the whole text."""
        return self.follow(self.compiler.compile(params), [*self.tokenizer.encode(text), self.eos])

    def follow(self, grammar: Grammar, tokens: list[int]) -> bool:
        """Go along tokens; whether all of them were allowed."""
        for token in tokens:
            if not grammar.mask()[token]:
                return False
            grammar.advance(token)
        return True


@pytest.fixture(scope="module", params=["marks are text", "marks are tokens"])
def walker(
    request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase, with_marks: PreTrainedTokenizerBase
) -> Walker:
    return Walker(tokenizer if request.param == "marks are text" else with_marks)


@pytest.fixture(params=["hermes", "llama"])
def form(request: pytest.FixtureRequest, walker: Walker) -> ToolForm:
    return form_for(request.param, walker.tokenizer)


def made(use: ToolUse, form: ToolForm, answer: StructuredOutputsParams | None = None) -> StructuredOutputsParams:
    params = constraint(use, form, answer)
    assert params is not None
    return params


def read(form: ToolForm, use: ToolUse, text: str) -> Answer:
    """The answer; arguments follow the schema, but for those of tools that are free."""
    counter = itertools.count()
    parser, found = form.read(use, lambda: str(next(counter))), Answer()
    found.add(parser.push(text))
    found.add(parser.finish())
    for call in found.calls:
        is_free = use.mode == "auto" and call.name == "now"
        jsonschema.validate(json.loads(call.arguments), {"type": "object"} if is_free else SCHEMAS[call.name])
    return found


def test_a_model_that_must_call_calls(walker: Walker, form: ToolForm) -> None:
    use = ToolUse.read(TOOLS, "required")
    params = made(use, form)
    found = [read(form, use, walker.walk(params, seed)) for seed in range(40)]
    assert all(answer.text == "" and answer.calls for answer in found)
    assert {call.name for answer in found for call in answer.calls} == {"weather", "now"}
    assert {len(answer.calls) for answer in found} > {1}, "several calls are allowed"
    assert not walker.allows(params, "It rains.")


def test_one_call_is_one_call(walker: Walker, form: ToolForm) -> None:
    use = ToolUse.read(TOOLS, "required", False)
    params = made(use, form)
    assert all(len(read(form, use, walker.walk(params, seed)).calls) == 1 for seed in range(20))
    assert not walker.allows(params, form.between.join([form.write("now", {})] * 2))


def test_the_tool_that_is_named_is_called_once(walker: Walker, form: ToolForm) -> None:
    use = ToolUse.read(TOOLS, {"type": "function", "function": {"name": "weather"}})
    params = made(use, form)
    for seed in range(20):
        assert [call.name for call in read(form, use, walker.walk(params, seed)).calls] == ["weather"]


def test_a_strict_tool_is_held_to_its_schema_where_the_model_is_free(walker: Walker, form: ToolForm) -> None:
    use = ToolUse.read(TOOLS)
    params = made(use, form)
    for text in ("", "It rains.", "a < b <tool", "Grüße 🙂\n\n"):
        assert walker.allows(params, text)
    for start in ("Let me see.\n<tool_call>", "<tool_call>") if form.name == "hermes" else ("{", "So: <|python_tag|>"):
        for seed in range(10):
            found = read(form, use, walker.walk(params, seed, start=start))
            assert found.calls, "a call that has begun is finished"
    call = form.write("weather", RIGHT)
    assert walker.allows(params, form.between.join([call, call]))
    assert not walker.allows(params, form.write("weather", {"city": "Oslo"}))
    assert not walker.allows(params, form.write("nobody", {}))
    assert walker.allows(params, form.write("now", {"any": [1]})), "it is not strict"


def test_a_free_model_without_strict_tools_is_not_held_to_anything(form: ToolForm) -> None:
    assert constraint(ToolUse.read(TOOLS[1:]), form) is None
    assert constraint(ToolUse(), form) is None


def test_an_answer_with_a_form_leaves_room_for_calls(walker: Walker, form: ToolForm) -> None:
    use = ToolUse.read(TOOLS)
    answer = StructuredOutputsParams(json={"type": "object", "properties": {"name": {"type": "string"}}})
    params = made(use, form, answer)
    call = form.write("weather", RIGHT)
    assert walker.allows(params, call)
    assert walker.allows(params, form.between.join([call, call]))
    assert walker.allows(params, '{"name": "Oslo"}')
    assert walker.allows(params, '{"name": "weather"}')
    assert not walker.allows(params, '{"name": 3}')
    assert not walker.allows(params, "It rains.")
    assert constraint(ToolUse.read(TOOLS, "none"), form, answer) is answer


def test_a_form_of_the_whole_text_is_the_clients_own_affair(form: ToolForm) -> None:
    answer = StructuredOutputsParams(regex="[a-z]+")
    assert constraint(ToolUse.read(TOOLS), form, answer) is answer
    assert constraint(ToolUse.read(TOOLS, "required"), form, answer) is not answer, "there is no answer but calls"


def test_the_tool_whose_schema_cannot_be_followed_is_named(form: ToolForm) -> None:
    odd: dict[str, Any] = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    with pytest.raises(InvalidRequest, match="not") as caught:
        constraint(ToolUse.read(tools, "required"), form)
    assert caught.value.param == "tools[2].function.parameters"
    with pytest.raises(InvalidRequest, match="not") as caught:
        constraint(ToolUse.read(TOOLS), form, StructuredOutputsParams(json=odd))
    assert caught.value.param == "structured_outputs", "the answer's own form is at fault"
    assert constraint(ToolUse.read(tools), form) is not None, "it is not strict: where the model is free, so is it"
    many = [
        {"type": "function", "function": {"name": f"t{i}", "parameters": {"properties": {"a": {"const": "x" * 999}}}}}
        for i in range(128)
    ]
    with pytest.raises(InvalidRequest, match="65,536") as caught:
        constraint(ToolUse.read(many, "required"), form)
    assert caught.value.param == "tools"

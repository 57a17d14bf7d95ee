"""`tools` and `tool_choice` mean what they mean to OpenAI; what is wrong with them is named."""

from __future__ import annotations

from typing import Any

import pytest

from kvikk.chat import ToolUse, finish_reason
from kvikk.errors import InvalidRequest


def tool(name: object = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | fields}


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "param"),
    [
        ("weather", None, None, "tools"),
        ([tool(f"t{index}") for index in range(129)], None, None, "tools"),
        (["weather"], None, None, "tools[0]"),
        ([{"function": {"name": "weather"}}], None, None, "tools[0].type"),
        ([{"type": "function"}], None, None, "tools[0].function"),
        ([tool(), tool("")], None, None, "tools[1].function.name"),
        ([tool("a" * 65)], None, None, "tools[0].function.name"),
        ([tool("what now")], None, None, "tools[0].function.name"),
        ([tool("weather\n")], None, None, "tools[0].function.name"),
        ([tool("wetter-für")], None, None, "tools[0].function.name"),
        ([tool(), tool()], None, None, "tools[1].function.name"),
        ([tool(paramters={})], None, None, "tools[0].function"),
        ([tool(description=3)], None, None, "tools[0].function.description"),
        ([tool(description="\ud800")], None, None, "tools[0].function.description"),
        ([tool(strict="yes")], None, None, "tools[0].function.strict"),
        ([tool(parameters=[])], None, None, "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], None, None, "tools[0].function.parameters"),
        ([tool(parameters={"type": ["object"]})], None, None, "tools[0].function.parameters"),
        ([tool(parameters={"default": float("inf")})], None, None, "tools[0].function.parameters"),
        ([tool()], "always", None, "tool_choice"),
        ([tool()], {"type": "function"}, None, "tool_choice"),
        ([tool()], NAMED | {"mood": 1}, None, "tool_choice"),
        ([tool("search")], NAMED, None, "tool_choice.function.name"),
        (None, "required", None, "tool_choice"),
        ([], NAMED, None, "tool_choice"),
        ([tool()], None, 1, "parallel_tool_calls"),
    ],
)
def test_the_field_that_is_wrong_is_named(tools: Any, choice: Any, parallel: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ToolUse.read(tools, choice, parallel)
    assert caught.value.param == param
    assert param in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_choice_says_whether_the_model_may_or_must_call() -> None:
    tools = [tool(), tool("search")]
    assert ToolUse.read(tools).mode == ToolUse.read(tools, "auto").mode == "auto"
    assert ToolUse.read(tools, "required").mode == "required"
    none = ToolUse.read(tools, "none")
    assert not none.may_call
    assert none.names == ["weather", "search"], (
        "the model is shown them all the same, so that its prompt stays as it was"
    )
    named = ToolUse.read(tools, NAMED)
    assert (named.mode, named.only, named.parallel) == ("required", "weather", False)
    assert [found.name for found in named.callable_tools] == ["weather"]
    assert not ToolUse.read(tools, "auto", False).parallel


@pytest.mark.parametrize("choice", [None, "none", "auto"])
@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_there_is_nothing_to_call(tools: Any, choice: Any) -> None:
    assert not ToolUse.read(tools, choice).may_call


def test_a_tool_is_shown_with_what_templates_read() -> None:
    (bare, full) = ToolUse.read(
        [tool("now"), tool(description="Weather", parameters={"properties": {}}, strict=True)]
    ).tools
    assert bare.definition["function"]["parameters"]["type"] == "object"
    assert full.definition == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    assert full.strict


def test_an_answer_ended_for_its_calls_only_if_it_ended_by_itself() -> None:
    assert finish_reason("stop", has_tool_calls=True) == "tool_calls"
    assert finish_reason("stop", has_tool_calls=False) == "stop"
    for cut in ("length", "abort", "error"):
        assert finish_reason(cut, has_tool_calls=True) == finish_reason(cut, has_tool_calls=False) == cut
    with pytest.raises(ValueError, match="tired"):
        finish_reason("tired", has_tool_calls=False)

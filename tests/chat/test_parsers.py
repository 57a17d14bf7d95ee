"""Calls are read out of a text as it is written, the same however the text is cut, and nothing of it is lost."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvikk.chat import HERMES, LLAMA, Answer, ArgumentsDelta, CallBegan, Event, TextDelta, Tool, ToolForm, ToolUse

SPACE = " \t\n\r"
TOOLS = tuple(Tool(name=name, parameters={"type": "object"}) for name in ("weather", "search"))
FORMS = (HERMES, LLAMA)


def read(form: ToolForm, *pieces: str, parallel: bool = True) -> tuple[list[Event], bool]:
    counter = itertools.count()
    parser = form.read(ToolUse(tools=TOOLS, mode="auto", parallel=parallel), lambda: f"call-{next(counter)}")
    events = [event for piece in pieces for event in parser.push(piece)]
    return events + parser.finish(), parser.has_ended


def answer(form: ToolForm, *pieces: str, parallel: bool = True) -> Answer:
    found = Answer()
    found.add(read(form, *pieces, parallel=parallel)[0])
    return found


def calls(form: ToolForm, *pieces: str, parallel: bool = True) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer(form, *pieces, parallel=parallel).calls]


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(borders)]


def without_space(text: str) -> str:
    return "".join(char for char in text if char not in SPACE)


# Any text at all

FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "<", "</", "<tool_call", "|>", ";", "; ", "\n", " ", "\t"),
        *(
            '"name"',
            '"arguments"',
            '"parameters"',
            '"type"',
            '"x"',
            '"weather"',
            '"search"',
            '"nobody"',
            ":",
            ": ",
            ",",
        ),
        *("{", "}", "[", "]", '"', "\\", "\\u00e9", "\\ud800", "null", "12", "'", "ordinary words", "Grüße 🙂", "\x00"),
        *('{"name": "weather", "arguments": {', '{"name": "search", "parameters": {}}', '{"arguments": {"a": [1]}, '),
    ]
)
SOUP = st.lists(FRAGMENTS, max_size=30).map("".join)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(max_examples=400, deadline=None)
@given(text=SOUP, places=st.lists(st.integers(0, 10_000), max_size=12), parallel=st.booleans())
def test_what_is_read_does_not_depend_on_how_the_text_is_cut(
    form: ToolForm, text: str, places: list[int], parallel: bool
) -> None:
    whole = answer(form, text, parallel=parallel)
    assert answer(form, *cut(text, places), parallel=parallel) == whole
    assert answer(form, *text, parallel=parallel) == whole


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(max_examples=400, deadline=None)
@given(text=SOUP)
def test_a_text_in_which_no_call_begins_comes_out_unchanged(form: ToolForm, text: str) -> None:
    found = answer(form, text)
    if not found.calls:
        assert found.text == text


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(max_examples=400, deadline=None)
@given(text=SOUP)
def test_nothing_comes_out_that_the_model_did_not_write(form: ToolForm, text: str) -> None:
    found = answer(form, text)
    rest = iter(text)
    assert all(char in rest for char in found.text), "the text is what was written, with gaps"
    for call in found.calls:
        assert call.arguments in text or call.arguments == "{}", "{} also stands for arguments that are missing"


# Texts whose parts are known

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text() | st.sampled_from(["name", "arguments", "</tool_call>", "}"]), JSON, max_size=3)
LAYOUT = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "indent": st.sampled_from([None, 2]),
        "separators": st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]),
    }
)
PLAIN = st.text().filter(lambda text: "<" not in text and text.strip(SPACE))
NO_CALLS = st.sampled_from(
    [
        "<tool_call>",
        "<tool_call>then words",
        "<tool_call>[1, 2]",
        '<tool_call>{"name": }',
        '<tool_call>{"name": "weather" oops',
        '<tool_call>{"name": 3, "arguments": {}}',
        '<tool_call>{"name": "", "arguments": {}}',
        '<tool_call>{"name": "\\ud800", "arguments": {}}',
        '<tool_call>{"name": "weather", "arguments": "text"}',
        '<tool_call>{"name": "weather", "arguments": null}',
        "<tool_call",
        "</tool_call >",
        "a < b",
    ]
)


@st.composite
def written_call(draw: st.DrawFn) -> tuple[str, str, str]:
    """A call as a model may write it: its text, and the name and arguments in it."""
    arguments = json.dumps(draw(ARGUMENTS), **draw(LAYOUT))
    name = draw(st.sampled_from(["weather", "search"]))
    members = [("name", json.dumps(name)), (draw(st.sampled_from(["arguments", "parameters"])), arguments)]
    members += draw(st.sampled_from([[], [("type", '"function"')], [("id", "7")]]))
    space = draw(st.sampled_from(["", " ", "\n  "]))
    body = f"{space},{space}".join(f'"{key}"{space}:{space}{value}' for key, value in draw(st.permutations(members)))
    return f"{{{space}{body}{space}}}", name, arguments


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(PLAIN | NO_CALLS | written_call(), max_size=6),
    close=st.sampled_from(["\n</tool_call>", "</tool_call>", ""]),
    places=st.lists(st.integers(0, 10_000), max_size=9),
)
def test_hermes_finds_every_call_and_keeps_the_text_around(
    parts: list[str | tuple[str, str, str]], close: str, places: list[int]
) -> None:
    text = expected_text = ""
    expected_calls = []
    for part in parts:
        if isinstance(part, str):
            text += f"\n{part}"
            expected_text += part
        else:
            text += f"\n<tool_call>\n{part[0]}{close}"
            expected_calls.append(part[1:])
    found = answer(HERMES, *cut(text, places))
    assert [(call.name, call.arguments) for call in found.calls] == expected_calls
    assert without_space(found.text) == without_space(expected_text)


@settings(max_examples=300, deadline=None)
@given(
    before=st.none() | st.just("") | PLAIN,
    row=st.lists(written_call(), min_size=1, max_size=3),
    after=st.just("") | PLAIN.filter(lambda text: text.lstrip(SPACE)[0] not in "{;"),
    places=st.lists(st.integers(0, 10_000), max_size=9),
)
def test_llama_finds_calls_at_the_start_or_behind_the_tag(
    before: str | None, row: list[tuple[str, str, str]], after: str, places: list[int]
) -> None:
    """`before` is None: the text starts with the calls."""
    if before is not None and before.lstrip(SPACE).startswith("{"):
        before = "So: " + before
    text = "" if before is None else f"{before}<|python_tag|>"
    text += "; ".join(body for body, _, _ in row) + "\n" + after
    found = answer(LLAMA, *cut(text, places))
    assert [(call.name, call.arguments) for call in found.calls] == [call[1:] for call in row]
    assert without_space(found.text) == without_space((before or "") + after)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@settings(max_examples=200, deadline=None)
@given(written=written_call(), length=st.integers(0, 10_000))
def test_a_call_that_is_cut_off_is_text_before_it_begins_and_a_call_with_what_came_after(
    form: ToolForm, written: tuple[str, str, str], length: int
) -> None:
    body, name, arguments = written
    whole = f"{form.before}{body}"
    text = whole[: length % len(whole)]
    found = answer(form, text)
    if found.calls:
        assert len(found.calls) == 1
        assert found.calls[0].name == name
        assert arguments.startswith(found.calls[0].arguments)
    else:
        assert found.text == text


@settings(max_examples=200, deadline=None)
@given(arguments=ARGUMENTS)
def test_arguments_are_given_out_character_by_character(arguments: dict[str, Any]) -> None:
    written = json.dumps(arguments, ensure_ascii=False)
    parser = HERMES.read(ToolUse(tools=TOOLS, mode="auto"), lambda: "id")
    parser.push('<tool_call>\n{"name": "weather", "arguments": ')
    for index, char in enumerate(written):
        deltas = parser.push(char)
        assert deltas[-1] == ArgumentsDelta(0, char)
        assert deltas[:-1] == ([CallBegan(0, "id", "weather")] if index == 0 else [])


def test_text_is_given_out_as_it_comes_but_for_what_may_belong_to_a_call() -> None:
    parser = HERMES.read(ToolUse(tools=TOOLS, mode="auto"), lambda: "id")
    assert parser.push("Let me see") == [TextDelta("Let me see")]
    assert parser.push(".\n<tool") == [TextDelta(".")]
    assert parser.push("box>") == [TextDelta("\n<toolbox>")]


# Single claims


def test_calls_come_in_order_with_ids_of_the_callers_making() -> None:
    one, two = (f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in ("weather", "search"))
    assert read(HERMES, f"{one}\n{two}")[0] == [
        CallBegan(0, "call-0", "weather"),
        ArgumentsDelta(0, "{}"),
        CallBegan(1, "call-1", "search"),
        ArgumentsDelta(1, "{}"),
    ]


def test_space_beside_a_call_goes_with_it_unless_it_parts_two_texts() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    assert answer(HERMES, f"\n\n{call}\n").text == ""
    assert answer(HERMES, f"Wait.\n{call}\n").text == "Wait."
    assert answer(HERMES, f"{call}\n\nDone.").text == "Done."
    assert answer(HERMES, f"Wait.\n{call}\nDone.\n").text == "Wait.\nDone.\n"


def test_a_name_that_no_tool_has_is_a_call_where_the_model_marks_it_as_one() -> None:
    """The client tells the model so, and it can try again; as text the call would end an agent's run."""
    body = '{"name": "nobody", "arguments": {"a": 1}}'
    assert calls(HERMES, f"<tool_call>{body}</tool_call>") == [("nobody", '{"a": 1}')]
    assert calls(LLAMA, f"<|python_tag|>{body}") == [("nobody", '{"a": 1}')]
    assert answer(LLAMA, body) == Answer(text=body)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "weather"}',
        '{"name": "weather", "city": "Oslo", "parameters": {}}',
        '{"name": "weather", "parameters": []}',
        'It is {"name": "weather", "parameters": {}}',
        '[{"name": "weather", "parameters": {}}]',
        '<|python_tag|>search.call(query="x")',
    ],
)
def test_an_answer_in_json_is_no_call(text: str) -> None:
    assert answer(LLAMA, text) == Answer(text=text)


def test_an_answer_in_json_is_given_out_once_it_cannot_be_a_call() -> None:
    parser = LLAMA.read(ToolUse(tools=TOOLS, mode="auto"), lambda: "id")
    assert parser.push('{"name": "weather", "city":') == [TextDelta('{"name": "weather", "city":')]
    assert parser.push(' "Oslo"}') == [TextDelta(' "Oslo"}')]


def test_a_marked_call_without_arguments_has_none() -> None:
    assert calls(HERMES, '<tool_call>{"name": "weather"}</tool_call>') == [("weather", "{}")]
    assert calls(LLAMA, '<|python_tag|>{"name": "weather"}') == [("weather", "{}")]


def test_arguments_that_are_not_quite_json_reach_the_client_whole() -> None:
    """It can say what is wrong with them, or mend them; brackets and double quotes show where they end."""
    for arguments in ("{'city': None}", '{"a": 1,}', '{"code": "one\ntwo"}', "{a: [1 2]}"):
        assert calls(HERMES, f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>') == [
            ("weather", arguments)
        ]


def test_a_call_that_goes_wrong_keeps_what_it_had_and_the_rest_is_text() -> None:
    found = answer(HERMES, '<tool_call>{"name": "weather", "arguments": {"a": [1}}</tool_call> Sorry.')
    assert [call.arguments for call in found.calls] == ['{"a": [1']
    assert found.text == "}}</tool_call> Sorry."


def test_a_missing_bracket_or_closing_tag_costs_nothing() -> None:
    first = '<tool_call>\n{"name": "weather", "arguments": {"a": 1}\n</tool_call>'
    second = '<tool_call>\n{"name": "search", "arguments": {"b": 2}}\n'
    found = answer(HERMES, f"{first}\n{second}{first}\nDone.")
    assert [(call.name, call.arguments) for call in found.calls] == [
        ("weather", '{"a": 1}'),
        ("search", '{"b": 2}'),
        ("weather", '{"a": 1}'),
    ]
    assert found.text == "Done."


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_where_only_one_call_may_be_the_end_of_the_first_ends_the_answer(form: ToolForm) -> None:
    call = form.write("weather", {"a": 1})
    text = form.between.join([call, call])
    assert len(calls(form, text)) == 2
    events, has_ended = read(form, text, parallel=False)
    assert events == [CallBegan(0, "call-0", "weather"), ArgumentsDelta(0, '{"a": 1}')]
    assert has_ended

    parser = form.read(ToolUse(tools=TOOLS, mode="auto", parallel=False), lambda: "id")
    end = call.rindex("}") + 1
    parser.push(call[: end - 1])
    assert not parser.has_ended
    parser.push(call[end - 1 : end])
    assert parser.has_ended, "known with the last bracket, so that no further token need be computed"
    assert parser.push(" more text") == []


@example("<|python_tag|>")
@given(st.sampled_from(["", " ", "<|python_tag|> words", "<|python_tag|>{}", "<|", "<|python_tag|>;"]))
def test_the_tag_alone_is_text(text: str) -> None:
    assert answer(LLAMA, text) == Answer(text=text)

"""One renderer: the model's own template where it knows what is asked, help in plain text where it does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from chat.templates import ALTERNATING, LLAMA, QWEN
from kvikk.chat import HERMES, Conversation, ToolUse, check_template, form_for, render
from kvikk.chat import LLAMA as LLAMA_FORM
from kvikk.errors import ConfigError, InvalidRequest

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USE = ToolUse.read([WEATHER])
QUESTION = {"role": "user", "content": "Weather in Oslo?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Oslo"}'}}
TURN = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Rain"}


def written(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, template: str | None = None, **options: Any
) -> str:
    return render(Conversation(messages=messages, **options), tokenizer, template).text


def test_the_prompt_is_what_transformers_makes_of_the_messages(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": "Rain 🙂"},
        QUESTION,
    ]
    found = render(Conversation(messages=messages), tokenizer)
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert found.token_ids == encoded["input_ids"]
    assert found.text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    without = render(Conversation(messages=messages, add_generation_prompt=False), tokenizer).text
    assert found.text == without + "<|im_start|>assistant\n"


def test_another_template_may_be_given(tokenizer: PreTrainedTokenizerBase) -> None:
    assert written([QUESTION], tokenizer, LLAMA) == f"{tokenizer.bos_token}[user]Weather in Oslo?[eot][assistant]"


def test_a_developer_is_the_system_and_parts_are_lines(tokenizer: PreTrainedTokenizerBase) -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    text = written([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}], tokenizer)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne\nTwo<|im_end|>\n")


def test_the_last_message_may_be_left_open(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "It is going to"}]
    text = written(messages, tokenizer, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt is going to")


@pytest.mark.parametrize(
    ("messages", "add_generation_prompt"),
    [
        ([QUESTION], True),
        ([{"role": "user", "content": ""}], False),
        (TURN, False),
    ],
)
def test_only_a_message_that_ends_in_text_is_left_open(
    messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message") as caught:
        Conversation(messages=messages, add_generation_prompt=add_generation_prompt, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_variables_of_the_template_can_be_set(tokenizer: PreTrainedTokenizerBase) -> None:
    thinking = written([QUESTION], tokenizer, QWEN)
    text = written([QUESTION], tokenizer, QWEN, template_kwargs={"enable_thinking": False})
    assert text == thinking + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize", "self", "bos_token"],
)
def test_what_the_server_sets_cannot_be_set_by_a_client(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        written([QUESTION], tokenizer, LLAMA, template_kwargs={name: "{{ 1 }}"})
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "values", [{"enable_thinkin": True}, {"enable_thinking": float("nan")}, {"enable_thinking": "\ud800"}, []]
)
def test_variables_that_would_do_nothing_or_cannot_be_written_are_refused(
    tokenizer: PreTrainedTokenizerBase, values: Any
) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs") as caught:
        written([QUESTION], tokenizer, QWEN, template_kwargs=values)
    assert caught.value.param == "chat_template_kwargs"


def test_what_the_template_refuses_is_the_clients_fault_and_says_why(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        written([QUESTION, QUESTION], tokenizer, ALTERNATING)
    assert caught.value.param == "messages"
    with pytest.raises(InvalidRequest) as caught:
        written([QUESTION], tokenizer, "{{ raise_exception('no! ' * 999) }}")
    assert len(str(caught.value)) < 400


def test_templates_run_in_a_sandbox(tokenizer: PreTrainedTokenizerBase) -> None:
    for template in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% include 'x' %}",
    ):
        with pytest.raises(InvalidRequest):
            written([QUESTION], tokenizer, template)
    harmless = written([{"role": "user", "content": "{{ 7 * 6 }}"}], tokenizer)
    assert "{{ 7 * 6 }}" in harmless, "messages are not templates"


def test_without_a_template_there_is_no_chat(tokenizer: PreTrainedTokenizerBase) -> None:
    own, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(InvalidRequest, match="no chat template"):
            written([QUESTION], tokenizer)
        assert written([QUESTION], tokenizer, LLAMA)
    finally:
        tokenizer.chat_template = own


def test_a_template_that_is_no_template_is_found_at_the_start(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        check_template("{{ messages }}\n{% for %}", tokenizer)
    check_template("{{ raise_exception('it wants a system message') }}", tokenizer)


# Tools


def test_a_template_that_knows_tools_writes_them_itself(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [*TURN, RESULT]
    text = written(messages, tokenizer, QWEN, tools=USE.tools)
    plain = [
        QUESTION,
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
        RESULT,
    ]
    assert text == tokenizer.apply_chat_template(
        plain, tools=[WEATHER], chat_template=QWEN, tokenize=False, add_generation_prompt=True
    )
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    text = written(messages, tokenizer, LLAMA, tools=USE.tools)
    assert '[assistant]{"name": "weather", "parameters": {"city": "Oslo"}}[eot][ipython]"Rain"[eot]' in text


def test_a_template_that_knows_no_tools_gets_them_in_the_system_message(tokenizer: PreTrainedTokenizerBase) -> None:
    text = written([{"role": "system", "content": "Be brief."}, QUESTION], tokenizer, tools=USE.tools)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert text.count("<|im_start|>system") == 1
    assert json.dumps(WEATHER) in text
    assert '<tool_call>\n{"name": "<function name>", "arguments": {' in text
    assert written([QUESTION], tokenizer, tools=USE.tools).startswith("<|im_start|>system\n# Tools\n")


def test_a_template_that_knows_no_calls_gets_them_as_text(tokenizer: PreTrainedTokenizerBase) -> None:
    both = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]}
    text = written([QUESTION, both, RESULT, RESULT, QUESTION], tokenizer)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    result = "<tool_response>\nRain\n</tool_response>"
    assert text.endswith(
        f"<|im_start|>assistant\nLet me see.\n{call}\n{call}<|im_end|>\n"
        f"<|im_start|>user\n{result}\n{result}<|im_end|>\n"
        "<|im_start|>user\nWeather in Oslo?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_history_shows_calls_also_where_no_tools_are_given(tokenizer: PreTrainedTokenizerBase) -> None:
    for template in (None, QWEN, LLAMA, "{% for message in messages %}{{ message.content }}{% endfor %}"):
        assert '"name": "weather"' in written([*TURN, RESULT], tokenizer, template)


def test_results_as_text_keep_roles_in_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    both = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    text = written([QUESTION, both, RESULT, RESULT], tokenizer, ALTERNATING)
    assert text.count("user: ") == 2


def test_rendering_leaves_the_messages_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    conversation = Conversation(messages=[*TURN, RESULT, RESULT], tools=USE.tools)
    assert render(conversation, tokenizer) == render(conversation, tokenizer)


# Forms


def test_the_form_is_the_one_that_the_template_shows(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    assert form_for("auto", tokenizer) == HERMES, "its template knows no tools: the form is ours to choose"
    assert form_for("auto", tokenizer, QWEN) == HERMES
    assert form_for("llama", tokenizer) == LLAMA_FORM
    assert not caplog.records
    assert form_for("auto", tokenizer, "{{ tools }}") == HERMES
    assert "not known" in caplog.text
    with pytest.raises(ConfigError, match=r"mistral.*auto, hermes, llama"):
        form_for("mistral", tokenizer)


def test_llamas_form_is_known_by_its_token(with_marks: PreTrainedTokenizerBase) -> None:
    found = form_for("auto", with_marks, LLAMA)
    assert found.name == "llama"
    assert found.tokens == {"<|python_tag|>"}
    assert found.keeps_special_tokens
    assert form_for("auto", with_marks, QWEN).name == "hermes"
    assert form_for("auto", with_marks).name == "hermes", "a template without tools"


def test_marks_that_are_common_tokens_need_no_special_decoding(with_marks: PreTrainedTokenizerBase) -> None:
    found = form_for("hermes", with_marks)
    assert found.tokens == {"<tool_call>", "</tool_call>"}
    assert not found.keeps_special_tokens


def test_the_fallback_speaks_the_form_that_the_parser_reads(tokenizer: PreTrainedTokenizerBase) -> None:
    text = render(Conversation(messages=[*TURN, RESULT], tools=USE.tools), tokenizer, form=LLAMA_FORM).text
    assert '{"name": "<function name>", "parameters": {' in text
    assert '\n{"name": "weather", "parameters": {"city": "Oslo"}}<|im_end|>' in text
    assert "<tool_call>" not in text

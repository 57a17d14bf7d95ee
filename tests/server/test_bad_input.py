"""Bad input: each a 4xx in OpenAI's form that names the field, the value and the limit; the others run on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from server.running import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of an answer, in OpenAI's form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (COMPLETIONS, {}, "prompt", "missing"),
        (COMPLETIONS, {"prompt": ""}, None, "empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "at least 1"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "string"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens", "-1"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, "max_tokens", '"5"'),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 1.5}, "max_tokens", "1.5"),
        (COMPLETIONS, {"prompt": "x", "temperature": -0.5}, "temperature", "-0.5"),
        (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p", "0"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, "n", "0"),
        (COMPLETIONS, {"prompt": "x", "n": 17}, "n", "--max-choices 16"),
        (COMPLETIONS, {"prompt": "x", "n": 1000}, "n", "128"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 1000}, "logprobs", "20"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 1000}, "stop", "64"),
        (COMPLETIONS, {"prompt": "x", "stop": ""}, "stop", "1 character"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"12": 101}}, "logit_bias", "101"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"twelve": 1}}, "logit_bias", "twelve"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"99999999": 1}}, "logit_bias", "99999999"),
        (COMPLETIONS, {"prompt": "x", "presence_penalty": 3}, "presence_penalty", "3"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
        (COMPLETIONS, {"prompt": "x", "temprature": 1}, "temprature", "did you mean 'temperature'"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix", "filling in the middle"),
        (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of", "2"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "9"),
        (COMPLETIONS, {"prompt": [10**6]}, None, "1000000"),
        (COMPLETIONS, {"prompt": "x", "guided_regex": "("}, None, "regex"),
        (COMPLETIONS, {"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "exclude"),
        (CHAT, {"messages": []}, "messages", "at least 1"),
        (CHAT, {"messages": "Hi"}, "messages", "list"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "may lack it"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "text",
        ),
        (CHAT, {"messages": USER, "functions": []}, "functions", "use 'tools'"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs", "logprobs"),
        (CHAT, {"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "4"),
        (
            CHAT,
            {"messages": USER, "tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "a b",
        ),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice", "tools"),
        (CHAT, {"messages": USER, "response_format": {"type": "yaml"}}, "response_format.type", "yaml"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format", "schema"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_limit(
    server: Running, path: str, body: dict[str, Any], param: str | None, said: str
) -> None:
    error = refused(server.post(path, json=body))
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]
    if param is not None:
        assert error["param"] == param
        assert param.split(".")[-1].split("[")[0] in error["message"]


def test_what_a_client_sent_is_not_quoted_at_length(server: Running) -> None:
    long = "x" * 100_000
    bodies: list[dict[str, Any]] = [
        {"kv_cache": {"policy": long, "budget": "50%"}},
        {"kv_cache": {"policy": "snapkv", "budget": "50%", "policy_options": {long: 1}}},
        {"kv_cache": {long: 1}},
        {"structured_outputs": {"regex": long + "("}},
        {long: 1},
        {"model": long},
    ]
    for body in bodies:
        error = refused(server.post(COMPLETIONS, json={"prompt": "x"} | body), 404 if "model" in body else 400)
        assert len(error["message"]) < 2000, body.keys()
        assert len(error["param"] or "") < 200
    error = refused(server.post(COMPLETIONS, json={"prompt": "x"} | bodies[1]))
    assert error["message"].startswith("kv_cache.policy_options: policy 'snapkv' has no option 'xxx")
    assert error["message"].endswith("known are: query_window, kernel, pooling"), "the way out is there"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(server: Running, number: str) -> None:
    body = f'{{"prompt": "x", "temperature": {number}}}'
    error = refused(server.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"}))
    assert "temperature" in error["message"] or "JSON" in error["message"]


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"nonsense", b"[1, 2]", b'"text"', b"\xff\xfe\xfa", b'{"prompt": "\xc3("}', b"{" * 100_000],
)
def test_a_body_that_is_no_json_object_is_told_so(server: Running, content: bytes) -> None:
    error = refused(server.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"}))
    assert "JSON" in error["message"]


def test_a_lone_surrogate_is_no_text(server: Running) -> None:
    for path, body in (
        (COMPLETIONS, '{"prompt": "\\ud800"}'),
        (CHAT, '{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        (COMPLETIONS, '{"prompt": "x", "stop": "\\ud800"}'),
    ):
        error = refused(server.post(path, content=body, headers={"Content-Type": "application/json"}))
        assert "nicode" in error["message"]


def test_a_body_of_another_type_is_refused(server: Running) -> None:
    error = refused(server.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"}))
    assert "application/json" in error["message"]


def test_a_body_of_10_mb_is_refused_whether_it_says_its_length_or_not(server: Running) -> None:
    body = json.dumps({"prompt": "x" * 10_000_000}).encode()
    headers = {"Content-Type": "application/json"}

    def pieces() -> Any:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    for content in (body, pieces()):
        error = refused(server.post(COMPLETIONS, content=content, headers=headers), 413)
        assert "8,388,608" in error["message"]
        assert "--max-body-bytes" in error["message"]


def test_an_unknown_model_is_404_with_the_ones_there_are(server: Running) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        error = refused(server.post(path, json=body | {"model": "gpt-5"}), 404)
        assert "'gpt-5'" in error["message"]
        assert "'smollm2'" in error["message"]
        assert error["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("gpt-5")


def test_a_path_or_method_that_is_not_there_is_told_in_the_same_form(server: Running) -> None:
    assert "/v1/embeddings" in refused(server.post("/v1/embeddings", json={}), 404)["message"]
    assert "PUT" in refused(httpx.put(server.url + COMPLETIONS, json={}), 405)["message"]


def test_a_prompt_above_the_memory_is_refused_with_the_numbers_while_others_run_on(server: Running) -> None:
    chunks = server.client().completions.create(
        model="smollm2", prompt="Once", max_tokens=60, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(chunks)
    error = refused(server.post(COMPLETIONS, json={"prompt": "word " * 5000}))
    assert error["code"] == "context_length_exceeded"
    assert "5,0" in error["message"]
    assert "1,023" in error["message"]
    assert len(list(chunks)) > 30

"""What is not a completion: models, tokens, cache, health."""

from __future__ import annotations

import openai
import pytest

from kvikk import __version__
from server.running import Running


def test_the_model_is_listed_and_can_be_asked_for(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "smollm2"
    assert model.model_extra["max_model_len"] == 1024
    assert client.models.retrieve("smollm2") == model


def test_health_and_version_answer(server: Running) -> None:
    assert server.get("/health") == {"status": "ok"}
    assert server.get("/version") == {"version": __version__}


def test_tokens_become_the_text_that_they_came_from(server: Running) -> None:
    text = "Ægir 🦑 한국어 नमस्ते é"
    found = server.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 1024
    assert server.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}


def test_one_of_prompt_and_messages_is_tokenised(server: Running) -> None:
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}):
        answer = server.post("/tokenize", json=body)
        assert answer.status_code == 400
        assert "one of prompt and messages" in answer.json()["error"]["message"]
    answer = server.post("/detokenize", json={"tokens": [10**8]})
    assert answer.status_code == 400
    assert "100000000" in answer.json()["error"]["message"]


def test_the_cache_says_what_it_holds_and_can_be_reset(server: Running, client: openai.OpenAI) -> None:
    prompt = "A prompt of its own for the cache to remember, long enough to fill blocks. " * 4
    client.completions.create(model="smollm2", prompt=prompt, max_tokens=1)
    state = server.wait_until_idle()
    assert state["free_blocks"] + state["held_blocks"] + state["cached_blocks"] == state["total_blocks"]
    assert state["cached_blocks"] >= 4
    forgotten = server.post("/v1/cache/reset").json()["forgotten_blocks"]
    assert forgotten == state["cached_blocks"]
    after = server.get("/v1/cache")
    assert after["cached_blocks"] == 0
    assert after["free_blocks"] == after["total_blocks"]
    again = client.completions.create(model="smollm2", prompt=prompt, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens == 0


def test_a_pinned_prefix_outlives_other_traffic_until_it_is_let_go(server: Running, client: openai.OpenAI) -> None:
    prompt = "This prefix is pinned and must not be forgotten, whatever else is asked meanwhile. " * 4
    client.completions.create(model="smollm2", prompt=prompt, max_tokens=1)
    pin = server.post("/v1/cache/pins", json={"name": "kept", "prompt": prompt}).json()
    assert pin["blocks"] >= 4
    server.post("/v1/cache/reset")
    for number in range(8):  # more than the memory holds
        client.completions.create(model="smollm2", prompt=f"{number} filler " * 230, max_tokens=1)
    state = server.get("/v1/cache")
    assert state["pins"] == [pin]
    assert state["pinned_blocks"] == state["held_blocks"] == pin["blocks"]
    assert server.post("/v1/cache/pins", json={"name": "other"}).status_code == 400
    assert server.client()._client.delete(server.url + "/v1/cache/pins/kept").json() == pin
    assert server.wait_until_idle()["held_blocks"] == 0
    assert server.client()._client.delete(server.url + "/v1/cache/pins/kept").status_code == 404


def test_the_openapi_page_lists_what_there_is(server: Running) -> None:
    paths = server.get("/openapi.json")["paths"]
    assert {
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        "/health",
        "/version",
        "/metrics",
        "/v1/cache",
    } <= paths.keys()
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].endswith("/CompletionBody")


@pytest.mark.parametrize("path", ["/../etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd", "/page/..%2fpage.html"])
def test_no_path_leads_to_the_file_system(server: Running, path: str) -> None:
    import http.client

    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.status == 404
    assert b"root:" not in answer.read()

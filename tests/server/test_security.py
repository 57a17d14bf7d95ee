"""Keys, salts, and web pages of others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest
from starlette.responses import PlainTextResponse

from kvikk.server.config import HttpConfig
from kvikk.server.security import Guard, read_keys
from server.running import SMALL, Running, serving

ALICE, BOB, ADMIN = "alice-has-a-key", "bob-has-another", "the-operators-key"
PROMPT = "A secret that only one of two tenants has asked about, in several blocks of tokens. " * 4


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("locked")
    keys = folder / "keys"
    keys.write_text(f"{BOB}\n\n")
    arguments = ("--api-key-file", str(keys), "--allowed-origins", "https://app.example")
    environment = {"KVIKK_API_KEY": ALICE, "KVIKK_ADMIN_API_KEY": ADMIN}
    with serving(folder, "smollm2", *SMALL, *arguments, environment=environment) as running:
        yield running


@pytest.mark.parametrize("key", ["wrong-key-entirely", "", ALICE[:-1], ALICE + "x"])
def test_a_wrong_key_is_refused_and_told_how_to_send_one(locked: Running, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = locked.post(path, json={"prompt": "x"}, headers=headers)
        assert answer.status_code == 401
        assert "Authorization: Bearer" in answer.json()["error"]["message"]
        assert answer.headers["www-authenticate"] == "Bearer"
    with pytest.raises(openai.AuthenticationError):
        locked.client(api_key=key or "none").models.list()


def test_keys_from_the_environment_and_from_a_file_open_the_api(locked: Running) -> None:
    for key in (ALICE, BOB, ADMIN):
        assert locked.client(api_key=key).models.list().data


def test_health_and_metrics_need_no_key(locked: Running) -> None:
    for path in ("/health", "/version", "/metrics"):
        assert locked.http.get(locked.url + path).status_code == 200


def test_a_tenant_cannot_find_out_what_another_has_asked(locked: Running) -> None:
    def cached(key: str) -> int:
        done = locked.client(api_key=key).completions.create(model="smollm2", prompt=PROMPT, max_tokens=1)
        return int(done.usage.prompt_tokens_details.cached_tokens)

    assert cached(ALICE) == 0
    assert cached(ALICE) > 0
    assert cached(BOB) == 0
    assert cached(BOB) > 0


def test_a_salt_keeps_requests_of_one_key_apart(locked: Running) -> None:
    def cached(salt: str | None) -> int:
        done = locked.client(api_key=ALICE).completions.create(
            model="smollm2", prompt="salted " + PROMPT, max_tokens=1, extra_body={"cache_salt": salt}
        )
        return int(done.usage.prompt_tokens_details.cached_tokens)

    assert [cached("a"), cached("b"), cached(None)] == [0, 0, 0]
    assert min(cached("a"), cached("b"), cached(None)) > 0


def test_only_the_operator_sees_the_cache_and_the_live_feed(locked: Running) -> None:
    for path in ("/v1/cache", "/live"):
        assert locked.http.get(locked.url + path, headers={"Authorization": f"Bearer {ALICE}"}).status_code == 401
    headers = {"Authorization": f"Bearer {ADMIN}"}
    assert locked.http.get(locked.url + "/v1/cache", headers=headers).json()["total_blocks"] > 0
    assert locked.http.post(locked.url + "/v1/cache/reset", headers=headers).status_code == 200
    with locked.http.stream("GET", locked.url + "/live", headers=headers) as feed:
        assert feed.status_code == 200
        assert next(feed.iter_lines()) is not None


def test_with_client_keys_and_no_admin_key_the_operators_side_is_closed() -> None:
    guard = Guard(PlainTextResponse("open"), read_keys(HttpConfig(api_key=ALICE)))

    async def ask(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url="http://server") as client:
            return await client.get(path, headers={"Authorization": f"Bearer {ALICE}"})

    assert asyncio.run(ask("/v1/models")).text == "open"
    answer = asyncio.run(ask("/v1/cache"))
    assert answer.status_code == 403
    assert "--admin-api-key" in answer.json()["error"]["message"]


def test_web_pages_may_ask_only_from_allowed_origins(locked: Running, server: Running) -> None:
    def preflight(running: Running, origin: str) -> httpx.Response:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        return running.http.options(running.url + "/v1/completions", headers=headers)

    assert preflight(locked, "https://app.example").headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in preflight(locked, "https://evil.example").headers
    assert "access-control-allow-origin" not in preflight(server, "https://app.example").headers


def test_keys_are_not_in_the_log(locked: Running) -> None:
    assert not any(key in locked.said() for key in (ALICE, BOB, ADMIN))

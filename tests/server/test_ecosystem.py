"""Clients that others wrote, and a fuzzer that reads our own OpenAPI."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.running import Running, serving
from server.test_chat import WEATHER


def test_litellm_completes_and_streams(server: Running) -> None:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network for prices
    litellm = pytest.importorskip("litellm")
    asked = {
        "model": "openai/smollm2",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 12,
        "temperature": 0,
    }
    plain = litellm.completion(**asked)
    assert plain.usage.completion_tokens == 12
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True))
    assert streamed == plain.choices[0].message.content


def test_langchain_chats_streams_calls_tools_and_structures(server: Running) -> None:
    openai_chat = pytest.importorskip("langchain_openai").ChatOpenAI
    model = openai_chat(model="smollm2", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=200)
    plain = model.invoke("Name three colours.")
    assert plain.content == "".join(str(chunk.content) for chunk in model.stream("Name three colours."))
    assert plain.usage_metadata["input_token_details"]["cache_read"] >= 0
    called = model.bind_tools([WEATHER], tool_choice="get_weather").invoke("Weather in Oslo?")
    assert called.tool_calls[0]["name"] == "get_weather"
    assert called.tool_calls[0]["args"].keys() == {"city", "unit"}
    schema = WEATHER["function"]["parameters"] | {"title": "Place"}
    structured = model.with_structured_output(schema, method="json_schema").invoke("Weather in Oslo?")
    assert structured.keys() == {"city", "unit"}


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose texts are short, as a fuzzer asks for the longest."""
    arguments = ("--kv-memory", "64MiB", "--max-model-len", "64")
    with serving(tmp_path_factory.mktemp("brief"), "smollm2", *arguments) as running:
        yield running


def test_the_fuzzer_finds_no_fault_in_any_endpoint(brief: Running, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("st")),
            "run",
            f"{brief.url}/openapi.json",
            "--url",
            brief.url,
            "--checks",
            "not_a_server_error,content_type_conformance,response_schema_conformance,status_code_conformance",
            "--max-examples",
            os.environ.get("KVIKK_FUZZ_EXAMPLES", "8"),
            "--exclude-path-regex",
            "^/live$",
            "--seed",
            "1",
            "--request-timeout",
            "60",
            "--suppress-health-check",
            "all",
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert brief.get("/health") == {"status": "ok"}
    assert brief.wait_until_idle()["held_blocks"] == 0

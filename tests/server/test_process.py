"""The server's life: starting, going down, losing its engine, and what a full queue says."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from kvikk.cli import main
from server.running import SMALL, Running, free_port, serving

LONG = {"prompt": "Once upon a time", "max_tokens": 800, "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_an_engine_that_is_killed_in_mid_stream_gives_every_client_an_error_and_ends_the_server(tmp_path: Path) -> None:
    async def watch(client: openai.AsyncOpenAI, seen: asyncio.Event) -> None:
        stream = await client.completions.create(model="smollm2", stream=True, **LONG)

        async def read() -> None:
            async for _ in stream:
                seen.set()

        with pytest.raises(openai.APIError, match="engine is dead"):
            await read()

    async def story(running: Running) -> None:
        client = running.async_client()
        seen = [asyncio.Event() for _ in range(4)]
        watchers = [asyncio.create_task(watch(client, event)) for event in seen]
        await asyncio.gather(*(event.wait() for event in seen))
        plain = asyncio.create_task(client.completions.create(model="smollm2", **LONG))
        await asyncio.sleep(0.3)
        running.engine.kill()
        async with asyncio.timeout(60):
            await asyncio.gather(*watchers)
            with pytest.raises(openai.APIStatusError, match="ended by signal 9") as failed:
                await plain
        assert failed.value.status_code == 503
        answer = running.http.get(f"{running.url}/health")
        assert answer.status_code == 503
        assert "the engine is dead" in answer.json()["error"]["message"]

    with serving(tmp_path, "smollm2", *SMALL) as running:
        asyncio.run(story(running))
        assert running.process.wait(60) == 1
        assert "the engine process was ended by signal 9" in running.said()


def test_sigterm_lets_what_runs_finish_and_then_nothing_is_left_of_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, "smollm2", *SMALL) as running:
        engine, pids = running.engine, [running.process.pid, running.engine.pid]
        chunks = running.client().completions.create(model="smollm2", stream=True, **(LONG | {"max_tokens": 20}))
        next(chunks)
        running.process.send_signal(signal.SIGTERM)
        rest = list(chunks)
        assert rest[-1].choices[0].finish_reason == "length"
        assert running.process.wait(60) == 0
        engine.wait(60)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_what_is_not_done_when_the_drain_ends_gets_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, "smollm2", *SMALL, "--drain-timeout-s", "0.5") as running:
        chunks = running.client().completions.create(model="smollm2", stream=True, **LONG)
        next(chunks)
        running.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match=r"--drain-timeout-s 0\.5"):
            list(chunks)
        assert running.process.wait(60) == 0


def test_an_engine_ends_when_its_server_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, "smollm2", *SMALL) as running:
        engine = running.engine
        running.process.kill()
        engine.wait(60)


def test_a_full_queue_answers_503_with_retry_after_and_a_late_request_504(tmp_path: Path) -> None:
    limits = ("--max-num-seqs", "1", "--max-waiting-requests", "2", "--request-timeout-s", "4")
    with serving(tmp_path, "smollm2", *SMALL, *limits) as running:
        answers: list[httpx.Response] = []

        def ask() -> None:
            body = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True}
            answers.append(running.post("/v1/completions", json=body))

        askers = [threading.Thread(target=ask) for _ in range(6)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        full = [answer for answer in answers if answer.status_code == 503]
        assert len(full) == 3  # one runs, two wait
        for answer in full:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
            assert "--max-waiting-requests 2" in answer.json()["error"]["message"]
        late = [answer for answer in answers if answer.status_code == 504]
        assert len(late) == 3
        assert "--request-timeout-s" in late[0].json()["error"]["message"]
        assert running.wait_until_idle()["held_blocks"] == 0
        assert running.metric("admission_rejections_total", reason="queue_full") == 3
        assert running.metric("request_aborts_total", cause="timeout") == 3


def test_a_port_in_use_is_told_at_once(server: Running) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "kvikk", "serve", "smollm2", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert f"--port {port}" in done.stderr
    assert "choose another port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-model"], "'no-such-model' is no folder"),
        (["smollm2", "--kv-memory", "100KiB"], "--kv-memory"),
        (["smollm2", "--max-model-len", "999999"], "999,999"),
        (["smollm2", "--api-key", "short"], "5 characters"),
        (["smollm2", "--api-key-file", "/nowhere/keys"], "/nowhere/keys cannot be read"),
        (["smollm2", "--chat-template", "/nowhere/t.jinja"], "/nowhere/t.jinja cannot be read"),
        (["smollm2", "--tool-call-parser", "morse"], "morse"),
        (["smollm2", "--max-body-bytes", "10"], "--max-body-bytes 10"),
        (["smollm2", "--model", "other"], "two models"),
    ],
)
def test_a_server_that_cannot_start_says_why_in_one_line(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported all that a server needs; an engine has its own, and the same stderr."""
    assert main(["serve", *arguments, "--port", str(free_port())]) in (1, 2)
    written = capfd.readouterr().err
    assert said in written
    assert written.count("kvikk: error:") == 1
    assert "Traceback" not in written

"""`kvikk bench serve` against a scripted server: the report, the files, and what goes wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.fake_server import CUT, DONE, Body, FakeServer, Script, answer, event, piece, running, usage
from kvikk.cli import main

WORDS = [" Oslo", " is", " 한", "국", " fine"]
SMALL = ("--num-prompts", "6", "--random-input-len", "9", "--random-output-len", "5", "--disable-tqdm")


def well(body: Body) -> Script:
    """The right answer, and always the same."""
    return Script(answer(WORDS, chat="messages" in body))


def bench(server: FakeServer, *arguments: str, code: int = 0) -> None:
    port = ("--port", str(server.port))
    assert main(["bench", "serve", *port, *SMALL, *arguments]) == code


def figure(out: str, name: str) -> str:
    found = re.search(rf"^{re.escape(name)}\s+(.*)$", out, flags=re.MULTILINE)
    assert found, f"{name} is not in the report"
    return found[1].strip()


def test_the_report_has_the_lines_of_vllm_bench_serve_in_its_order(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(well)) as server:
        bench(
            server,
            *("--max-concurrency", "2", "--request-rate", "200", "--goodput", "ttft:60000", "e2el:60000"),
            *("--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99.9"),
        )
    out = capsys.readouterr().out
    names = [line.partition(":")[0].strip("- =") for line in out.splitlines()]
    latencies = [
        line
        for name, heading in (
            ("TTFT", "Time to First Token"),
            ("TPOT", "Time per Output Token (excl. 1st token)"),
            ("ITL", "Inter-token Latency"),
            ("E2EL", "End-to-end Latency"),
        )
        for line in (heading, f"Mean {name} (ms)", f"Median {name} (ms)", f"P50 {name} (ms)", f"P99.9 {name} (ms)")
    ]
    assert names[: names.index("Measurement")] == [
        "Serving Benchmark Result",
        "Successful requests",
        "Failed requests",
        "Maximum request concurrency",
        "Request rate configured (RPS)",
        "Benchmark duration (s)",
        "Total input tokens",
        "Total generated tokens",
        "Request throughput (req/s)",
        "Request goodput (req/s)",
        "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)",
        "Peak concurrent requests",
        "Total token throughput (tok/s)",
        *latencies,
    ]
    assert out.splitlines()[-1] == "=" * 50


def test_tokens_are_the_servers_where_it_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(well)) as server:
        bench(server)
    out = capsys.readouterr().out
    assert figure(out, "Successful requests:") == "6"
    assert (figure(out, "Total input tokens:"), figure(out, "Total generated tokens:")) == ("42", "30")
    assert figure(out, "Requests counted by the server:") == "6 of 6"
    assert figure(out, "Tokens per chunk:") == "1.00"
    assert figure(out, "Answers not of the length asked for:") == "0"
    assert "Cached" not in out


def test_tokens_are_the_tokenizers_where_the_server_does_not_count(
    capsys: pytest.CaptureFixture[str], words: Any
) -> None:
    with running(FakeServer(lambda body: Script([piece(" Oslo is"), piece(" big", "stop"), DONE]))) as server:
        bench(server)
    out = capsys.readouterr().out
    assert (figure(out, "Total input tokens:"), figure(out, "Total generated tokens:")) == ("54", "18")
    assert figure(out, "Requests counted by the server:") == "0 of 6"
    assert figure(out, "Tokens per chunk:") == "1.50"
    assert figure(out, "Answers not of the length asked for:") == "6"


def test_cached_prompt_tokens_are_shown_from_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(lambda body: Script(answer(WORDS, read=8, cached=6)))) as server:
        bench(server)
    out = capsys.readouterr().out
    assert figure(out, "Cached prompt tokens:") == "36"
    assert figure(out, "Cached share of input tokens (%):") == "75.00"
    assert figure(out, "Counted by:") == "usage of each answer"


def test_cached_prompt_tokens_are_shown_from_the_servers_counters(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [
        f'# TYPE vllm:prefix_cache_hits counter\nvllm:prefix_cache_hits_total{{engine="{engine}"}} {hits}\n'
        for engine, hits in (("0", 100.0), ("0", 121.0))
    ]
    with running(FakeServer(well, metrics=pages)) as server:
        bench(server)
    out = capsys.readouterr().out
    assert figure(out, "Cached prompt tokens:") == "21"
    assert figure(out, "Counted by:") == "the server's counters"


def test_each_request_carries_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    with running(FakeServer(well)) as server:
        bench(
            server, "--top-p", "0.5", "--extra-body", '{"user": "me", "temperature": 0.7}', "--header", "X-A=b", "C=d"
        )
    body, headers = server.bodies[0], server.headers[0]
    assert body.pop("prompt")
    assert body == {
        "model": "smollm2",
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_p": 0.5,
        "ignore_eos": True,
        "user": "me",
    }
    assert (headers["Authorization"], headers["X-A"], headers["C"]) == ("Bearer from-the-environment", "b", "d")


def test_a_key_of_the_flag_wins_and_what_was_not_asked_for_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    with running(FakeServer(well)) as server:
        bench(server, "--api-key", "typed", "--no-ignore-eos", "--top-k", "0")
    assert server.headers[0]["Authorization"] == "Bearer typed"
    assert (server.bodies[0]["temperature"], server.bodies[0]["top_k"]) == (0.0, 0)
    assert "ignore_eos" not in server.bodies[0]


def test_chat_sends_the_prompt_as_the_users_message(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(well)) as server:
        bench(server, "--backend", "openai-chat")
    (message,) = server.bodies[0]["messages"]
    assert message["role"] == "user"
    assert server.bodies[0]["max_completion_tokens"] == 5
    assert figure(capsys.readouterr().out, "Total generated tokens:") == "30"


def test_no_more_requests_reach_the_server_at_once_than_allowed() -> None:
    with running(FakeServer(lambda body: Script([0.02, *answer(WORDS)]))) as server:
        bench(server, "--max-concurrency", "2")
    assert server.most_underway == 2
    assert len(server.bodies) == 6


def test_warm_ups_are_sent_before_and_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(well)) as server:
        bench(server, "--num-warmups", "3")
    assert len(server.bodies) == 9
    assert figure(capsys.readouterr().out, "Successful requests:") == "6"
    assert not {body["prompt"] for body in server.bodies[:3]} & {body["prompt"] for body in server.bodies[3:]}


def test_characters_cut_in_the_middle_arrive_whole(tmp_path: Path) -> None:
    def bytewise(body: Body) -> Script:
        stream = b"".join(answer(WORDS)).decode("unicode_escape", "surrogatepass")
        raw = stream.encode("utf-16", "surrogatepass").decode("utf-16").encode()
        return Script([raw[index : index + 3] for index in range(0, len(raw), 3)])

    with running(FakeServer(bytewise)) as server:
        bench(server, "--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json")
    assert set(json.loads((tmp_path / "r.json").read_text())["generated_texts"]) == {"".join(WORDS)}


FAILURES = {
    "HTTP 503: no room": Script([b'{"error": {"message": "no room"}}'], status=503, content_type="application/json"),
    "HTTP 500: oh": Script([b"oh"], status=500, content_type="text/plain"),
    "not text/event-stream": Script([b'{"choices": []}'], content_type="application/json"),
    "broke off: out of memory": Script([piece(" a"), event(error={"message": "out of memory"})]),
    "in the middle of the text": Script([piece(" a")]),
    "without [DONE], though": Script([piece(" a", "length"), usage(1, 1)]),
    "an event is no JSON": Script([b"data: {oops\n\n"]),
    "Response payload is not completed": Script([piece(" a"), CUT]),
}


@pytest.mark.parametrize("said", FAILURES)
def test_a_request_that_fails_is_counted_named_and_left_out_of_the_figures(
    capsys: pytest.CaptureFixture[str], said: str
) -> None:
    turns = iter(range(1000))
    with running(FakeServer(lambda body: FAILURES[said] if next(turns) % 3 == 0 else well(body))) as server:
        bench(server)
    captured = capsys.readouterr()
    assert (figure(captured.out, "Successful requests:"), figure(captured.out, "Failed requests:")) == ("4", "2")
    assert figure(captured.out, "Total generated tokens:") == "20"
    assert re.search(rf"2 failed: .*{re.escape(said)}", captured.err)


def test_a_server_without_the_mark_of_the_end_can_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(lambda body: Script(answer(WORDS)[:-1]))) as server:
        bench(server, "--allow-missing-done")
    assert figure(capsys.readouterr().out, "Failed requests:") == "0"


def test_a_request_that_takes_too_long_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(lambda body: Script([piece(" a"), 5.0, *answer(WORDS)]))) as server:
        bench(server, "--client-timeout-s", "0.2", code=1)
    captured = capsys.readouterr()
    assert figure(captured.out, "Successful requests:") == "0"
    assert "6 failed: " in captured.err
    assert captured.out.count("nothing to measure") == 3


def test_the_result_has_vllms_names_and_details_only_when_asked_for(tmp_path: Path) -> None:
    with running(FakeServer(well)) as server:
        bench(server, "--save-result", "--result-dir", str(tmp_path / "plain"))
        bench(server, "--save-result", "--save-detailed", "--result-dir", str(tmp_path / "whole"))
    (plain,) = (json.loads(path.read_text()) for path in (tmp_path / "plain").glob("openai-infqps-smollm2-*.json"))
    (whole,) = (json.loads(path.read_text()) for path in (tmp_path / "whole").iterdir())
    details = {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "generated_texts", "errors"}
    assert details <= whole.keys()
    assert not details & plain.keys()
    assert (plain["completed"], plain["total_output_tokens"], plain["request_rate"]) == (6, 30, "inf")
    assert {"mean_ttft_ms", "median_tpot_ms", "std_itl_ms", "p99_itl_ms", "output_throughput"} <= plain.keys()
    assert whole["output_lens"] == [5] * 6
    assert [len(gaps) for gaps in whole["itls"]] == [4] * 6


def test_speed_is_shown_beside_the_match_with_a_former_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "former.json")
    turns = iter(range(1000))
    other = [*WORDS[:4], " cold"]
    with running(FakeServer(well)) as server:
        bench(server, "--save-result", "--save-detailed", "--result-filename", file)
        bench(server, "--compare", file)
        assert figure(capsys.readouterr().out, "Identical texts:") == "6 of 6"
        server.script = lambda body: Script(answer(other if next(turns) % 2 else WORDS))
        bench(server, "--compare", file, "--save-result", "--result-filename", str(tmp_path / "now.json"))
    out = capsys.readouterr().out
    assert figure(out, "Identical texts:") == "3 of 6"
    now = json.loads((tmp_path / "now.json").read_text())
    assert (now["identical_texts"], now["compared_texts"]) == (3, 6)
    assert 0.8 < now["token_match"] < 1.0


def test_the_model_and_its_tokenizer_are_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(well, models=[{"id": "my-model", "root": "smollm2"}, {"id": "other"}])) as server:
        bench(server)
    assert {body["model"] for body in server.bodies} == {"my-model"}


def test_a_server_that_lists_no_models_can_be_told_which(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(well, models=None)) as server:
        bench(server, "--model", "x", "--tokenizer", "smollm2")
        assert {body["model"] for body in server.bodies} == {"x"}
        bench(server, "--model", "smollm2", "--served-model-name", "y")
        assert server.bodies[-1]["model"] == "y"
        capsys.readouterr()
        bench(server, code=1)
    assert "/v1/models lists no model: name one with --model" in capsys.readouterr().err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that bad input gets."""
    capsys.readouterr()
    code = main(["bench", "serve", "--num-prompts", "2", "--disable-tqdm", *arguments])
    captured = capsys.readouterr()
    assert code in (1, 2)
    assert captured.out == ""
    (line,) = (line for line in captured.err.splitlines() if line.startswith("kvikk: error:"))
    return line


def test_no_server_at_the_address_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(well)) as server:
        port = server.port
    line = refused(capsys, "--port", str(port))
    assert f"no OpenAI server answers at http://127.0.0.1:{port}/v1/models (Connection refused)" in line
    assert "kvikk serve" in line
    assert line == refused(capsys, "--base-url", f"http://127.0.0.1:{port}/v1/")


def test_a_server_that_wants_a_key_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from aiohttp import web

    class Locked(FakeServer):
        async def _models(self, request: web.Request) -> web.Response:
            raise web.HTTPUnauthorized

    with running(Locked(well)) as server:
        assert "--api-key" in refused(capsys, "--port", str(server.port))


def test_a_tokenizer_that_is_none_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with running(FakeServer(well)) as server:
        line = refused(capsys, "--port", str(server.port), "--tokenizer", str(tmp_path))
    assert str(tmp_path) in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--goodput", "ttft=5"], "'ttft=5' is not of the form METRIC:MS"),
        (["--header", "nothing"], "--header 'nothing' is not of the form NAME=VALUE"),
        (["--extra-body", "{"], "--extra-body '{' is no JSON"),
        (["--extra-body", "[]"], "must be a JSON object"),
        (["--extra-body", '{"n": 2}'], "--extra-body sets n: the benchmark sets that"),
        (["--port", "0"], "--port 0 is no port"),
        (["--base-url", "localhost"], "must start with http://"),
        (["--endpoint", "v1"], "must start with /"),
        (["--client-timeout-s", "0"], "--client-timeout-s 0.0"),
        (["--percentile-metrics", "ttfb"], "'ttfb' is no metric: choose from ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "101"], "between 0 and 100"),
        (["--metric-percentiles", "p99"], "numbers separated by commas"),
        (["--save-detailed"], "add --save-result"),
        (["--result-dir", "x"], "add --save-result"),
        (["--compare", "/no/such.json"], "--compare /no/such.json cannot be read"),
        (["--request-rate", "0"], "--request-rate 0.0 must be above 0"),
        (["--num-prompts", "x"], "--num-prompts is 'x': it must be a whole number"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in refused(capsys, *arguments)


def test_a_reference_of_other_prompts_or_without_texts_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "former.json")
    with running(FakeServer(well)) as server:
        bench(server, "--save-result", "--save-detailed", "--result-filename", file, "--seed", "1")
        asked = len(server.bodies)
        assert "asked other prompts" in refused(capsys, "--port", str(server.port), "--compare", file)
        assert len(server.bodies) == asked
        bench(server, "--save-result", "--result-filename", file)
        assert "is no detailed result" in refused(capsys, "--port", str(server.port), "--compare", file)

"""`kvikk bench latency | throughput`: the real engine for what is asked, a scripted one for what is computed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvikk.bench.latency import LatencyConfig, bench_latency
from kvikk.bench.results import Reference
from kvikk.bench.throughput import BenchThroughputConfig, bench_throughput
from kvikk.cli import main
from kvikk.configuration import build
from kvikk.errors import ConfigError
from kvikk.llm import CompletionOutput, RequestOutput

ENGINE = ("--kv-memory", "64MiB", "--max-model-len", "256", "--log-level", "warning", "--disable-tqdm")


class ScriptedLLM:
    """Answers in token ids that a script gives, and notes what it was asked."""

    def __init__(self, words: Any, answers: Iterator[list[int]], cached: int = 0) -> None:
        self.words, self.answers, self.cached = words, answers, cached
        self.asked: list[tuple[Any, Any]] = []

    def get_tokenizer(self) -> Any:
        return self.words

    def generate(self, prompts: list[Any], params: Any, *, use_tqdm: bool = False) -> list[RequestOutput]:
        self.asked.append((prompts, params))
        return [
            RequestOutput(
                request_id=str(index),
                prompt=None,
                prompt_token_ids=[0] * 10,
                outputs=[CompletionOutput(index=0, text=f" {ids}", token_ids=ids)],
                num_cached_tokens=self.cached,
            )
            for index, ids in enumerate(next(self.answers) for _ in prompts)
        ]


def ticking(*seconds: float) -> Any:
    return iter(seconds).__next__


def test_latency_is_of_the_measured_runs_only(words: Any) -> None:
    llm: Any = ScriptedLLM(words, iter([[1, 2]] * 100))
    config = LatencyConfig(input_len=3, output_len=2, batch_size=4, num_iters_warmup=1, num_iters=3, disable_tqdm=True)
    result = bench_latency(llm, config, clock=ticking(0, 9, 10, 11, 20, 22, 30, 33))
    assert result.seconds == [1, 2, 3]
    assert result.percentiles == pytest.approx({10: 1.2, 25: 1.5, 50: 2.0, 75: 2.5, 90: 2.8, 99: 2.98})
    assert result.repeated == 1.0
    assert [[len(prompt) for prompt in prompts] for prompts, _ in llm.asked] == [[3] * 4] * 4
    assert {(p.max_tokens, p.ignore_eos, p.is_greedy) for _, p in llm.asked} == {(2, True, True)}


def test_latency_says_when_runs_answered_differently_or_found_the_prompts_cached(words: Any) -> None:
    llm: Any = ScriptedLLM(words, iter([[1], [1], [1], [2]]), cached=16)
    config = LatencyConfig(output_len=1, batch_size=2, num_iters_warmup=0, num_iters=2, disable_tqdm=True)
    lines = list(bench_latency(llm, config, clock=ticking(0, 1, 1, 2)).lines())
    assert lines[0] == "Avg latency: 1.000000 seconds"
    assert lines[1] == "10% percentile latency: 1.000000 seconds"
    assert lines[-2:] == ["Answers equal to those of the first run: 75.0%", "Cached prompt tokens of a run: 32"]


def throughput(**options: Any) -> BenchThroughputConfig:
    return build(
        BenchThroughputConfig,
        {"num_prompts": 4, "random_input_len": 10, "random_output_len": 2, "disable_tqdm": True, **options},
    )


def test_throughput_is_what_the_clock_and_the_tokens_say(words: Any) -> None:
    llm: Any = ScriptedLLM(words, iter([[1, 2]] * 100), cached=5)
    result = bench_throughput(llm, throughput(num_warmups=1), clock=ticking(100, 102))
    assert list(result.lines()) == [
        "Throughput: 2.00 requests/s, 24.00 total tokens/s, 4.00 output tokens/s",
        "Total num prompt tokens:  40",
        "Total num output tokens:  8",
        "Cached prompt tokens:     20",
    ]
    assert [len(prompts) for prompts, _ in llm.asked] == [1, 4]
    assert {(p.max_tokens, p.ignore_eos, p.is_greedy) for p in llm.asked[1][1]} == {(2, True, True)}


def test_throughput_is_shown_beside_the_match_with_a_former_run(words: Any, tmp_path: Path) -> None:
    file = tmp_path / "former.json"
    first = bench_throughput(ScriptedLLM(words, iter([[1]] * 4)), throughput())  # type: ignore[arg-type]
    file.write_text(json.dumps(first.as_json()))
    llm: Any = ScriptedLLM(words, iter([[1], [2], [1], [1]]))
    reference = Reference.read(file)
    lines = list(bench_throughput(llm, throughput(), reference=reference).lines())
    assert lines[-2] == "Identical texts:          3 of 4"
    assert re.fullmatch(r"Token match:              [89]\d\.\d\d%", lines[-1])
    with pytest.raises(ConfigError, match="asked other prompts"):
        bench_throughput(llm, throughput(seed=1), reference=reference)


def test_latency_of_the_real_engine_computes_its_prompts_every_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "latency.json"
    sizes = (
        "--input-len",
        "40",
        "--output-len",
        "3",
        "--batch-size",
        "2",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "1",
    )
    assert main(["bench", "latency", *sizes, *ENGINE, "--output-json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "Answers equal to those of the first run: 100.0%\nCached prompt tokens of a run: 0\n" in out
    found = json.loads(file.read_text())
    assert len(found["latencies"]) == 2
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


def test_throughput_of_the_real_engine_counts_what_it_found_cached(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "throughput.json"
    shared = ("--prefix-repetition-num-prefixes", "1", "--prefix-repetition-prefix-len", "64", "--output-len", "4")
    dataset = ("--dataset-name", "shared-prefix", "--num-prompts", "3", *shared, "--prefix-repetition-suffix-len", "8")
    assert main(["bench", "throughput", *dataset, *ENGINE, "--output-json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "Total num prompt tokens:  216\nTotal num output tokens:  12\nCached prompt tokens:     128\n" in out
    assert main(["bench", "throughput", *dataset, *ENGINE, "--compare", str(file)]) == 0
    assert "Token match:              100.00%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["latency", "--batch-size", "0"], "--batch-size 0 must be at least 1"),
        (["latency", "--num-iters", "0"], "--num-iters 0 must be at least 1"),
        (["throughput", "--num-prompts", "0"], "--num-prompts 0 must be at least 1"),
        (["throughput", "--compare", "/no/such.json"], "/no/such.json cannot be read"),
        (["latency", "--input-len", "300"], "300 tokens"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["bench", *arguments, *ENGINE]) == 2
    captured = capsys.readouterr()
    (line,) = (line for line in captured.err.splitlines() if line.startswith("kvikk: error:"))
    assert said in line
    assert captured.out == ""

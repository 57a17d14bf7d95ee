"""`kvikk bench step` and `churn` on a toy model: what they ask of the engine, and what they make of its times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvikk.bench import random_engine, step
from kvikk.bench.churn import BenchChurnConfig, ChurnConfig, arrivals, bench_churn
from kvikk.bench.device import waits
from kvikk.bench.step import BenchStepConfig, NotMeasured, bench_step, floor_bytes
from kvikk.cli import main
from kvikk.configuration import build
from kvikk.engine import Engine
from kvikk.errors import ConfigError
from kvikk.models import toy_model
from kvikk.models.shapes import SHAPES

ENGINE = {"model": "smollm2", "kv_memory": "8MiB", "max_model_len": 256, "device": "cpu"}


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy model in place of the named shape."""
    monkeypatch.setattr(random_engine, "shaped_model", lambda name, **options: toy_model(**options))


def ticking(*seconds: float) -> Callable[[], float]:
    return iter(seconds).__next__


def test_a_steps_time_is_that_of_all_timed_steps_over_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    inner = Engine.step

    def counting(self: Engine) -> Any:
        outputs = inner(self)
        counted.append(len(outputs))
        return outputs

    monkeypatch.setattr(Engine, "step", counting)
    config = build(
        BenchStepConfig,
        {
            "at": "3x64",
            "steps": 4,
            "warm_up_steps": 2,
            "floor_tb_per_s": 1e-3,
            "enable_prefix_caching": False,
            **ENGINE,
        },
    )
    result = bench_step(config, clock=ticking(10.0, 10.2))
    (row,) = result.rows
    assert (row["model"], row["rows"], row["context"]) == ("smollm2", 3, 64)
    assert row["step_ms"] == row["host_ms"] == pytest.approx(50)  # nothing waits for a CPU
    assert row["ratio"] == pytest.approx(row["step_ms"] / row["floor_ms"])
    assert counted[-6:] == [3] * 6  # every row decodes in every one of them


def test_the_context_is_reached_halfway_through_the_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    inner = Engine.step

    def watching(self: Engine) -> Any:
        lengths.append(len(next(iter(self.requests)).rows[0].tokens))
        return inner(self)

    monkeypatch.setattr(Engine, "step", watching)
    bench_step(build(BenchStepConfig, {"at": "1x64", "steps": 8, "warm_up_steps": 3, "floor_tb_per_s": 1.0, **ENGINE}))
    timed = lengths[-8:]
    assert timed[len(timed) // 2] == 64


def test_rows_start_together_though_their_prompts_took_longer_than_they_are_timed() -> None:
    """16 tokens of prompt a step: the first of 8 rows would be done before the last one began."""
    options = {"at": "8x64", "steps": 4, "warm_up_steps": 1, "floor_tb_per_s": 1.0, "max_num_batched_tokens": 16}
    (row,) = bench_step(build(BenchStepConfig, {**options, "max_num_seqs": 8, **ENGINE})).rows
    assert row["step_ms"] > 0


def test_a_run_in_which_rows_are_missing_is_no_measurement() -> None:
    options = {"at": "8x64", "steps": 4, "warm_up_steps": 1, "floor_tb_per_s": 1.0, "max_num_seqs": 4}
    with pytest.raises(NotMeasured, match="4 steps of 8 rows gave 16 tokens"):
        bench_step(build(BenchStepConfig, {**options, **ENGINE}))


def test_measurements_leave_nothing_behind_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Engine] = []

    def keep(config: Any) -> Any:
        engine, capacity = random_engine.random_engine(config)
        made.append(engine)
        return engine, capacity

    monkeypatch.setattr(step, "random_engine", keep)
    options = {"at": "2x40,1x50", "steps": 3, "warm_up_steps": 1, "floor_tb_per_s": 1.0, **ENGINE}
    assert len(bench_step(build(BenchStepConfig, options)).rows) == 2
    (engine,) = made
    assert not engine.has_work
    engine.check()
    assert engine.pool.held == 0


def test_a_row_that_cannot_run_ends_the_measurement_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, plan: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("kvikk.engine.runner.ModelRunner.execute", broken)
    with pytest.raises(NotMeasured, match="no such kernel"):
        bench_step(build(BenchStepConfig, {"at": "1x64", "floor_tb_per_s": 1.0, **ENGINE}))


def test_the_floor_is_every_weight_but_the_embedding_and_the_kv_of_all_rows() -> None:
    llama = SHAPES["llama-3.1-8b"]
    at_copy_rate_ms = floor_bytes(llama, 1, 8_192, torch.bfloat16) / 4.21e12 * 1e3
    assert at_copy_rate_ms == pytest.approx(3.82, abs=0.01)
    more = floor_bytes(llama, 8, 32_768, torch.bfloat16)
    assert more - floor_bytes(llama, 8, 0, torch.bfloat16) == 8 * 32_768 * 131_072
    assert llama.parameters + 128_256 * 4_096 == pytest.approx(8.03e9, rel=0.001)
    assert SHAPES["qwen3-32b"].parameters + 151_936 * 5_120 == pytest.approx(32.8e9, rel=0.002)
    assert SHAPES["smollm2"].parameters == pytest.approx(134.5e6, rel=0.001)


def test_waiting_for_the_gpu_is_told_apart_and_its_methods_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_for = []
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: waited_for.append(self))
    before = torch.cuda.Event.synchronize
    with waits() as waited:
        torch.cuda.Event.synchronize("event")  # type: ignore[arg-type]
        assert waited.seconds > 0
    assert waited_for == ["event"]
    assert torch.cuda.Event.synchronize is before


def churn(**options: Any) -> BenchChurnConfig:
    return build(
        BenchChurnConfig,
        {"requests": 24, "burst": 6, "burst_steps": 4, "input_len": 40, "output_len": 8, "disable_tqdm": True, **ENGINE}
        | options,
    )


def test_churn_runs_every_request_to_its_end_and_tells_steps_apart_by_kind_and_size() -> None:
    config = churn()
    result = bench_churn(config)
    *buckets, total = result.rows
    asked = arrivals(config.churn, 256, 0)
    assert total["output_tokens"] == sum(arrival.output_tokens for arrival in asked)
    assert total["requests"] == 24
    assert {row["kind"] for row in buckets} == {"decode", "mixed"}
    for row in buckets:
        assert row["bucket"] == 1 << (row["bucket"] - 1).bit_length()
        assert row["p99_over_p50"] >= 1
    assert sum(row["steps"] for row in buckets) < total["steps"]  # the first requests only warm up
    assert 0 <= total["unused_blocks_mean"] <= total["unused_blocks_most"] <= 1
    assert len(list(result.lines())) == len(buckets) + 2


def test_requests_of_churn_come_in_bursts_and_a_seed_makes_the_same_ones() -> None:
    config = ChurnConfig(requests=10, burst=4, burst_steps=3, input_len=16, output_len=8)
    made = arrivals(config, 100, 7)
    assert [arrival.step for arrival in made] == [0] * 4 + [3] * 4 + [6] * 2
    assert all(4 <= len(a.prompt) <= 16 and 1 <= a.output_tokens <= 8 and max(a.prompt) < 100 for a in made)
    assert made == arrivals(config, 100, 7) != arrivals(config, 100, 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("step", "--at", "8"), "--at '8' is not rows x context"),
        (("step", "--at", "1x20"), "--at has a context of 20 tokens"),
        (("step", "--steps", "0"), "--steps 0 must be at least 1"),
        (("step", "--floor-tb-per-s", "0"), "--floor-tb-per-s 0.0 must be above 0"),
        (("step", "--model", "gpt-5"), "'gpt-5' is no named shape: choose from llama-3.1-8b"),
        (("step", "--at", "999x128"), "--at 999x128 takes"),
        (("step", "--at", "1x250"), "do not fit sequences of 256 tokens"),
        (("churn", "--burst", "0"), "--burst 0 must be at least 1"),
        (("churn", "--input-len", "250", "--output-len", "20"), "do not fit the engine, which holds 256 tokens"),
    ],
)
def test_what_cannot_be_measured_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    shape = () if "--model" in arguments else ("--model", "smollm2")
    sizes = ("--kv-memory", "8MiB", "--max-model-len", "256", "--device", "cpu")
    assert main(["bench", *arguments, *shape, *sizes]) == 2
    captured = capsys.readouterr()
    (line,) = (line for line in captured.err.splitlines() if line.startswith("kvikk: error:"))
    assert said in line
    assert captured.out == ""


def test_results_are_written_as_flat_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step_file, churn_file = tmp_path / "step.json", tmp_path / "churn.json"
    sizes = ("--model", "smollm2", "--kv-memory", "8MiB", "--max-model-len", "256", "--device", "cpu")
    assert main(["bench", "step", "--at", "2x64", "--steps", "2", "--json", str(step_file), *sizes]) == 0
    bursts = ("--requests", "8", "--input-len", "16", "--output-len", "4", "--disable-tqdm")
    assert main(["bench", "churn", *bursts, "--json", str(churn_file), *sizes]) == 0
    made = json.loads(step_file.read_text())
    assert {"model", "rows", "context", "step_ms", "floor_ms", "ratio", "host_ms"} <= made["rows"][0].keys()
    assert {"device", "versions", "commit"} <= made["header"].keys()
    assert json.loads(churn_file.read_text())["rows"][-1]["kind"] == "all"


def test_a_length_beyond_the_shapes_positions_is_refused_before_weights_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_engine, "shaped_model", None)
    with pytest.raises(ConfigError, match="--max-model-len 9,216 is more than the model's 8,192 positions"):
        bench_step(build(BenchStepConfig, {"at": "1x64", "floor_tb_per_s": 1.0, **ENGINE, "max_model_len": 9216}))

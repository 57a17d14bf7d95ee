"""`kvikk bench attention` without a GPU: cases in memory, what is right for them, and the result; time is made up."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvikk.attention.gpu.flashinfer import ADDRESSABLE
from kvikk.attention.gpu.rows import DecodeRows
from kvikk.attention.reference import attend_dense, read_row
from kvikk.bench import attention, contenders, decode_cases, decode_timing, serving_steps
from kvikk.bench.attention import AttentionBenchConfig, bench_attention
from kvikk.bench.attention_shape import AttentionShape
from kvikk.bench.contenders import Contenders
from kvikk.bench.decode_cases import Case, KVMemory, Placed
from kvikk.bench.results import write_rows
from kvikk.bench.traces import ServingTrace, Trace
from kvikk.cli import main
from kvikk.errors import ConfigError

CPU = torch.device("cpu")
SHAPE = AttentionShape(q_heads=4, kv_heads=2, head_dim=64, page_size=16, dtype=torch.float32)


class Plain:
    """A route that computes by the reference; `wrong` adds to its output, `broken` raises."""

    name = "worklist"

    def __init__(self, placed: Placed, *, wrong: float = 0.0, broken: bool = False) -> None:
        self.placed, self.wrong, self.broken = placed, wrong, broken

    def plan(self, rows: DecodeRows) -> None:
        if self.broken:
            raise RuntimeError("no such kernel")
        self.rows = rows

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, *, scale: float) -> None:
        for row, length in enumerate(self.rows.lengths.tolist()):
            if length:
                k, v = read_row(self.placed.store, layer, self.rows.tables[self.rows.seats[row]].long(), length)
                out[row] = attend_dense(q[row : row + 1], k, v, start=length - 1, scale=scale)[0][0] + self.wrong


class Graph:
    """What would be captured, run again."""

    def __init__(self, record: Callable[[], object]) -> None:
        self.replay = record


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the benchmark over tiny traces, each layer taking 10 microseconds."""
    tiny = {
        "tiny": Trace(length=lambda index, draw: draw(1, 100)),
        "pair": Trace(length=lambda index, draw: 20, rows=2),
    }
    served = ServingTrace(
        prompt=lambda index, draw: draw(1, 60), decode=lambda index: (2, 5), rows=2, requests=6, steps=4
    )
    monkeypatch.setattr(attention, "count_launches", lambda run: 2)
    monkeypatch.setattr(attention, "TRACES", tiny)
    monkeypatch.setattr(attention, "SERVING_TRACES", {"served": served})
    monkeypatch.setattr(attention, "chosen_traces", lambda names: [*tiny, "served"])
    monkeypatch.setattr(attention, "require_cuda", lambda command: CPU)
    monkeypatch.setattr(attention, "copy_tb_per_s", lambda memory: 4.0)
    monkeypatch.setattr(attention, "named_shape", lambda name: ShapeOf(SHAPE))
    monkeypatch.setattr(decode_cases, "COLD_BYTES", 1)
    monkeypatch.setattr(decode_cases, "LEAST_BYTES", 1)
    monkeypatch.setattr(serving_steps, "COLD_BYTES", 1)
    monkeypatch.setattr(serving_steps, "count_launches", lambda run: 5)
    for module in (decode_timing, serving_steps):
        monkeypatch.setattr(module, "capture", Graph)
        monkeypatch.setattr(module, "timed_us", lambda run, replays=7: (run(), 20.0)[1])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**34, 2**34))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run(**route: Any) -> Any:
        monkeypatch.setattr(contenders, "_worklist", lambda placed, shape: Plain(placed, **route))
        return bench_attention(
            AttentionBenchConfig(rows="1,3", seeds=2, routes="worklist", max_seconds=100, disable_tqdm=True)
        )

    return run


class ShapeOf:
    """A named shape of these sizes."""

    def __init__(self, shape: AttentionShape) -> None:
        self.config = shape


def test_every_trace_size_and_seed_gets_a_row_with_its_bytes_and_rates(bench: Callable[..., Any]) -> None:
    result = bench()
    cases = [(row["trace"], row["rows"], row["seed"]) for row in result.rows]
    assert sorted(cases) == sorted(
        (trace, rows, seed) for seed in (0, 1) for trace, rows in (("tiny", 1), ("tiny", 3), ("pair", 2), ("served", 2))
    )
    for row in result.rows:
        assert row["failure"] is None
        assert row["error"] < 0.004  # bf16 rounds
        assert row["time_us"] == 10.0  # 20 for both layers
        assert row["tb_per_s"] == pytest.approx(row["kv_bytes"] / 10e6)
        assert (row["copy_tb_per_s"], row["best_flashinfer_tb_per_s"]) == (4.0, None)
    assert [row["launches_per_layer"] for row in result.rows if row["seed"] == 0 and row["trace"] != "served"] == [
        2
    ] * 3
    (pair, _) = (row for row in result.rows if row["trace"] == "pair")
    assert pair["kv_bytes"] == 2 * 20 * 2 * 2 * 64 * 2
    assert any(line.startswith("tiny") for line in result.lines())


def test_serving_traces_tell_plan_and_step_time_apart_from_the_kernels(bench: Callable[..., Any]) -> None:
    row = next(row for row in bench().rows if row["trace"] == "served")
    assert {"plan_us", "step_us", "steps", "launches_per_step"} <= row.keys()
    assert (row["steps"], row["launches_per_step"]) == (4, 5)


def test_a_route_whose_output_is_wrong_has_failed_however_fast_it_was(bench: Callable[..., Any]) -> None:
    for row in bench(wrong=0.1).rows:
        assert row["time_us"] is row["tb_per_s"] is None
        assert "is off by" in row["failure"]


def test_a_route_that_breaks_fails_its_rows_and_no_others(bench: Callable[..., Any]) -> None:
    result = bench(broken=True)
    assert len(result.rows) == 8
    assert {row["failure"] for row in result.rows} == {"RuntimeError('no such kernel')"}
    assert [line for line in result.lines() if line.startswith("failed: pair 2 seed 0 worklist")]


def test_a_fault_of_the_device_ends_the_run_and_keeps_what_was_measured(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault() -> None:
        if any(frame.function == "guarded" for frame in inspect.stack()):
            raise RuntimeError("an illegal memory access was encountered")

    measured = []

    def spoil_later(placed: Placed, shape: AttentionShape) -> Plain:
        measured.append(placed)
        if len(measured) == 3:
            monkeypatch.setattr(torch.cuda, "synchronize", fault)
        return Plain(placed, broken=len(measured) == 3)

    bench()  # sets everything up
    monkeypatch.setattr(contenders, "_worklist", spoil_later)
    config = AttentionBenchConfig(rows="1,3", seeds=2, routes="worklist", disable_tqdm=True)
    result = bench_attention(config)
    assert len(result.rows) == 2
    assert "the GPU cannot go on after" in result.header["ended_by"]


def test_the_peer_beside_ours_is_the_faster_one_of_flashinfers() -> None:
    rows: list[dict[str, Any]] = [
        {"route": "worklist", "time_us": 10.0, "kv_bytes": 44e6},
        {"route": "fa2", "time_us": 11.0, "kv_bytes": 44e6},
        {"route": "persistent", "time_us": None, "kv_bytes": 44e6},
    ]
    ours, fa2, persistent = attention.compared(iter(rows), 4.2)
    assert ours["ratio_to_flashinfer"] == pytest.approx(1.1)
    assert {row["best_flashinfer_tb_per_s"] for row in (ours, fa2, persistent)} == {4.0}
    assert fa2["ratio_to_flashinfer"] is persistent["tb_per_s"] is None


@pytest.mark.parametrize("lanes", ["whole", "ragged", "even"])
def test_a_placed_case_is_attended_rightly_by_our_kernels(
    lanes: Any, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_cases, "COLD_BYTES", 1)  # of few layers: each has a plan of its own if lanes are ragged
    trace = Trace(length=lambda index, draw: draw(40, 90), lanes=lanes)
    case = Case.draw("tiny", trace, 2, 0, SHAPE.kv_heads)
    memory = KVMemory(case.pool_bytes(SHAPE), SHAPE.dtype, kernel_device)
    memory.fill()
    contender = Contenders(SHAPE, rows=2, entries=64).make("worklist", memory.place(case, SHAPE))
    contender.plan()
    assert contender.error(torch.randn(2, 4, 64, device=kernel_device), scale=0.125) < 1e-4


def test_ragged_rows_take_the_frames_of_what_they_keep_and_even_ones_as_many_bytes() -> None:
    def draw(lanes: Any) -> Case:
        return Case.draw("x", Trace(length=lambda index, draw: 1000, lanes=lanes), 4, 0, 8)

    shape = AttentionShape(q_heads=8, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16)
    ragged, even, whole = draw("ragged"), draw("even"), draw("whole")
    assert ragged.lanes[0][:3] == [900, 540, 324]
    assert ragged.kv_bytes(shape) == pytest.approx(even.kv_bytes(shape), rel=0.01)
    assert ragged.kv_bytes(shape) < 0.3 * whole.kv_bytes(shape)
    assert ragged.blocks(shape) < 0.35 * whole.blocks(shape)


def test_a_pool_beyond_32_bits_is_also_laid_out_layer_by_layer_where_that_helps() -> None:
    memory = KVMemory(0, torch.bfloat16, torch.device("meta"))
    memory.numbers = torch.empty(2 * ADDRESSABLE, dtype=torch.bfloat16, device="meta")
    shape = AttentionShape(q_heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16)
    block = 8 * 2 * 16 * 128
    for blocks, pools in ((ADDRESSABLE // block // 2, 0), (ADDRESSABLE // block, 2), (ADDRESSABLE // block + 1, 0)):
        store = decode_cases.KVStore(shape.geometry(2), blocks, torch.device("meta"), memory=memory.numbers.repeat(2))
        assert len(memory.apart(store)) == pools


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "torch sees none"),
        (("--trace", "bimodal,uniforn"), "--trace 'uniforn' is not known: choose from homogeneous"),
        (("--rows", "1,x"), "--rows '1,x' must be whole numbers"),
        (("--rows", "0"), "--rows 0 is out of its limits"),
        (("--model", "gpt"), "'gpt' is no named shape: choose from llama-3.1-8b"),
        (("--routes", "fa4"), "--routes 'fa4' is not known"),
        (("--seeds", "0"), "--seeds 0"),
        (("--block-size", "8"), "choose 16 or 32"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_what_cannot_be_measured_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert main(["bench", "attention", *flags]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_a_result_is_a_header_and_flat_rows(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "result.json"
    write_rows(file, {"device": "x"}, [{"a": 1}, {"a": 2}])
    assert json.loads(file.read_text()) == {"header": {"device": "x"}, "rows": [{"a": 1}, {"a": 2}]}
    with pytest.raises(ConfigError, match="cannot be written"):
        write_rows(tmp_path, {}, [])

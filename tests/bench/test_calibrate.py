"""`kvikk calibrate` and `--explain` without a GPU: times are those of known constants, which have to be found again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvikk.attention.gpu.calibration import Calibration
from kvikk.attention.gpu.cost import (
    Batch,
    Choice,
    Programs,
    RouteCost,
    RouteName,
    flashinfer_programs,
    kernel_us,
)
from kvikk.bench import calibrate as calibrating
from kvikk.bench.calibrate import CalibrateConfig, calibrate, patterns
from kvikk.bench.contenders import CannotServe
from kvikk.bench.decode_cases import Case
from kvikk.bench.explain import table
from kvikk.cli import main
from kvikk.errors import ConfigError

SMALL = {"kv_heads": 2, "group": 2, "head_dim": 64}
SHAPE = CalibrateConfig(**SMALL).shape
PROGRAMS: dict[RouteName, Programs] = {
    "worklist": Programs(count=396, least_slots=128, step_slots=128),
    "fa2": flashinfer_programs("fa2", SHAPE.decode, 132),
    "persistent": flashinfer_programs("persistent", SHAPE.decode, 132),
}


def true_cost(route: RouteName) -> RouteCost:
    return RouteCost(
        programs=PROGRAMS[route], fixed_us=6.0, us_per_gb=240.0, us_per_kilotoken=9.0, us_per_kilopart=2.0, plan_us=80.0
    )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A device whose times follow the model; routes named in the dictionary refuse for the reason given there."""
    refusing: dict[str, str] = {}

    def time_of(contenders: Any, route: RouteName, placed: Any, q: Any, *, fixed: bool) -> dict[str, Any]:
        assert fixed  # as an engine with captured graphs runs it
        if route in refusing:
            raise CannotServe(refusing[route])
        return {"time_us": kernel_us(route, true_cost(route), SHAPE.decode, placed), "plan_us": 80.0}

    memory = SimpleNamespace(fill=lambda: None, place=lambda case, shape: Batch.of(case.lengths))
    monkeypatch.setattr(calibrating, "KVMemory", SimpleNamespace(make=lambda *arguments: memory))
    monkeypatch.setattr(calibrating, "require_cuda", lambda command: torch.device("cpu"))
    monkeypatch.setattr(calibrating, "queries", lambda case, shape, device: None)
    monkeypatch.setattr(calibrating, "measured", time_of)
    monkeypatch.setattr(calibrating, "chosen_routes", lambda names: ["worklist", "fa2", "persistent"])
    monkeypatch.setattr(calibrating, "_programs", lambda route, contenders, placed, device: PROGRAMS[route])
    monkeypatch.setattr(calibrating, "device_name", lambda device: "NVIDIA Test")
    return refusing


def test_the_constants_of_every_route_are_found_and_written(gpu: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "made.json"
    result = calibrate(CalibrateConfig(**SMALL, output=str(file), disable_tqdm=True))
    found = Calibration.read(file)
    assert found.device == "NVIDIA Test"
    assert found.header["versions"]["torch"] == torch.__version__
    for route, cost in found.shapes[SHAPE.decode].items():
        for name in ("fixed_us", "us_per_gb", "us_per_kilopart", "plan_us"):
            assert getattr(cost, name) == pytest.approx(getattr(true_cost(route), name), rel=1e-3), (route, name)
    assert all(fit.worst_error < 1e-3 for fit in result.fits.values())
    assert [line.split()[0] for line in result.lines()][2:] == ["worklist", "fa2", "persistent", "wrote"]


def test_a_route_that_cannot_serve_the_shape_is_left_out_with_its_reason(gpu: dict[str, str], tmp_path: Path) -> None:
    gpu["persistent"] = "it takes heads of 64"
    result = calibrate(CalibrateConfig(**SMALL, output=str(tmp_path / "made.json"), disable_tqdm=True))
    assert set(result.fits) == {"worklist", "fa2"}
    assert "persistent: left out: it takes heads of 64" in list(result.lines())
    assert set(json.loads((tmp_path / "made.json").read_text())["shapes"][0]["routes"]) == {"worklist", "fa2"}


def test_nothing_is_written_when_our_own_kernels_fail(gpu: dict[str, str], tmp_path: Path) -> None:
    gpu["worklist"] = "no triton"
    with pytest.raises(ConfigError, match="our own kernels cannot be measured here: no triton"):
        calibrate(CalibrateConfig(**SMALL, output=str(tmp_path / "made.json"), disable_tqdm=True))
    assert not list(tmp_path.iterdir())


def test_the_patterns_hold_what_routes_differ_at_and_fit_two_layers_of_every_named_shape() -> None:
    for model in ("llama-3.1-8b", "qwen3-32b", "smollm2"):
        shape = CalibrateConfig(model=model).shape
        cases = patterns(shape)
        assert {1, 128} <= {case.rows for case in cases}
        assert any(max(case.lengths) > 20 * min(case.lengths) for case in cases if case.rows > 33)
        assert max(case.pool_bytes(shape) for case in cases) < 8.6e9


def test_the_explanation_shows_prediction_measurement_and_choice() -> None:
    case = Case.of("given", [100, 200], 2)
    choice = Choice("fa2", {"worklist": 12.0, "fa2": 9.0})
    found: dict[str, dict[str, Any]] = {
        "worklist": {"time_us": 10.0, "plan_us": 0.0, "failure": None},
        "fa2": {"time_us": 8.0, "plan_us": 64.0, "failure": None},
        "persistent": {"time_us": None, "failure": "the pool is too large"},
    }
    lines = list(table(case, choice, found, layers=32))
    assert lines[0] == "2 rows, 300 tokens, the longest 200"
    assert lines[2].split() == ["worklist", "12.0", "10.0", "+20%"]
    assert lines[3].split() == ["fa2", "9.0", "10.0", "-10%", "chosen"]
    assert lines[4].endswith("the pool is too large")
    uncalibrated = list(table(case, Choice("worklist", {}), found, layers=32))
    assert uncalibrated[2].split() == ["worklist", "-", "10.0", "-", "chosen"]
    assert "not calibrated" in uncalibrated[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "smollm2"), "torch sees none"),
        ((), "name the attention"),
        (("--model", "smollm2", "--group", "3"), "name the attention"),
        (("--kv-heads", "8", "--group", "4"), "name the attention"),
        (("--kv-heads", "0", "--group", "4", "--head-dim", "64"), "--kv-heads 0 must be at least 1"),
        (("--model", "smollm2", "--block-size", "8"), "choose 16 or 32"),
        (("--model", "smollm2", "--dtype", "float32"), "choose from bfloat16, float16"),
    ],
)
def test_what_cannot_be_calibrated_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert main(["calibrate", *flags]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""

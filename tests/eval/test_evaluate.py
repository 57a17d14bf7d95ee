"""`kvikk eval`: the grid, the file that a rerun goes on with, the report and the command."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from kvikk.cli import main
from kvikk.configuration import build
from kvikk.errors import ConfigError
from kvikk.eval.config import EvalConfig
from kvikk.eval.evaluate import Evaluation, evaluate
from kvikk.eval.fidelity import Fidelity
from kvikk.eval.grid import Cell, GridConfig
from kvikk.eval.plot import svg
from kvikk.eval.report import markdown
from kvikk.eval.subject import Subject
from kvikk.eval.suite import COLUMNS, NOTHING_EVICTED, Row, complete

TINY: dict[str, Any] = {
    "documents": 1, "length": 300, "forced_tokens": 8, "speed_tokens": 0, "task_length": 600, "contexts": 1,
    "sinks": 2, "window": 16, "disable_tqdm": True, "device": "cpu",
}  # fmt: skip


def config(**options: Any) -> EvalConfig:
    return build(EvalConfig, TINY | options)


def run(subject: Subject, **options: Any) -> Evaluation:
    return evaluate(config(**options), subject, subject)


def rows_of(subject: Subject, **options: Any) -> list[Row]:
    return run(subject, **options).results.rows


# The grid


def test_a_grid_is_the_full_cache_and_every_combination_once() -> None:
    cells = GridConfig(policies="knorm, full,random,knorm", budgets="50%,64", triggers="prefill,every:8").cells()
    assert [str(cell) for cell in cells] == [
        "full",
        *(
            f"{p} {b} uniform drop {t}"
            for p in ("knorm", "random")
            for b in ("50%", "64")
            for t in ("prefill", "every:8")
        ),
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policies": "snapvk"}, "did you mean 'snapkv'"),
        ({"budgets": "10"}, "alone are 36"),
        ({"budgets": "200%"}, "at most 100%"),
        ({"allocators": "fair"}, "choose from uniform"),
        ({"rests": "offload"}, "choose from drop"),
        ({"triggers": "every:0"}, "every:128"),
        ({"budgets": " ,"}, "names nothing"),
    ],
)
def test_a_cell_that_can_never_be_is_refused_before_anything_runs(options: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GridConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"suite": "fidelty"}, "choose from fidelity, tasks"),
        ({"documents": 0}, "--documents is 0"),
        ({"speed_tokens": 3}, "at least 8, or 0"),
    ],
)
def test_settings_that_measure_nothing_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**options)


def test_lengths_that_do_not_fit_the_model_are_refused_before_anything_runs(subject: Subject) -> None:
    for options, says in (
        ({"length": 4090}, "--length with --forced-tokens"),
        ({"task_length": 4000}, "--task-length"),
    ):
        with pytest.raises(ConfigError, match=f"{says} takes .* may have 4,096"):
            run(subject, **options)


# Results


def test_rows_have_all_columns_and_what_kept_everything_is_flagged(subject: Subject) -> None:
    rows = rows_of(subject, policies="knorm", budgets="25%,9999")
    assert {tuple(row) for row in rows} == {COLUMNS}
    flags = {(row["policy"], row["budget"]): row["flag"] for row in rows if row["suite"] == "fidelity"}
    assert flags == {("full", None): "reference", ("knorm", "25%"): None, ("knorm", "9999"): NOTHING_EVICTED}
    assert {row["suite"] for row in rows} == {"fidelity", "tasks"}


def test_a_rerun_measures_what_is_not_there_yet_and_nothing_twice(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    rows = Fidelity.rows

    def noted(self: Fidelity, cell: Cell) -> list[Row]:
        measured.append(str(cell))
        if "tova" in measured[-1] and len(measured) < 5:
            raise KeyboardInterrupt
        return rows(self, cell)

    monkeypatch.setattr(Fidelity, "rows", noted)
    options = {"suite": "fidelity", "budgets": "50%", "output": str(tmp_path / "deep" / "r.json")}
    with pytest.raises(KeyboardInterrupt):
        run(subject, policies="knorm,tova", **options)
    assert measured == ["full", "knorm 50% uniform drop prefill", "tova 50% uniform drop prefill"]
    kept = json.loads(Path(options["output"]).read_text())["rows"]
    measured[:] = measured[:2] * 2
    found = run(subject, policies="knorm,tova", **options).results
    assert measured[4:] == ["tova 50% uniform drop prefill"]
    assert found.rows[: len(kept)] == kept
    assert json.loads(Path(options["output"]).read_text())["rows"] == found.rows
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"length": 320}, "length is 300 there and 320 here"), ({"window": 8}, "window"), ({"suite": "tasks"}, "texts")],
)
def test_a_file_of_another_evaluation_is_refused(
    subject: Subject, tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    options = {"suite": "fidelity", "policies": "full", "output": str(tmp_path / "r.json")}
    run(subject, **options)
    with pytest.raises(ConfigError, match=f"another evaluation.*{says}.*name another file"):
        run(subject, **options | changed)


def test_a_quantised_cache_is_compared_with_the_full_cache_of_the_models_own_type_in_the_same_file(
    subject: Subject, tmp_path: Path
) -> None:
    options = {"policies": "random", "budgets": "50%", "suite": "fidelity", "output": str(tmp_path / "r.json")}
    run(subject, **options)
    quantised = config(kv_dtype="int8", kv_memory="32MiB", **options)
    found = evaluate(quantised, Subject.of(subject.loaded, quantised.engine), subject).results.rows
    full, random = ({row["kv_dtype"]: row for row in found if row["policy"] == name} for name in ("full", "random"))
    assert full["float32"]["flag"] == "reference"
    assert full["int8"]["flag"] is None, "nothing was evicted, and yet it could have differed"
    assert 0 < full["int8"]["kl_mean"] < 0.05 < random["int8"]["kl_mean"]
    assert full["int8"]["kept_share"] < 0.5
    assert random["int8"]["kept_share"] < 0.6 * full["int8"]["kept_share"] + 0.1
    assert "| full |  | int8 |" in markdown(json.loads(Path(options["output"]).read_text())["header"], found)


def test_a_file_of_another_model_is_refused(subject: Subject, tmp_path: Path) -> None:
    from eval.conftest import subject_of

    options = {"suite": "fidelity", "policies": "full", "output": str(tmp_path / "r.json")}
    run(subject, **options)
    with pytest.raises(ConfigError, match="model_fingerprint"):
        run(subject_of(seed=1), **options)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"rows": []}', '{"header": {}, "rows": [{"a": 1}]}', '{"header": 1, "rows": []}']
)
def test_a_file_that_is_something_else_is_refused_and_left_alone(subject: Subject, tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"r\.json"):
        run(subject, suite="fidelity", policies="full", output=str(path))
    assert path.read_text() == text


def test_a_policy_that_fails_costs_its_own_cells_only_and_is_tried_again(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvikk.compress.policies.knorm import KNorm

    def broken(self: Any, view: Any) -> Any:
        raise RuntimeError("out of luck")

    options = {"suite": "fidelity", "policies": "knorm,random", "budgets": "50%", "output": str(tmp_path / "r.json")}
    with monkeypatch.context() as patch:
        patch.setattr(KNorm, "score", broken)
        found = run(subject, **options)
    assert [row["policy"] for row in found.results.rows] == ["full", "full", "random", "random"]
    (failure,) = found.failed
    assert "knorm" in failure
    assert "out of luck" in failure
    again = run(subject, **options)
    assert again.failed == []
    assert [row["policy"] for row in again.results.rows][4:] == ["knorm", "knorm"]


# Reports


@pytest.fixture(scope="module")
def found(subject: Subject) -> Evaluation:
    return run(subject, policies="knorm,streaming", budgets="50%,25%", allocators="uniform,pooled", speed_tokens=8)


def test_the_table_has_a_line_for_each_cell_and_the_columns_that_tell_cells_apart(found: Evaluation) -> None:
    text = markdown(found.results.header, found.results.rows)
    code = text.partition("**code**")[2].partition("**prose**")[0]
    lines = [line for line in code.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 1 + 8
    assert lines[0].startswith("| policy | budget | allocator | KL mean |")
    assert len({line.count("|") for line in lines}) == 1
    assert any(line.startswith("| knorm | 25% | pooled |") for line in lines)
    assert "reference" in lines[2]
    assert "not counted: full scores 0%" in text


def test_the_plot_is_svg_with_a_line_for_each_way_and_a_point_for_each_budget(found: Evaluation) -> None:
    root = ET.fromstring(svg(found.results.rows))
    name = "{http://www.w3.org/2000/svg}"
    lines = root.findall(f"{name}polyline")
    assert len(lines) == 2 * 4, "two kinds of text; no task counts on a toy"
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert len(points) == 2
        assert points[0][0] < points[1][0], "fewer bytes stand on the left"
    assert len(root.findall(f"{name}circle")) == 16
    labels = {text.text for text in root.iter(f"{name}text")}
    assert {"knorm uniform", "streaming pooled"} <= labels


def answered(policy: str, budget: str | None, task: str, score: float | None, full_score: float) -> Row:
    return complete(
        {
            "suite": "tasks", "task": task, "question": "prompt", "policy": policy, "budget": budget, "samples": 10,
            "length": 900, "kv_dtype": "float32", "score": score, "full_score": full_score,
            "counted": full_score >= 0.5, "kept_share": 0.3, "flag": "reference" if budget is None else None,
        }
    )  # fmt: skip


def test_what_is_not_counted_is_in_no_mean_and_in_no_plot(found: Evaluation) -> None:
    rows = [
        answered("full", None, "needle", 0.8, 0.8),
        answered("full", None, "lookup", 0.6, 0.6),
        answered("full", None, "chain", 0.1, 0.1),
        answered("tova", "50%", "needle", 0.4, 0.8),
        answered("tova", "50%", "lookup", 0.2, 0.6),
        answered("tova", "50%", "chain", None, 0.1),
    ]
    text = markdown(found.results.header, rows)
    assert "| tova | 50% | 40% | 20% | - | 30% | 30.0% |" in text
    assert "| full |  | 80% | 60% | 10% | 70% |" in text
    assert "chain not counted: full scores 10%" in text
    root = ET.fromstring(svg(rows))
    name = "{http://www.w3.org/2000/svg}"
    (point,) = root.findall(f"{name}circle")
    ticks = {text.text: float(text.attrib["y"]) for text in root.iter(f"{name}text") if text.text in ("0.25", "0.5")}
    (full,) = [line for line in root.iter(f"{name}line") if line.attrib.get("stroke-dasharray") == "4 4"]
    quarter = ticks["0.25"] - ticks["0.5"]
    assert float(point.attrib["cy"]) == pytest.approx(ticks["0.5"] - 4 + 0.8 * quarter, abs=0.2), "the mean of both"
    assert float(full.attrib["y1"]) == pytest.approx(ticks["0.5"] - 4 - 0.8 * quarter, abs=0.2), "the full cache: 70%"


def test_a_plot_of_nothing_but_the_full_cache_is_still_a_picture(subject: Subject) -> None:
    rows = rows_of(subject, policies="full", suite="fidelity")
    assert ET.fromstring(svg(rows)).tag.endswith("svg")


def test_the_command_writes_results_table_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = [
        "eval", "--policies", "snapkv", "--budgets", "50%", "--suite", "fidelity", "--texts", "prose",
        "--documents", "1", "--length", "128", "--forced-tokens", "4", "--speed-tokens", "0", "--device", "cpu",
        "--kv-memory", "64MiB", "--max-model-len", "1024", "--disable-tqdm", "--log-level", "warning",
        "--output", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "t.md"), "--plot", str(tmp_path / "p.svg"),
    ]  # fmt: skip
    assert main(typed) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "t.md").read_text() == out
    assert re.search(r"^\| snapkv \| 50% \| \d\.\d+(e-\d+)? ", out, flags=re.MULTILINE)
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["policy"], row["evicted_tokens"]) for row in rows] == [("full", 0.0), ("snapkv", 64.0)]
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    assert main([*typed, "--length", "129"]) == 2
    assert "another evaluation" in capsys.readouterr().err


def test_flags_of_a_server_that_would_be_ignored_are_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--kv-policy", "snapkv"])
    assert "--kv-policy" in capsys.readouterr().err

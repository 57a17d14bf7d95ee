"""`benchmarks/compaction.py` on the toy model: every row is compacted once while it is timed, or not at all."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from kvikk.bench import random_engine
from kvikk.models import toy_model

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "compaction.py"))
OPTIONS = [
    "--device",
    "cpu",
    "--at",
    "3x100,2x150",
    "--every",
    "16",
    "--policies",
    "knorm",
    "h2o",
    "--kv-memory",
    "1MiB",
]
OPTIONS += ["--budgets", "50%", "5000"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("compaction") / "out.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_engine, "shaped_model", lambda name, **options: toy_model(dtype=torch.bfloat16))
        SCRIPT["main"]([*OPTIONS, "--output", str(path)])
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return found


def test_there_is_a_row_for_the_full_cache_and_for_each_policy_and_budget(rows: list[dict[str, Any]]) -> None:
    assert [(row["rows"], row["context"], row["policy"], row["budget"]) for row in rows] == [
        (count, context, policy, budget)
        for count, context in ((3, 100), (2, 150))
        for policy, budget in (
            ("full", "100%"), ("knorm", "50%"), ("knorm", "5000"), ("h2o", "50%"), ("h2o", "5000"),
        )
    ]  # fmt: skip


def test_every_row_is_compacted_once_and_what_that_takes_is_a_part_of_the_step(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["budget"] != "50%":
            continue
        assert row["compactions"] == row["rows"]
        assert 0 < row["choosing_ms"] < row["compaction_ms"]
        assert row["row_us"] * row["rows"] == pytest.approx(row["compaction_ms"] * 1e3 * row["every"])
        assert row["share"] == pytest.approx(row["compaction_ms"] / row["step_ms"])
        assert row["kept"] == pytest.approx(0.5, abs=0.06)


def test_what_compaction_adds_is_what_steps_take_more_than_those_that_none_is_near(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["added_ms"] == pytest.approx(row["step_ms"] - row["quiet_ms"])
        assert row["added_share"] == pytest.approx(row["added_ms"] / row["quiet_ms"])
        assert (row["step_1_ms"] or row["step_2_ms"]) is None or row["policy"] != "full"
        assert 0.9 <= row["decoding"] <= 1
    steps = SCRIPT["Steps"]([1.0, 2.0, 9.0, 4.0, 3.0] + [3.0] * 8, [0, 0, 1] + [0] * 10, 13)
    assert steps.quiet() == pytest.approx((2 + 9 * 3) / 10), "not the first, nor that with one, nor the one after it"
    assert (steps.median_of(1), steps.median_of(2)) == (9, None)
    assert SCRIPT["Steps"]([1.0] * 9, [1] * 9, 9).quiet() is None


def test_nothing_is_compacted_of_the_full_cache_and_nothing_dropped_within_the_budget(
    rows: list[dict[str, Any]],
) -> None:
    for row in rows:
        if row["policy"] == "full":
            assert (row["compactions"], row["compaction_ms"], row["of_full"]) == (0, 0, 1)
        if row["budget"] == "5000":
            assert row["compactions"] == row["rows"], "asked, and found to keep everything"
            assert row["kept"] == 1

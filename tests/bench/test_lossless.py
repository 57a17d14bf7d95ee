"""`kvikk bench lossless` tells what drafting gains beside whether the text is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvikk.bench.lossless import BenchLosslessConfig, LosslessConfig, bench_lossless
from kvikk.cli.main import main
from kvikk.configuration import build
from kvikk.errors import ConfigError


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_the_table_has_a_row_for_each_way_to_draft_with_the_same_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lossless.json"
    words = "bench lossless --model smollm2 --device cpu --dtype float32 --kv-memory 64MiB --max-model-len 400"
    words += " --at 2x200 --output-len 24 --policies streaming,ngram --budgets 50% --draft-length 3"
    assert main([*words.split(), "--json", str(out)]) == 0
    streaming, ngram = rows_of(out)
    for row in (streaming, ngram):
        assert row["identical"] == row["prompts"] == 2
        assert row["near_ties"] == 0
        assert row["largest_gap_nats"] is None
        assert row["accepted"] <= row["drafted"]
        assert row["speedup"] == pytest.approx(row["lossless_tokens_per_s"] / row["plain_tokens_per_s"])
    assert (streaming["policy"], streaming["budget"], ngram["policy"]) == ("streaming", "50%", "ngram")
    assert 0 < streaming["accepted_per_round"] <= 3
    assert "same text" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policies": "no-such"}, "no-such"),
        ({"budgets": "300%"}, "300%"),
        ({"draft_length": 1000}, "1000"),
        ({"at": "8"}, "rows x context"),
        ({"output_len": 1}, "--output-len"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_its_value(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LosslessConfig(**options)


def test_the_operators_own_policy_is_refused_as_the_benchmark_sets_policies_itself() -> None:
    config = build(BenchLosslessConfig, {"kv_policy": "streaming", "kv_budget": "50%"})
    with pytest.raises(ConfigError, match="--policies"):
        bench_lossless(config)


def test_prompts_that_do_not_fit_are_refused_with_the_limit() -> None:
    config = build(
        BenchLosslessConfig,
        {"at": "1x300", "model": "smollm2", "device": "cpu", "kv_memory": "64MiB", "max_model_len": 320},
    )
    with pytest.raises(ConfigError, match="320"):
        bench_lossless(config)

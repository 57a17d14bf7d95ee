"""`kvikk bench lossless` tells what drafting gains beside whether the text is the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvikk.bench.lossless import BenchLosslessConfig, LosslessConfig, bench_lossless
from kvikk.bench.lossless_model import best_draft, best_round
from kvikk.bench.lossless_run import DraftTally, Run, Step
from kvikk.bench.replay import Lot
from kvikk.cli.main import main
from kvikk.configuration import build
from kvikk.engine import SampledToken
from kvikk.engine.core import agreeing
from kvikk.engine.drafting import RoundCosts, StepTimes
from kvikk.errors import ConfigError


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_the_table_has_a_row_for_each_way_to_draft_with_the_same_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lossless.json"
    words = "bench lossless --model smollm2 --device cpu --dtype float32 --kv-memory 64MiB --max-model-len 400"
    words += " --at 2x200 --output-len 24 --policies streaming,ngram --budgets 50% --draft-length 3 --controls"
    assert main([*words.split(), "--json", str(out)]) == 0
    streaming, ngram = rows_of(out)
    for row in (streaming, ngram):
        assert row["identical"] == row["prompts"] == 2
        assert row["near_ties"] == 0
        assert row["largest_gap_nats"] is None
        assert row["accepted"] <= row["drafted"]
        assert row["speedup"] == pytest.approx(row["lossless_tokens_per_s"] / row["plain_tokens_per_s"])
        assert row["predicted"] > 0
        assert (row["full_kv_in"], row["moved_bytes"], row["kv_host_memory_bytes"]) == ("device", 0, 0)
        assert row["rows_at_once"] == 2
    assert (streaming["policy"], streaming["budget"], ngram["policy"]) == ("streaming", "50%", "ngram")
    assert 0 < streaming["accepted_per_round"] <= 3
    assert (streaming["halved_identical"], streaming["halved_largest_gap_nats"]) == (2, None)
    assert streaming["lossy_identical"] < 2, "what the policy drops matters to these texts"
    assert ngram["lossy_identical"] is None
    said = capsys.readouterr().out
    assert "same text" in said
    assert "lossless: 2; whole cache in two halves: 2; the policy alone: " in said


def test_where_rows_queue_all_is_timed_and_what_the_host_did_is_told_and_acceptance_can_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "host.json"
    words = "bench lossless --model smollm2 --device cpu --kv-memory 7500000 --max-model-len 144 --at 3x112"
    words += " --output-len 20 --policies streaming --budgets 40% --draft-length 3 --replay 1,0"
    words += " --kv-host-memory 32MiB --kv-host-use always"
    assert main([*words.split(), "--json", str(out)]) == 0
    always, never = rows_of(out)
    assert (always["replayed"], never["replayed"]) == (1, 0)
    assert (always["acceptance"], never["acceptance"]) == (1, 0)
    assert always["accepted"] == always["drafted"] > never["accepted"] == 0
    for row in (always, never):
        assert row["identical"] is None, "texts of a lot are compared with nothing"
        assert (row["full_kv_in"], row["kv_host_use"]) == ("host", "always")
        assert row["kv_host_memory_bytes"] <= 32 * 2**20
        assert min(row["partings"], row["moved_bytes"], row["parted_at_once"]) > 0
        assert row["rows_at_once"] >= row["drafting_at_once"] >= row["parted_at_once"]
        assert min(row["rows_at_once"], row["plain_rows_at_once"]) >= 1
        assert row["first_token_p99_ms"] >= row["first_token_ms"] > 0
    header = json.loads(out.read_text())["header"]
    assert (header["simulation"], header["whole_run"], header["texts"]) == (True, True, "random tokens")
    said = capsys.readouterr().out
    assert "A simulation" in said
    assert "over the link" in said


def test_as_many_drafts_agree_as_are_drawn_and_the_next_token_never_does() -> None:
    lot = Lot(seed=5)
    lot.acceptance = 0.8
    tally = DraftTally()
    for _ in range(2000):
        drafts = [7, 0, 5, 3]
        tokens = lot.overrule(drafts, [SampledToken(each) for each in (7, 0, 1, 3, 9)])
        agreed = len(agreeing(drafts, tokens))
        assert len(tokens) == 5
        assert agreed == 4 or tokens[agreed].token_id not in (drafts[agreed], -1)
        tally.note(4, agreed)
    assert tally.acceptance == pytest.approx(0.8, abs=0.02)
    assert tally.survival(5) == pytest.approx([0.8**n for n in range(1, 6)], abs=0.04)


def test_where_no_token_could_be_sampled_none_is_drawn() -> None:
    lot = Lot(seed=0)
    lot.acceptance = 1.0
    assert lot.overrule([1, 2, 3], []) == []
    assert lot.overrule([1, 2, 3], [SampledToken(8)]) == [SampledToken(1)]


def test_a_token_behind_the_first_wrong_one_of_its_draft_tells_nothing() -> None:
    tally = DraftTally()
    assert tally.acceptance is None
    tally.note(drafted=4, accepted=1)
    tally.note(drafted=2, accepted=2)
    assert (tally.tried, tally.right) == ([2, 2], [2, 1])
    assert tally.acceptance == 0.75
    assert tally.survival(3) == [1.0, 0.5, 0.375], "places that were not tried are like the others"


def a_run(steps: list[Step], drafts_of_rows: list[DraftTally]) -> Run:
    return Run(
        texts=[], steps=steps, gaps_ms=[], first_tokens_ms=[], usage=[], drafts=DraftTally(),
        drafts_of_rows=drafts_of_rows, times=StepTimes(), preemptions=0, partings=0, refused=0,
    )  # fmt: skip


def test_steps_with_prompts_count_for_the_whole_and_not_for_decoding() -> None:
    steps = [
        Step(10.0, 0, 0, 0, 0, is_decoding=False, starts=False, ends=False),
        Step(12.0, 2, 2, 0, 0, is_decoding=False, starts=False, ends=False),
        Step(13.0, 8, 2, 2, 1, is_decoding=True, starts=True, ends=False),
        Step(14.0, 4, 1, 1, 1, is_decoding=True, starts=False, ends=True),
    ]
    found = a_run(steps, [])
    assert (found.tokens_per_s, found.decode_tokens_per_s) == (3.5, 6.0)
    assert (found.rows, found.drafting, found.parted) == (1.75, 0.75, 0.5)
    assert found.side_by_side == {(2, 1): 1.0, (1, 1): 1.0}


def test_what_is_predicted_goes_by_what_each_row_showed_and_not_by_the_rows_that_drafted_farthest() -> None:
    good, bad = DraftTally(), DraftTally()
    for _ in range(10):
        good.note(drafted=20, accepted=20)
        bad.note(drafted=2, accepted=0)
    both = a_run([], [good, bad])
    assert both.acceptances(4) == sorted(both.acceptances(4))
    assert both.acceptances(2) == pytest.approx([0.25 * 0.99 + 0.75 * 0.05, 0.75 * 0.99 + 0.25 * 0.05], abs=0.02)
    costs = RoundCosts(draft_step_s=1.0, draft_row_s=0.0, verify_s=40.0, verify_token_s=0.0, plain_s=40.0)
    assert best_draft(a_run([], [bad]), 8, costs) < best_draft(both, 8, costs) < best_draft(a_run([], [good]), 8, costs)


def test_what_is_predicted_is_the_best_length_for_the_acceptance_seen() -> None:
    costs = RoundCosts(draft_step_s=1.0, draft_row_s=0.0, verify_s=4.0, verify_token_s=0.0, plain_s=4.0)
    every = {x: 2 * (1 + sum(0.9**n for n in range(1, x + 1))) / (4 + x) for x in range(1, 9)}
    assert best_round(2, [0.9**n for n in range(1, 9)], 1.0, costs) == pytest.approx(max(every.values()))
    assert best_round(2, [0.1, 0.01], 1.0, costs) == 2 / 4.0, "else plain steps are"
    free = replace(costs, draft_step_s=0.0)
    assert best_round(2, [0.5], 0.5, free) == pytest.approx(2 * 1.25 / 4), "half of the rows have a draft"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policies": "no-such"}, "no-such"),
        ({"replay": "0.9,often"}, "often"),
        ({"replay": "1.5"}, "1.5"),
        ({"replay": "0.9", "policies": "snapkv,ngram"}, "leave ngram out"),
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

"""Distance from the full cache, on the real engine with a toy model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kvikk.bench.texts import documents
from kvikk.errors import ConfigError, PolicyFailed
from kvikk.eval.fidelity import UNMEASURED, Distance, Fidelity, kl_divergence
from kvikk.eval.grid import FULL_CELL, Cell, GridConfig
from kvikk.eval.subject import Exam, Subject
from kvikk.eval.suite import NOTHING_EVICTED

LENGTH, FORCED = 400, 20 + UNMEASURED
SMALL = {"sinks": 2, "window": 16}
FULL: dict[str, Any] = {"policy": "full"}


def fidelity(subject: Subject, speed_tokens: int = 0, forced: int = FORCED) -> Fidelity:
    texts = [document for kind in ("code", "prose") for document in documents(kind, 2, LENGTH + forced, subject.encode)]
    return Fidelity(subject, subject, texts, forced=forced, speed_tokens=speed_tokens, grid=GridConfig(**SMALL))


def cell(policy: str, budget: str, trigger: str = "prefill") -> Cell:
    return Cell(policy=policy, budget=budget, allocator="uniform", rest="drop", trigger=trigger)


@pytest.fixture(scope="module")
def suite(subject: Subject) -> Fidelity:
    return fidelity(subject)


def test_the_full_cache_is_at_no_distance_from_itself(suite: Fidelity) -> None:
    for row in suite.rows(FULL_CELL):
        assert row["kl_mean"] == row["kl_median"] == row["kl_p95"] == 0
        assert (row["top1"], row["kept_share"], row["evicted_tokens"]) == (1, 1, 0)
        assert row["perplexity"] == row["full_perplexity"]


def test_a_budget_that_keeps_everything_is_flagged_and_changes_nothing(suite: Fidelity) -> None:
    for row in suite.rows(cell("snapkv", "9999")):
        assert row["flag"] == NOTHING_EVICTED
        assert row["kl_mean"] == 0


def test_the_distance_grows_as_the_budget_shrinks_and_bytes_follow_the_budget(suite: Fidelity) -> None:
    by_budget = [suite.rows(cell("random", budget)) for budget in ("90%", "50%", "25%", "12.5%")]
    for kind in range(2):
        rows = [rows[kind] for rows in by_budget]
        distances = [row["kl_mean"] for row in rows]
        assert 0 < distances[0] < distances[1] < distances[2] < distances[3]
        assert [row["flag"] for row in rows] == [None] * 4
        assert [row["evicted_tokens"] for row in rows] == [40, 200, 300, 350]
        assert rows[2]["kept_share"] == pytest.approx((100 + FORCED) / (400 + FORCED), abs=0.06), "whole blocks"
        assert rows[0]["top1"] > rows[3]["top1"]


def test_what_is_measured_comes_after_the_trigger(subject: Subject) -> None:
    """With one forced token nothing would be: what stands in its place was said before anything was dropped."""
    text = documents("code", 1, LENGTH + 2, subject.encode)[0].tokens
    seen: dict[str, dict[int, torch.Tensor]] = {"full": {}, "random": {}}
    for policy, found in seen.items():
        asked = FULL if policy == "full" else {"policy": policy, "budget": 0.1, **SMALL}
        exam = Exam(
            prompt=text[:LENGTH], forced=text[LENGTH:], observe=lambda index, p, to=found: to.update({index: p})
        )  # type: ignore[misc]
        subject.sit([exam], asked)
    assert torch.equal(seen["full"][0], seen["random"][0])
    assert float(kl_divergence(seen["full"][UNMEASURED], seen["random"][UNMEASURED])) > 0.01


def test_every_kind_of_text_has_a_row_with_as_many_positions_as_were_forced_after_the_trigger(suite: Fidelity) -> None:
    rows = suite.rows(cell("streaming", "25%"))
    assert [(row["task"], row["length"], row["samples"]) for row in rows] == [("code", 400, 40), ("prose", 400, 40)]


def test_perplexity_is_that_of_the_models_own_logits(subject: Subject, suite: Fidelity) -> None:
    (code, _) = suite.rows(FULL_CELL)
    nll = []
    for document in documents("code", 2, LENGTH + FORCED, subject.encode):
        ids = torch.tensor(document.tokens)
        logits = dense_logits(subject, ids)[LENGTH - 1 + UNMEASURED : -1]
        nll.append(-logits.log_softmax(-1).gather(1, ids[LENGTH + UNMEASURED :, None]))
    assert code["full_perplexity"] == pytest.approx(float(torch.cat(nll).mean().exp()), rel=1e-4)


def dense_logits(subject: Subject, ids: torch.Tensor) -> torch.Tensor:
    class Dense:
        def attend(
            self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
        ) -> torch.Tensor:
            group = q.shape[1] // k.shape[1]
            keys, values = (each.repeat_interleave(group, dim=1).transpose(0, 1) for each in (k, v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1), keys, values, is_causal=True, scale=scale
            )
            return out.transpose(0, 1)

    model, at = subject.loaded.model, torch.arange(len(ids))
    with torch.inference_mode():
        return model.head(model.forward(ids, at, Dense(), at))


def test_a_token_of_probability_zero_adds_nothing_and_rounding_makes_no_distance_negative() -> None:
    half = torch.tensor([0.5, 0.5, 0.0]).log()
    assert float(kl_divergence(half, half)) == 0
    assert float(kl_divergence(half, torch.tensor([0.25, 0.5, 0.25]).log())) == pytest.approx(0.5 * 0.6931, abs=1e-4)
    nearly = (torch.randn(1000) * 5).log_softmax(0)
    assert float(kl_divergence(nearly, nearly + 1e-7)) >= 0


def test_a_position_is_the_distance_of_the_full_cache_from_the_other_one_and_what_the_true_token_cost_both() -> None:
    full, other = torch.tensor([0.5, 0.25, 0.25]).log(), torch.tensor([0.125, 0.75, 0.125]).log()
    distance = Distance()
    distance.add(full, other, 2)
    distance.add(full, full, 0)
    assert distance.kl == pytest.approx([0.5 * math.log(4) + 0.25 * math.log(1 / 3) + 0.25 * math.log(2), 0])
    assert distance.agrees == [False, True]
    figures = distance.figures()
    assert figures["perplexity"] == pytest.approx((1 / 0.125 / 0.5) ** 0.5)
    assert figures["full_perplexity"] == pytest.approx((1 / 0.25 / 0.5) ** 0.5)
    assert (figures["samples"], figures["top1"]) == (2, 0.5)


def test_speed_is_measured_for_a_cell_and_the_full_cache_beside_it(subject: Subject) -> None:
    row = fidelity(subject, speed_tokens=8).rows(cell("knorm", "25%"))[0]
    assert row["tokens_per_s"] > 0
    assert row["full_tokens_per_s"] > 0


def test_speed_is_not_told_where_the_prompts_cannot_decode_at_the_same_time(subject: Subject) -> None:
    prompts = [[row] * 4000 for row in range(60)]
    assert subject.engine.pool.total * 16 < 60 * 4000
    assert subject.decode_rate(prompts, 8, FULL) is None
    assert not subject.engine.has_work


def test_a_policy_that_fails_leaves_nothing_behind(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvikk.compress.policies.random import Random

    monkeypatch.setattr(Random, "score", lambda self, view: torch.full((2, 1), torch.nan))
    with pytest.raises(PolicyFailed):
        subject.sit([Exam(prompt=[1] * 300, free=9)] * 3, {"policy": "random", "budget": 0.2} | SMALL)
    assert not subject.engine.has_work
    assert subject.engine.pool.held == 0


def test_texts_that_are_too_few_or_nowhere_are_refused_with_the_way_out(subject: Subject, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="lower --documents or --length"):
        documents("prose", 3, 10**6, subject.encode)
    with pytest.raises(ConfigError, match="and no folder"):
        documents("nowhere", 1, 10, subject.encode)
    (tmp_path / "b.txt").write_text("two " * 50)
    (tmp_path / "a.txt").write_text("one " * 50)
    (tmp_path / "short.txt").write_text("no")
    found = documents(str(tmp_path), 2, 100, subject.encode)
    assert [(document.kind, document.name) for document in found] == [
        (str(tmp_path), "a.txt"),
        (str(tmp_path), "b.txt"),
    ]

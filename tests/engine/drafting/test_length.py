"""The lengths that give the most tokens per second: against every choice there is, and the model's known figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvikk.engine.drafting import Fallback, RoundCosts, best_lengths, fitting
from kvikk.engine.drafting.length import fallbacks

SECONDS = st.floats(1e-6, 1.0)
COSTS = st.builds(
    RoundCosts,
    draft_step_s=st.just(0.0) | SECONDS,
    draft_row_s=st.just(0.0) | st.floats(1e-6, 0.1),
    verify_s=SECONDS,
    verify_token_s=st.just(0.0) | st.floats(1e-6, 0.1),
    plain_s=SECONDS,
).map(lambda costs: replace(costs, verify_s=costs.plain_s + costs.verify_s))
ROWS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4)), min_size=1, max_size=4)


def expected(acceptance: float, length: int) -> float:
    """Accepted tokens of a draft."""
    return length if acceptance == 1 else acceptance * (1 - acceptance**length) / (1 - acceptance)


def rate(acceptances: list[float], lengths: list[int], costs: RoundCosts) -> float:
    """Tokens per second of a batch, told off the definition of a round."""
    if not any(lengths):
        return len(lengths) / costs.plain_s
    seconds = costs.verify_s + costs.verify_token_s * sum(lengths)
    for step in range(max(lengths)):
        seconds += costs.draft_step_s + costs.draft_row_s * sum(length > step for length in lengths)
    return sum(1 + expected(a, length) for a, length in zip(acceptances, lengths, strict=True)) / seconds


@settings(max_examples=400, deadline=None)
@given(ROWS, COSTS)
def test_no_choice_of_lengths_is_better(rows: list[tuple[float, int]], costs: RoundCosts) -> None:
    acceptances, most = [a for a, _ in rows], [limit for _, limit in rows]
    best = best_lengths(acceptances, most, costs)
    highest = max(rate(acceptances, list(lengths), costs) for lengths in product(*(range(m + 1) for m in most)))
    assert rate(acceptances, best.lengths, costs) == pytest.approx(highest)
    assert best.tokens_per_s == pytest.approx(highest)
    assert best.plain_tokens_per_s == pytest.approx(len(rows) / costs.plain_s)
    assert all(0 <= length <= limit for length, limit in zip(best.lengths, most, strict=True))


def test_rows_that_are_accepted_more_often_draft_more_and_hopeless_ones_not_at_all() -> None:
    costs = RoundCosts(draft_step_s=1e-3, draft_row_s=2e-5, verify_s=10e-3, verify_token_s=1e-4, plain_s=10e-3)
    lengths = best_lengths([0.99, 0.9, 0.6, 0.02] * 8, [16] * 32, costs).lengths
    assert lengths[:4] == sorted(lengths[:4], reverse=True)
    assert lengths[0] > lengths[2] > 0 == lengths[3]


PLAIN_MS = {16: 2.04, 64: 4.05, 256: 12.3, 512: 23.4}
ACCEPTANCES = (0.90, 0.93, 0.95, 0.97, 0.99)
TABLE = {
    (16, 1.33): ((1.06, 1.09, 1.12, 1.16, 1.22), (1, 2, 7)),
    (64, 1.50): ((1.14, 1.18, 1.21, 1.26, 1.34), (2, 3, 8)),
    (64, 1.99): ((1.34, 1.41, 1.48, 1.56, 1.71), (3, 5, 12)),
    (64, 2.38): ((1.49, 1.59, 1.67, 1.79, 1.99), (4, 6, 14)),
    (256, 1.77): ((1.25, 1.31, 1.36, 1.43, 1.54), (3, 4, 11)),
    (256, 2.89): ((1.67, 1.80, 1.91, 2.06, 2.32), (4, 7, 17)),
    (256, 4.23): ((2.08, 2.28, 2.46, 2.71, 3.17), (6, 9, 22)),
    (256, 5.49): ((2.39, 2.66, 2.90, 3.26, 3.89), (7, 10, 26)),
    (512, 3.22): ((1.78, 1.93, 2.05, 2.23, 2.54), (5, 7, 19)),
    (512, 5.12): ((2.30, 2.55, 2.78, 3.10, 3.68), (6, 10, 25)),
}
"""SmolLM2-135M with 7,680 tokens a row on an H200, modelled: (rows, plain step / draft step) to throughput over plain
at each acceptance, and the best lengths at .90, .95, .99. Worked out apart from this code, for the same kind of round.
"""


def h200(rows: int, ceiling: float) -> RoundCosts:
    """A verify step is a plain one, 0.12 ms, and 0.27 GFLOP at 400 TFLOP/s a draft; its reads hide its attention."""
    plain = PLAIN_MS[rows] * 1e-3
    return RoundCosts(
        draft_step_s=plain / ceiling,
        draft_row_s=0,
        verify_s=plain + 0.12e-3,
        verify_token_s=0.27e9 / 400e12,
        plain_s=plain,
    )


@pytest.mark.parametrize(("rows", "ceiling"), TABLE)
def test_the_known_figures_for_an_h200_come_out(rows: int, ceiling: float) -> None:
    costs, (speedups, lengths) = h200(rows, ceiling), TABLE[rows, ceiling]
    for acceptance, speedup in zip(ACCEPTANCES, speedups, strict=True):
        best = best_lengths([acceptance] * rows, [32] * rows, costs)
        assert best.tokens_per_s / best.plain_tokens_per_s == pytest.approx(speedup, rel=0.01)
    for acceptance, length in zip((0.90, 0.95, 0.99), lengths, strict=True):
        best = best_lengths([acceptance] * rows, [32] * rows, costs)
        assert best.lengths == [pytest.approx(length, abs=1)] * rows


def test_drafts_that_are_free_are_worth_trying_at_any_acceptance_while_verifying_them_is() -> None:
    costs = RoundCosts(draft_step_s=0, draft_row_s=0, verify_s=4e-3, verify_token_s=1e-6, plain_s=4e-3)
    assert min(best_lengths([0.1] * 16, [4] * 16, costs).lengths) >= 1


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 1), st.integers(1, 6), st.integers(1, 8), COSTS)
def test_a_reason_says_what_a_batch_of_such_rows_alone_would_do(
    acceptance: float, rows: int, most: int, costs: RoundCosts
) -> None:
    alike, flawless = (
        max(rate([a] * rows, [length] * rows, costs) for length in range(1, most + 1)) * costs.plain_s / rows
        for a in (acceptance, 1.0)
    )
    assume(min(abs(alike - 1), abs(flawless - 1)) > 1e-9)
    reason = fallbacks([acceptance] * rows, most, costs)[0]
    assert reason is (Fallback.COST if flawless < 1 else Fallback.MATES if alike > 1 else Fallback.MISSES)


def test_why_a_batch_does_not_draft_is_told_row_by_row() -> None:
    costs = h200(16, 2.0)
    assert fallbacks([0.2, 0.97, 0.2], 16, costs) == [Fallback.MISSES, Fallback.MATES, Fallback.MISSES]
    assert fallbacks([0.2, 0.97], 16, h200(16, 0.9)) == [Fallback.COST] * 2
    assert best_lengths([0.2] * 15 + [0.97], [16] * 16, costs).lengths == [0] * 16


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(-5, 300))
def test_drafts_that_do_not_fit_are_cut_to_one_length_and_no_more_than_they_must(lengths: list[int], room: int) -> None:
    cut = fitting(lengths, room)
    if sum(lengths) <= room:
        assert cut == lengths
        return
    longest = max(cut)
    assert cut == [min(length, longest) for length in lengths]
    assert sum(cut) <= max(0, room)
    assert sum(min(length, longest + 1) for length in lengths) > room

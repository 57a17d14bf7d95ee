"""Rounds of a batch whose drafters are good, bad or change, replayed by chance."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from engine.drafting.test_acceptance import accepted_of
from kvikk.engine.drafting import (
    SMALL_CACHE,
    Acceptance,
    Fallback,
    Prior,
    RoundCosts,
    RowDrafts,
    StepKind,
    StepTimes,
    best_lengths,
    plan_round,
)
from kvikk.engine.drafting.rounds import DEFAULT_LENGTH, LONGEST_PATIENCE, PROBE_LENGTH, SHORTEST_PATIENCE

MOST = 16
LARGE = RoundCosts(draft_step_s=0.35, draft_row_s=0, verify_s=1.0, verify_token_s=5e-5, plain_s=1.0)
SMALL = RoundCosts(draft_step_s=0.75, draft_row_s=0, verify_s=1.0, verify_token_s=3e-4, plain_s=1.0)
DEAR = RoundCosts(draft_step_s=1.1, draft_row_s=0, verify_s=1.0, verify_token_s=3e-4, plain_s=1.0)
"""In plain steps: a large batch of long rows, a small one, and one whose draft steps take longer than plain ones."""


@dataclass
class Batch:
    """Rows that decode, and the seconds and tokens it took."""

    truths: list[float]
    costs: RoundCosts
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    seconds: float = 0.0
    tokens: int = 0
    reasons: list[tuple[int, Fallback]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [RowDrafts(Acceptance(SMALL_CACHE)) for _ in self.truths]

    def round(self, believed: RoundCosts | None) -> list[int]:
        """One round, planned by what its costs are believed to be."""
        plan = plan_round(self.rows, [MOST] * len(self.rows), believed)
        self.reasons += plan.fell_back
        lengths, costs = plan.lengths, self.costs
        drafting = max(lengths) * costs.draft_step_s + sum(lengths) * costs.token_s
        self.seconds += costs.verify_s + drafting if any(lengths) else costs.plain_s
        for row, truth, length in zip(self.rows, self.truths, lengths, strict=True):
            accepted = accepted_of(length, truth, self.chance)
            row.note_round(length, accepted)
            self.tokens += accepted + 1
        return lengths

    def run(self, rounds: int) -> float:
        """Tokens per second of so many rounds."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(rounds):
            self.round(self.costs)
        return (self.tokens - tokens) / (self.seconds - seconds)

    @property
    def plain(self) -> float:
        return len(self.rows) / self.costs.plain_s


def test_while_nothing_was_measured_every_row_drafts_the_default() -> None:
    rows = [RowDrafts(Acceptance(SMALL_CACHE)) for _ in range(3)]
    plan = plan_round(rows, [MOST, 2, 0], None)
    assert plan.lengths == [DEFAULT_LENGTH, 2, 0]
    assert plan.best is None
    assert plan.fell_back == []


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize(
    ("truth", "costs", "rounds"), [(0.0, LARGE, 16), (0.0, SMALL, 4), (0.2, LARGE, 48), (0.2, SMALL, 8)]
)
def test_a_bad_drafter_is_given_up_within_some_rounds_and_costs_little_from_then_on(
    rows: int, truth: float, costs: RoundCosts, rounds: int
) -> None:
    batch = Batch([truth] * rows, costs)
    lengths = [batch.round(batch.costs) for _ in range(rounds)]
    assert max(lengths[0]) > 0
    assert max(lengths[-1]) == 0
    assert batch.run(2000) > 0.97 * batch.plain


def test_each_row_that_is_given_up_is_named_once_with_the_reason() -> None:
    batch = Batch([0.1] * 4, LARGE)
    batch.run(400)
    assert sorted(index for index, _ in batch.reasons) == [0, 1, 2, 3]
    assert Fallback.MISSES in {reason for _, reason in batch.reasons}
    assert {reason for _, reason in batch.reasons} <= {Fallback.MISSES, Fallback.MATES}


def test_a_bad_row_among_good_ones_stops_drafting_alone() -> None:
    batch = Batch(
        [0.98] * 15 + [0.0], RoundCosts(draft_step_s=0.3, draft_row_s=0.005, verify_s=1, verify_token_s=0.01, plain_s=1)
    )
    batch.run(30)
    lengths = batch.round(batch.costs)
    assert lengths[-1] in (0, PROBE_LENGTH)
    assert batch.rows[-1].fallback is Fallback.MISSES
    assert min(lengths[:-1]) >= 3
    assert batch.reasons == [(15, Fallback.MISSES)]


def test_where_drafting_takes_too_long_no_row_drafts_and_the_reason_is_its_cost() -> None:
    batch = Batch([1.0] * 8, DEAR)
    assert batch.round(batch.costs) == [0] * 8
    assert batch.reasons == [(index, Fallback.COST) for index in range(8)]
    assert batch.run(4000) > 0.97 * batch.plain


@pytest.mark.parametrize("rows", [1, 16])
def test_a_drafter_that_becomes_good_is_found_again(rows: int) -> None:
    batch = Batch([0.1] * rows, LARGE)
    batch.run(1500)
    assert all(row.fallback is not None for row in batch.rows)
    batch.truths = [0.97] * rows
    batch.run(LONGEST_PATIENCE + 8 * SHORTEST_PATIENCE)
    assert batch.run(200) > 1.4 * batch.plain
    assert all(row.fallback is None for row in batch.rows)


def test_rows_that_fell_back_are_tried_again_together() -> None:
    batch = Batch([0.0] * 8, SMALL)
    probes = [lengths for lengths in (batch.round(batch.costs) for _ in range(1000)) if any(lengths)]
    assert any(lengths == [PROBE_LENGTH] * 8 for lengths in probes)
    late = [lengths for lengths in (batch.round(batch.costs) for _ in range(2 * LONGEST_PATIENCE)) if any(lengths)]
    assert 1 <= len(late) <= 3
    assert all(lengths == [PROBE_LENGTH] * 8 for lengths in late)


def test_a_lucky_row_among_many_has_no_one_wait_for_it() -> None:
    batch = Batch([0.0] * 8, SMALL)
    batch.run(1000)
    for row in batch.rows:
        row.idle_tokens = 0
    batch.rows[3].idle_tokens = LONGEST_PATIENCE
    assert batch.round(batch.costs) == [0] * 8
    batch.rows[4].idle_tokens = LONGEST_PATIENCE
    assert batch.round(batch.costs) == [PROBE_LENGTH] * 8


def test_a_probe_never_makes_a_round_longer_that_others_draft_in() -> None:
    costs = RoundCosts(draft_step_s=0.3, draft_row_s=0.01, verify_s=1, verify_token_s=0.01, plain_s=1)
    for mean, expected in ((0.55, [1, 1, 1, 1]), (0.9, [4, 4, 4, PROBE_LENGTH])):
        rows = [RowDrafts(Acceptance(Prior(mean=mean, weight=8))) for _ in range(3)]
        rows.append(RowDrafts(Acceptance(Prior(mean=0.001, weight=8)), idle_tokens=SHORTEST_PATIENCE))
        assert plan_round(rows, [MOST] * 4, costs).lengths == expected


def fallen(fallback: Fallback) -> RowDrafts:
    """A row that has fallen back and was just tried again."""
    row = RowDrafts(Acceptance(SMALL_CACHE), fallback, SHORTEST_PATIENCE)
    for _ in range(100):
        row.note_round(1, 0)
    row.probe()
    return row


def test_a_probe_that_misses_is_followed_by_one_later_and_one_that_does_not_by_one_soon() -> None:
    row = fallen(Fallback.MISSES)
    row.note_round(2, 1)
    assert row.patience == 2 * SHORTEST_PATIENCE
    for _ in range(10):
        row.probe()
        row.note_round(2, 0)
    assert row.patience == LONGEST_PATIENCE
    row.probe()
    row.note_round(2, 2)
    assert row.patience == SHORTEST_PATIENCE


@pytest.mark.parametrize("reason", [Fallback.COST, Fallback.MATES])
def test_a_probe_that_says_nothing_against_the_reason_is_not_soon_repeated(reason: Fallback) -> None:
    row = fallen(reason)
    row.note_round(2, 2)
    assert row.patience == 2 * SHORTEST_PATIENCE


def test_a_few_probes_that_are_accepted_outweigh_a_long_history_of_misses() -> None:
    row = fallen(Fallback.MISSES)
    assert row.acceptance.probability < 0.05
    for _ in range(4):
        row.probe()
        row.note_round(2, 2)
    assert row.acceptance.probability > 0.7


def test_a_miss_of_a_row_that_drafts_again_is_not_held_against_a_probe_that_never_came_to_pass() -> None:
    row = fallen(Fallback.MISSES)
    row.note_round(0, 0)
    row.draft()
    row.note_round(4, 3)
    assert row.patience == SHORTEST_PATIENCE


def test_a_row_without_room_to_draft_has_not_fallen_back() -> None:
    rows = [RowDrafts(Acceptance(SMALL_CACHE)) for _ in range(2)]
    plan = plan_round(rows, [0, 8], LARGE)
    assert plan.lengths[0] == 0 < plan.lengths[1]
    assert rows[0].fallback is None
    assert plan.fell_back == []


@pytest.mark.parametrize("costs", [LARGE, SMALL])
@pytest.mark.parametrize("truths", [[0.95] * 64, [0.97] * 32 + [0.70] * 32, [0.8] * 64])
def test_lengths_by_running_estimates_do_nearly_as_well_as_by_the_truth(truths: list[float], costs: RoundCosts) -> None:
    batch = Batch(truths, costs)
    batch.run(20)
    best = best_lengths(truths, [MOST] * len(truths), costs)
    assert batch.run(400) > 0.95 * best.tokens_per_s


def test_equal_batches_get_equal_plans() -> None:
    first, second = (Batch([0.9, 0.3, 0.95], LARGE) for _ in range(2))
    assert [first.round(LARGE) for _ in range(300)] == [second.round(LARGE) for _ in range(300)]


@pytest.mark.parametrize("costs", [LARGE, SMALL, DEAR])
@pytest.mark.parametrize("truth", [0.1, 0.9, 0.97])
def test_from_nothing_measured_a_batch_comes_near_the_best_there_is(costs: RoundCosts, truth: float) -> None:
    """The rows' lengths and the times of steps are learnt at once, from noisy steps of which some pause or compile."""
    chance, times = random.Random(1), StepTimes()
    batch = Batch([truth] * 16, costs, chance)

    def measure(kind: StepKind, rows: int, drafted: int, seconds: float) -> None:
        noise = 1 + abs(chance.gauss(0, 0.05)) + (chance.random() < 0.03) * 20
        times.record(kind, rows=rows, tokens=rows + drafted, seconds=seconds * noise)

    def run(rounds: int) -> float:
        seconds, tokens = batch.seconds, batch.tokens
        for _ in range(rounds):
            lengths = batch.round(times.costs(16))
            if not any(lengths):
                measure(StepKind.PLAIN, 16, 0, costs.plain_s)
                continue
            for step in range(max(lengths)):
                drafting = sum(length > step for length in lengths)
                measure(StepKind.DRAFT, drafting, 0, costs.draft_step_s + drafting * costs.draft_row_s)
            measure(StepKind.VERIFY, 16, sum(lengths), costs.verify_s + sum(lengths) * costs.verify_token_s)
        return (batch.tokens - tokens) / (batch.seconds - seconds)

    run(100)
    best = best_lengths([truth] * 16, [MOST] * 16, costs)
    assert run(1000) > 0.95 * best.tokens_per_s

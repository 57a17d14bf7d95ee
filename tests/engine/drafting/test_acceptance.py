"""What a row has shown of its drafter."""

from __future__ import annotations

import random

import pytest

from kvikk.engine.drafting import NGRAM, SMALL_CACHE, Acceptance, Prior
from kvikk.engine.drafting.acceptance import DOUBT_TOKENS
from kvikk.errors import ConfigError


def accepted_of(drafted: int, probability: float, chance: random.Random) -> int:
    accepted = 0
    while accepted < drafted and chance.random() < probability:
        accepted += 1
    return accepted


def test_a_row_that_has_shown_nothing_is_taken_to_be_as_its_prior_says() -> None:
    assert Acceptance(SMALL_CACHE).probability == pytest.approx(0.95)
    assert Acceptance(NGRAM).probability == pytest.approx(NGRAM.mean)


@pytest.mark.parametrize("probability", [0.2, 0.7, 0.95, 0.99])
@pytest.mark.parametrize("drafted", [1, 4, 16])
def test_the_estimate_comes_to_the_truth_whatever_is_drafted(probability: float, drafted: int) -> None:
    chance = random.Random(drafted)
    acceptance, total, rounds = Acceptance(SMALL_CACHE), 0.0, 4000
    for _ in range(100):
        acceptance.observe(drafted, accepted_of(drafted, probability, chance))
    for _ in range(rounds):
        acceptance.observe(drafted, accepted_of(drafted, probability, chance))
        total += acceptance.probability
    assert total / rounds == pytest.approx(probability, abs=0.02)


def test_what_follows_the_first_miss_is_no_evidence() -> None:
    short, long = Acceptance(SMALL_CACHE), Acceptance(SMALL_CACHE)
    short.observe(3, 2)
    long.observe(16, 2)
    assert short.probability == long.probability


def test_a_round_without_drafts_shows_nothing() -> None:
    acceptance = Acceptance(SMALL_CACHE)
    acceptance.observe(0, 0)
    assert acceptance.probability == pytest.approx(0.95)


def test_a_text_that_changes_is_followed() -> None:
    acceptance = Acceptance(SMALL_CACHE)
    for _ in range(200):
        acceptance.observe(4, 4)
    assert acceptance.probability > 0.99
    for _ in range(64):
        acceptance.observe(4, 0)
    assert acceptance.probability < 0.4


def test_one_miss_is_not_believed_and_some_in_a_row_are() -> None:
    acceptance = Acceptance(SMALL_CACHE)
    acceptance.observe(4, 0)
    assert acceptance.probability > 0.8
    for _ in range(7):
        acceptance.observe(4, 0)
    assert acceptance.probability < 0.5


def test_doubt_leaves_the_estimate_and_lets_new_evidence_move_it() -> None:
    sure, doubted = Acceptance(SMALL_CACHE), Acceptance(SMALL_CACHE)
    for acceptance in (sure, doubted):
        for _ in range(100):
            acceptance.observe(1, 0)
    before = doubted.probability
    doubted.doubt()
    assert doubted.probability == pytest.approx(before)
    for acceptance in (sure, doubted):
        acceptance.observe(4, 4)
    assert sure.probability < 0.15
    assert doubted.probability == pytest.approx(4 / (DOUBT_TOKENS + 4), abs=0.05)


def test_doubt_makes_no_evidence() -> None:
    fresh, doubted = Acceptance(Prior(mean=0.5, weight=2)), Acceptance(Prior(mean=0.5, weight=2))
    doubted.doubt()
    for acceptance in (fresh, doubted):
        acceptance.observe(1, 1)
    assert doubted.probability == fresh.probability


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (2, -1)])
def test_more_accepted_than_drafted_is_refused(drafted: int, accepted: int) -> None:
    with pytest.raises(ValueError, match=f"{accepted} of {drafted} drafted tokens"):
        Acceptance(SMALL_CACHE).observe(drafted, accepted)


@pytest.mark.parametrize(("mean", "weight"), [(0.0, 1.0), (1.0, 1.0), (0.5, 0.0)])
def test_a_prior_that_could_never_change_or_says_nothing_is_refused(mean: float, weight: float) -> None:
    with pytest.raises(ConfigError, match="prior"):
        Prior(mean=mean, weight=weight)

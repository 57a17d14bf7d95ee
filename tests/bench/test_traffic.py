"""Requests are sent when their turn comes, and no more at once than allowed."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from kvikk.bench.answer import Answer
from kvikk.bench.traffic import TrafficConfig, due_times, run_load
from kvikk.errors import ConfigError


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert due_times(TrafficConfig(), 3, seed=0) == [0.0, 0.0, 0.0]


def test_an_infinite_burstiness_is_a_clock() -> None:
    due = due_times(TrafficConfig(request_rate=2, burstiness=float("inf")), 4, seed=0)
    assert due == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_any_seed_sends_at_the_same_rate_and_one_seed_at_the_same_times() -> None:
    config = TrafficConfig(request_rate=5)
    runs = [due_times(config, 1000, seed) for seed in (0, 1, 0)]
    assert runs[0] == runs[2] != runs[1]
    assert [run[-1] for run in runs] == pytest.approx([200.0] * 3)


def test_gaps_spread_as_the_gamma_distribution_of_the_burstiness() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        due = due_times(TrafficConfig(request_rate=1, burstiness=burstiness), 20_000, seed=1)
        gaps = np.diff(due)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"request_rate": 0.0}, "--request-rate 0.0"),
        ({"request_rate": float("nan")}, "--request-rate nan"),
        ({"burstiness": -1.0}, "--burstiness -1.0"),
        ({"max_concurrency": 0}, "--max-concurrency 0"),
    ],
)
def test_a_load_that_cannot_be_is_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrafficConfig(**options)  # type: ignore[arg-type]


def load(due_s: list[float], max_concurrency: int | None) -> tuple[list[Answer], int]:
    """Run a load whose requests take 10 ms; the answers, and how many were underway at most."""
    underway = most = 0

    async def ask(index: int, due: float) -> Answer:
        nonlocal underway, most
        underway += 1
        most = max(most, underway)
        sent = time.monotonic()
        await asyncio.sleep(0.01)
        underway -= 1
        return Answer(due_s=due, sent_s=sent, done_s=time.monotonic(), text=str(index))

    return asyncio.run(run_load(ask, due_s, max_concurrency, time.monotonic)), most


def test_no_more_requests_are_underway_than_allowed_and_answers_keep_their_order() -> None:
    answers, most = load([0.0] * 10, 3)
    assert most == 3
    assert [answer.text for answer in answers] == [str(index) for index in range(10)]
    assert load([0.0] * 10, None)[1] == 10


def test_the_time_of_a_request_begins_when_it_is_sent_and_its_wait_is_kept() -> None:
    answers, _ = load([0.0, 0.0, 0.0], 1)
    waits = [answer.sent_s - answer.due_s for answer in answers]
    assert waits[2] >= waits[1] + 0.009 >= waits[0] + 0.018
    assert min(answer.e2el_s for answer in answers) >= 0.009


def test_no_request_is_sent_before_its_turn() -> None:
    answers, _ = load([0.05, 0.0, 0.02], None)
    assert all(answer.sent_s >= answer.due_s - 1e-3 for answer in answers)
    assert answers[1].sent_s < answers[2].sent_s < answers[0].sent_s

from __future__ import annotations

from kvikk.tier.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_after_a_failure_nothing_passes_until_the_pause_is_over_and_then_one_attempt() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    assert breaker.allows()
    assert breaker.note_failure()
    assert breaker.is_open
    assert not breaker.allows()
    clock.now += FIRST_PAUSE_S
    assert not breaker.is_open
    assert [breaker.allows() for _ in range(3)] == [True, False, False]


def test_pauses_double_up_to_a_limit_and_a_success_ends_them() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    pauses = []
    for _ in range(12):
        assert breaker.allows()
        breaker.note_failure()
        pauses.append(breaker.pause_s)
        clock.now += breaker.pause_s
    assert pauses[:4] == [FIRST_PAUSE_S * 2**n for n in range(4)]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert breaker.allows()
    breaker.note_success()
    assert [breaker.allows() for _ in range(3)] == [True, True, True]
    breaker.note_failure()
    assert breaker.pause_s == FIRST_PAUSE_S


def test_attempts_that_were_made_together_fail_together() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    assert [breaker.note_failure() for _ in range(5)] == [True, False, False, False, False]
    assert breaker.pause_s == FIRST_PAUSE_S


def test_an_attempt_that_is_never_heard_of_again_is_followed_by_another() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.note_failure()
    clock.now += FIRST_PAUSE_S
    assert breaker.allows()
    clock.now += FIRST_PAUSE_S
    assert breaker.allows()

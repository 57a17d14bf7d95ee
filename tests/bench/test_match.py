"""Texts are compared token by token."""

from __future__ import annotations

from typing import Any

from kvikk.bench.match import TextMatch, match_texts


def test_the_share_is_of_the_longer_texts_positions(words: Any) -> None:
    match = match_texts([" one two three", " one"], [" one two four", " one two"], words)
    assert match == TextMatch(compared=2, identical=0, token_match=3 / 5)


def test_equal_texts_match_wholly_empty_ones_too(words: Any) -> None:
    assert match_texts([" a b", ""], [" a b", ""], words) == TextMatch(compared=2, identical=2, token_match=1.0)
    assert match_texts([""], [""], words).token_match == 1.0


def test_requests_that_failed_on_either_side_are_not_compared(words: Any) -> None:
    assert match_texts([None, " a", " b"], [" a", None, " b"], words).compared == 1
    assert match_texts([None], [" a"], words) == TextMatch(compared=0, identical=0, token_match=None)

"""Prompt look-up, against a twin that searches the whole text each time."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvikk.engine.drafting import PromptLookup, ngram
from kvikk.errors import ConfigError

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def naive(tokens: list[int], most: int, longest: int, least: int) -> list[int]:
    for size in range(longest, least - 1, -1):
        for stop in range(len(tokens) - 1, size - 1, -1):
            if tokens[stop - size : stop] == tokens[len(tokens) - size :]:
                text = list(tokens)
                for step in range(most):
                    text.append(text[stop + step])
                return text[len(tokens) :]
    return []


@settings(max_examples=500, deadline=None)
@given(TOKENS, st.lists(TOKENS, max_size=5), st.integers(1, 3), st.integers(0, 3), st.integers(0, 12))
def test_a_proposal_is_what_a_search_of_the_whole_text_finds(
    prompt: list[int], pieces: list[list[int]], least: int, more: int, most: int
) -> None:
    lookup, tokens = PromptLookup(prompt, longest=least + more, least=least), list(prompt)
    assert lookup.propose(most) == naive(tokens, most, least + more, least)
    for piece in pieces:
        lookup.extend(piece)
        tokens += piece
        assert len(lookup) == len(tokens)
        assert lookup.propose(most) == naive(tokens, most, least + more, least)


def test_it_is_found_alike_wherever_the_prompt_ends() -> None:
    tokens = np.random.default_rng(0).integers(0, 200, 4000).tolist()
    tokens += tokens[1000:1020]
    proposals = []
    for prompt in (0, 1, 1010, 4010, len(tokens)):
        lookup = PromptLookup(tokens[:prompt])
        lookup.extend(tokens[prompt:])
        proposals.append(lookup.propose(8))
    assert proposals == [tokens[1020:1028]] * 5


def test_a_longer_match_is_preferred_to_a_later_one_and_of_equals_the_latest() -> None:
    assert PromptLookup([1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3]).propose(1) == [50]
    assert PromptLookup([1, 2, 3, 50, 1, 2, 3, 60, 1, 2, 3]).propose(1) == [60]


def test_a_text_that_repeats_is_taken_to_go_on_repeating() -> None:
    assert PromptLookup([8, 1, 2, 3, 1, 2, 3, 1, 2]).propose(7) == [3, 1, 2, 3, 1, 2, 3]
    assert PromptLookup([5, 5, 5]).propose(4) == [5, 5, 5, 5]


def test_nothing_is_proposed_after_what_was_never_there() -> None:
    assert PromptLookup([]).propose(4) == []
    assert PromptLookup([1, 2]).propose(4) == []
    assert PromptLookup([1, 2, 3, 9, 3]).propose(4) == []


def test_rows_that_fork_share_what_was_before_and_nothing_after() -> None:
    first = PromptLookup([1, 2, 3, 4])
    first.extend([5, 1])
    second = first.copy()
    first.extend([2])
    second.extend([5, 1, 2, 6, 1, 2])
    assert (len(first), len(second)) == (7, 12)
    assert first.propose(3) == [3, 4, 5]
    assert second.propose(3) == [6, 1, 2]
    assert second._prompt is first._prompt, "the index is the large part"


def test_the_largest_token_ids_are_told_apart() -> None:
    large = 2**31 - 1
    assert PromptLookup([large, large - 1, 7, large - 1, large, 8, large, large - 1]).propose(1) == [7]


@settings(max_examples=200, deadline=None)
@given(TOKENS, TOKENS)
def test_where_hashes_are_alike_only_what_followed_the_same_tokens_is_proposed(
    prompt: list[int], text: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram, "FACTOR", 1)
        lookup = PromptLookup(prompt)
        lookup.extend(text)
        proposal = lookup.propose(1)
    tokens = prompt + text
    followed = {tokens[stop] for stop in range(2, len(tokens)) if tokens[stop - 2 : stop] == tokens[-2:]}
    assert set(proposal) <= followed


@pytest.mark.parametrize(("longest", "least"), [(1, 2), (3, 0)])
def test_lengths_that_are_no_range_are_refused_with_their_values(longest: int, least: int) -> None:
    with pytest.raises(ConfigError, match=f"n-grams of {least} to {longest} tokens"):
        PromptLookup([1], longest=longest, least=least)


def test_a_long_prompt_is_indexed_and_asked_in_little_time() -> None:
    """Measured: 12 to 25 ms for 100,000 tokens, 2 to 8 us a call, 1 us a committed token; limits for busy machines."""
    tokens = np.random.default_rng(0).integers(0, 50_000, 100_000).tolist()
    assert best_of(5, lambda: PromptLookup(tokens)) < 0.2
    lookup = PromptLookup(tokens)
    for end in (tokens[500:520], [1, 2, 3, 4], [7] * 20):
        lookup.extend(end)
        assert best_of(5, lambda: [lookup.propose(8) for _ in range(1000)]) < 0.06
    assert best_of(5, lambda: lookup.extend(tokens[:1000])) < 0.02


def best_of(times: int, call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(times):
        start = time.thread_time()
        call()
        seconds.append(time.thread_time() - start)
    return min(seconds)

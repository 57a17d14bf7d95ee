"""Numbers come in as few runs as there are, and every one that is given back can be had again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvikk.memory.runs import RunPool, runs_of


def lengths(numbers: set[int]) -> list[int]:
    """Of the runs of a set, the longest first."""
    ordered = np.array(sorted(numbers), dtype=np.int64)
    return sorted((stop - start for start, stop in runs_of(ordered)), reverse=True)


def fewest(free: set[int], count: int) -> int:
    """Runs that so many numbers take at the least."""
    used = 0
    for length in lengths(free):
        if count <= 0:
            break
        used, count = used + 1, count - length
    return used


@given(st.integers(0, 40), st.data())
def test_whatever_is_free_can_be_had_once_and_in_no_more_runs_than_it_takes(total: int, data: st.DataObject) -> None:
    pool, free, held = RunPool(total), set(range(total)), []
    for _ in range(data.draw(st.integers(0, 30))):
        if held and data.draw(st.booleans()):
            numbers = held.pop(data.draw(st.integers(0, len(held) - 1)))
            given_back = data.draw(st.permutations(numbers))
            kept = given_back[data.draw(st.integers(0, len(numbers))) :]
            pool.give_back(given_back[: len(given_back) - len(kept)])
            free |= set(given_back) - set(kept)
            if kept:
                held.append(kept)
        else:
            count = data.draw(st.integers(0, len(free)))
            taken = pool.take(count)
            assert len(taken) == len(set(taken)) == count
            assert set(taken) <= free
            assert len(runs_of(np.array(taken, dtype=np.int64))) == fewest(free, count)
            free -= set(taken)
            if taken:
                held.append(taken)
        assert pool.free == len(free)
    assert set(pool.take(pool.free)) == free


def test_the_shortest_run_that_is_long_enough_is_used_and_longer_ones_stay_whole() -> None:
    pool = RunPool(20)
    pool.take(20)
    pool.give_back([*range(2, 7), *range(8, 11), *range(12, 20)])
    assert pool.take(3) == [8, 9, 10]
    assert pool.take(4) == [2, 3, 4, 5]
    assert pool.take(9) == [*range(12, 20), 6], "the longest first, where none is long enough"


def test_what_is_given_back_in_pieces_is_one_run_again() -> None:
    pool = RunPool(6)
    pool.take(6)
    for number in (3, 0, 5, 1, 4, 2):
        pool.give_back([number])
    assert pool.take(6) == [0, 1, 2, 3, 4, 5]


def test_more_than_is_free_is_refused_and_nothing_taken() -> None:
    pool = RunPool(3)
    with pytest.raises(ValueError, match="4 numbers asked for, 3 are free"):
        pool.take(4)
    assert pool.free == 3


def test_a_run_of_several_sequences_ends_where_any_of_them_does() -> None:
    one, other = np.array([4, 5, 6, 9, 10]), np.array([0, 1, 5, 6, 7])
    assert runs_of(one).tolist() == [[0, 3], [3, 5]]
    assert runs_of(one, other).tolist() == [[0, 2], [2, 3], [3, 5]]
    assert runs_of(np.array([], dtype=np.int64)).tolist() == []

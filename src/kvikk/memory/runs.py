"""Numbers given out in runs: slots that follow each other are copied by one call."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

import numpy as np

from kvikk.memory.body import IntArray


def runs_of(*numbers: IntArray) -> IntArray:
    """Where numbers go on one by one, in all of these `[n]` at once: `[runs, 2]`, start and stop of each, in order."""
    count = len(numbers[0])
    ends = np.zeros(max(0, count - 1), dtype=bool)
    for each in numbers:
        ends |= np.diff(each) != 1
    cuts = np.flatnonzero(ends) + 1
    runs = np.column_stack((np.append(0, cuts), np.append(cuts, count)))
    return runs if count else runs[:0]


class RunPool:
    """Gives out the numbers below a total, each to one user at a time, in as few runs as there are.

    What is given back is joined to its free neighbours.

    Args:
        total: how many there are.
    """

    def __init__(self, total: int) -> None:
        self.free = 0
        """Numbers that `take` can give."""
        self._by_length: list[tuple[int, int]] = []
        """Free runs as `(length, start)`, sorted."""
        self._lengths: dict[int, int] = {}
        """Of free runs, by their start."""
        self._starts: dict[int, int] = {}
        """Of free runs, by the number behind them."""
        if total:
            self._add(0, total)

    def take(self, count: int) -> list[int]:
        """So many numbers, ascending within each run.

        From the shortest run that is long enough; where none is, the longest ones go first.

        Raises:
            ValueError: fewer are free; nothing was taken.
        """
        if count > self.free:
            raise ValueError(f"{count} numbers asked for, {self.free} are free")
        taken: list[int] = []
        while count:
            fitting = bisect_left(self._by_length, (count, -1))
            length, start = self._by_length[min(fitting, len(self._by_length) - 1)]
            used = min(count, length)
            self._remove(start)
            if used < length:
                self._add(start + used, length - used)
            taken += range(start, start + used)
            count -= used
        return taken

    def give_back(self, numbers: Iterable[int]) -> None:
        """These are free again, in any order."""
        given = np.sort(np.fromiter(numbers, dtype=np.int64))
        for first, last in runs_of(given).tolist():
            start, stop = int(given[first]), int(given[last - 1]) + 1
            if stop in self._lengths:
                stop += self._remove(stop)
            if start in self._starts:
                start = self._starts[start]
                self._remove(start)
            self._add(start, stop - start)

    def _add(self, start: int, length: int) -> None:
        insort(self._by_length, (length, start))
        self._lengths[start] = length
        self._starts[start + length] = start
        self.free += length

    def _remove(self, start: int) -> int:
        """Its length."""
        length = self._lengths.pop(start)
        del self._starts[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        self.free -= length
        return length

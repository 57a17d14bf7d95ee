"""Which lengths decode attention is measured at: batches of rows by name, and the published serving traces.

Every draw is from torch's CPU generator, so a seed gives the same lengths on every machine. The distributions uniform,
bimodal, zipf, bucketed and homogeneous are those of PersistentKV (arXiv 2606.26666) and its published artifact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from kvikk.errors import ConfigError

MOST_ROWS: Final = 1_024
MOST_TOKENS: Final = 2**20
LONG_ROW: Final = 65_536
SHORT_ROW: Final = (128, 2_048)
RAGGED_SHARE: Final = 0.9
RAGGED_DECAY: Final = 0.6
"""Of a compressed row, KV head h keeps 0.9 * 0.6^h."""
SERVING_SEED: Final = 20_260_623
"""The first of the published traces' five held-out seeds."""


class Draw:
    """Seeded whole numbers, both ends of a range included."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, low: int, high: int) -> int:
        """The next number from `low` to `high`."""
        return int(torch.randint(low, high + 1, (1,), generator=self._generator))


def _uniform(index: int, draw: Draw) -> int:
    return draw(4_096, 32_768)


def _bimodal(index: int, draw: Draw) -> int:
    return draw(24_576, 65_536) if index % 4 == 0 else draw(2_048, 12_288)


def _zipf(index: int, draw: Draw) -> int:
    rank = draw(1, 32)
    return max(1_024, int(2_048 + 65_536 / rank**0.5) + draw(-512, 512))


def _homogeneous(index: int, draw: Draw) -> int:
    return 32_768


def _bucketed(index: int, draw: Draw) -> int:
    return (8_192, 16_384, 32_768, 65_536)[index % 4]


def _one_long(index: int, draw: Draw) -> int:
    return LONG_ROW if index == 0 else draw(2_048, 4_096)


def _short(index: int, draw: Draw) -> int:
    return draw(*SHORT_ROW)


def _single_8k(index: int, draw: Draw) -> int:
    return 8_192


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A way to draw a batch of rows.

    Args:
        length: of the row of this index.
        rows: fixed, or None for as many as are asked for.
        lanes: `whole` rows; `ragged`: each KV head keeps its own share of the row (`ragged_lengths`); `even`: whole
            rows of as many bytes as the ragged ones.
    """

    length: Callable[[int, Draw], int]
    rows: int | None = None
    lanes: Literal["whole", "ragged", "even"] = "whole"

    def sizes(self, asked: list[int]) -> list[int]:
        """The batch sizes it is measured at."""
        return asked if self.rows is None else [self.rows]

    def lengths(self, rows: int, seed: int) -> list[int]:
        """The lengths of so many rows; fewer rows are the first of more."""
        draw = Draw(seed)
        return [self.length(index, draw) for index in range(rows)]


TRACES: Final = {
    "homogeneous": Trace(length=_homogeneous),
    "uniform": Trace(length=_uniform),
    "bimodal": Trace(length=_bimodal),
    "zipf": Trace(length=_zipf),
    "one_long": Trace(length=_one_long),
    "short": Trace(length=_short),
    "single_8k": Trace(length=_single_8k, rows=1),
    "eight_short": Trace(length=_short, rows=8),
    "ragged": Trace(length=_uniform, lanes="ragged"),
    "ragged_even": Trace(length=_uniform, lanes="even"),
}


def ragged_lengths(length: int, kv_heads: int) -> list[int]:
    """What each KV head keeps of a row: 0.9 * 0.6^h of it, at least one token."""
    return [max(1, round(RAGGED_SHARE * RAGGED_DECAY**head * length)) for head in range(kv_heads)]


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A request in one step of a serving trace: its number, and its tokens at this step."""

    request: int
    length: int


@dataclass(frozen=True, kw_only=True)
class ServingTrace:
    """A published trace: requests of drawn lengths that come `rows` a step and decode for a drawn number of steps.

    A request whose turn comes while `rows` others decode waits, and loses what it would have decoded meanwhile.

    Args:
        prompt: tokens of the prompt, rounded up to whole pages of 16.
        decode: least and most tokens to decode, for the request of this index.
        rows: requests at once.
        requests: in all.
        steps: how many are measured, from the first.
    """

    prompt: Callable[[int, Draw], int]
    decode: Callable[[int], tuple[int, int]]
    rows: int
    requests: int
    steps: int

    def batches(self, seed: int) -> list[list[ServedRow]]:
        """The rows of each step. Draws are made request by request, its prompt first."""
        draw = Draw(SERVING_SEED + seed)
        drawn = []
        for index in range(self.requests):
            prompt = -(-self.prompt(index, draw) // 16) * 16
            drawn.append((index, prompt, index // self.rows, draw(*self.decode(index))))
        return [
            [
                ServedRow(index, prompt + step - arrival)
                for index, prompt, arrival, decode in drawn
                if 0 <= step - arrival < decode
            ][: self.rows]
            for step in range(self.steps)
        ]


def _eight_at_once(prompt: Callable[[int, Draw], int], decode: Callable[[int], tuple[int, int]]) -> ServingTrace:
    return ServingTrace(prompt=prompt, decode=decode, rows=8, requests=24, steps=48)


SERVING_TRACES: Final = {
    "persistentkv_bucketed": ServingTrace(
        prompt=_bucketed, decode=lambda index: (32, 96), rows=1, requests=16, steps=64
    ),
    "persistentkv_bimodal": _eight_at_once(_bimodal, lambda index: (32, 128) if index % 4 == 0 else (8, 64)),
    "persistentkv_uniform": _eight_at_once(_uniform, lambda index: (16, 96)),
    "persistentkv_zipf": _eight_at_once(_zipf, lambda index: (8, 128)),
}


def chosen_traces(names: str) -> list[str]:
    """The traces that a list separated by commas names; `all` is every one.

    Raises:
        ConfigError: a name that is none.
    """
    known = [*TRACES, *SERVING_TRACES]
    return known if names == "all" else checked_names("--trace", names, known)


def checked_names(flag: str, names: str, known: Sequence[str]) -> list[str]:
    """Names separated by commas, each of which must be known.

    Raises:
        ConfigError: one is not.
    """
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in known:
            raise ConfigError(f"{flag} {name!r} is not known: choose from {', '.join(known)}")
    return chosen


def checked_numbers(flag: str, numbers: str, *, least: int, most: int) -> list[int]:
    """Whole numbers separated by commas.

    Raises:
        ConfigError: what is written is no number, or out of the limits.
    """
    try:
        chosen = [int(number) for number in numbers.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {numbers!r} must be whole numbers separated by commas") from None
    for number in chosen:
        if not least <= number <= most:
            raise ConfigError(f"{flag} {number} is out of its limits: {least} to {most:,}")
    return chosen


def parse_lengths(text: str) -> list[int]:
    """Rows' lengths separated by commas, `2048x47` for 47 rows of 2,048.

    Raises:
        ConfigError: it is written otherwise, or there are too many rows or tokens.
    """
    lengths: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:x(\d+))?\s*", part)
        if match is None:
            raise ConfigError(f"--lengths {part!r} is no length: write 2048, or 2048x47 for 47 rows of it")
        lengths += [int(match[1])] * min(int(match[2] or 1), MOST_ROWS + 1)
    if not 0 < len(lengths) <= MOST_ROWS:
        raise ConfigError(f"--lengths names {len(lengths):,} rows or more: 1 to {MOST_ROWS:,} can be measured")
    for length in lengths:
        if not 0 < length <= MOST_TOKENS:
            raise ConfigError(f"--lengths {length:,} is out of its limits: 1 to {MOST_TOKENS:,}")
    return lengths

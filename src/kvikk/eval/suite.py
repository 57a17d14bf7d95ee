"""What a suite is, and the figures that all of them have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final, Protocol

from kvikk.eval.grid import Cell
from kvikk.eval.subject import Outcome

REFERENCE: Final = "reference"
NOTHING_EVICTED: Final = "nothing was evicted"

COLUMNS: Final = (
    "model", "device", "suite", "task", "question", "policy", "budget", "allocator", "rest", "trigger", "kv_dtype",
    "length", "samples", "kl_mean", "kl_median", "kl_p95", "top1", "perplexity", "full_perplexity",
    "score", "full_score", "counted", "kept_bytes", "kept_share", "evicted_tokens",
    "tokens_per_s", "full_tokens_per_s", "flag",
)  # fmt: skip
"""Of a row of results; None where a suite does not measure it."""

Row = dict[str, Any]
"""One result: flat, under the names of `COLUMNS`."""


class Suite(Protocol):
    """Measures one thing of every cell of a grid."""

    @property
    def name(self) -> str:
        """What `--suite` calls it."""
        ...

    def rows(self, cell: Cell) -> list[Row]:
        """Measure a cell: all its rows, without what names model, suite and cell.

        Raises:
            KvikkError: the engine refuses the cell, or its policy failed.
        """
        ...


def held_figures(outcomes: Sequence[Outcome], full: Sequence[Outcome], *, is_same_format: bool) -> Row:
    """What a request held on average, beside what it held with the full cache; and a word where nothing was lost.

    Args:
        outcomes: of the requests.
        full: of the same ones.
        is_same_format: whether K and V are stored alike in both, so that only eviction can make a difference.
    """
    held, whole = (fmean(outcome.held_bytes for outcome in each) for each in (outcomes, full))
    untouched = sum(outcome.evicted_tokens == 0 for outcome in outcomes) if is_same_format else 0
    flag = f"{NOTHING_EVICTED} from {untouched} of {len(outcomes)}" if untouched else None
    return {
        "kept_bytes": round(held),
        "kept_share": held / whole,
        "evicted_tokens": fmean(outcome.evicted_tokens for outcome in outcomes),
        "flag": NOTHING_EVICTED if untouched == len(outcomes) else flag,
    }


def complete(row: Mapping[str, Any]) -> Row:
    """A row with all columns, in their order."""
    return {column: row.get(column) for column in COLUMNS}

"""Results as tables in Markdown: quality beside bytes beside speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Final

from kvikk.eval.answers import PLACES, Tasks
from kvikk.eval.fidelity import Fidelity
from kvikk.eval.grid import FULL
from kvikk.eval.suite import Row

CELL: Final = ("policy", "budget", "allocator", "rest", "trigger", "kv_dtype")
PLACE_NAMES: Final = {"prompt": "question in the prompt", "later": "question after the trigger"}


def markdown(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The whole report."""
    lines = [
        f"{header['model']} ({header['dtype']}) on {header['device']} (threads: {header['threads']}), "
        f"kvikk {header['versions']['kvikk']}, commit {header['commit']}, {header['date']}",
    ]
    shown = telling_columns(rows)
    for task in _values(rows, Fidelity.name, "task"):
        lines += [
            "",
            *_fidelity(task, [row for row in rows if row["suite"] == Fidelity.name and row["task"] == task], shown),
        ]
    for place in PLACES:
        of_place = [row for row in rows if row["suite"] == Tasks.name and row["question"] == place]
        if of_place:
            lines += ["", *_tasks(place, of_place, shown)]
    return "\n".join(lines) + "\n"


def _fidelity(task: str, rows: Sequence[Row], shown: Sequence[str]) -> Iterator[str]:
    first = rows[0]
    yield f"**{task}**: {first['samples']:,} positions after {first['length']:,} tokens"
    yield ""
    columns: dict[str, Callable[[Row], str]] = {
        **{name: _text_of(name) for name in shown},
        "KL mean": lambda row: _number(row["kl_mean"]),
        "median": lambda row: _number(row["kl_median"]),
        "p95": lambda row: _number(row["kl_p95"]),
        "top-1": lambda row: f"{row['top1']:.1%}",
        "perplexity": lambda row: f"{row['perplexity']:.2f}",
        "bytes held": lambda row: f"{row['kept_bytes'] / 2**20:.1f} MiB",
        "of full": lambda row: f"{row['kept_share']:.1%}",
        "speed": _speed,
        "": lambda row: row["flag"] or "",
    }
    yield from _table(columns, rows)


def _tasks(place: str, rows: Sequence[Row], shown: Sequence[str]) -> Iterator[str]:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    full = {row["task"]: row for row in rows}
    yield f"**tasks, {PLACE_NAMES[place]}**: {rows[0]['samples']} questions each, after {rows[0]['length']:,} tokens"
    yield ""
    by_cell: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        by_cell.setdefault(tuple(row[name] for name in CELL), {})[row["task"]] = row
    columns: dict[str, Callable[[dict[str, Row]], str]] = {}
    for name in shown:
        columns[name] = partial(_of_cell, name)
    for task in tasks:
        columns[task] = partial(_score, task)
    columns["mean of counted"] = lambda cell: _counted_mean(list(cell.values()))
    columns["of full"] = lambda cell: _share([row["kept_share"] for row in cell.values() if row["score"] is not None])
    columns[""] = lambda cell: "; ".join(
        dict.fromkeys(row["flag"] for row in cell.values() if row["flag"] and row["counted"])
    )
    yield from _table(columns, list(by_cell.values()))
    left_out = [
        f"{task} not counted: full scores {row['full_score']:.0%}" for task, row in full.items() if not row["counted"]
    ]
    if left_out:
        yield ""
        yield "; ".join(left_out)


def _of_cell(name: str, cell: Mapping[str, Row]) -> str:
    return _text_of(name)(next(iter(cell.values())))


def _score(task: str, cell: Mapping[str, Row]) -> str:
    score = cell[task]["score"]
    return "-" if score is None else f"{score:.0%}"


def _table(columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Any]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + " --- |" * len(columns)
    for row in rows:
        yield "| " + " | ".join(show(row) for show in columns.values()) + " |"


def telling_columns(rows: Sequence[Row]) -> list[str]:
    """Policy and budget, and what else of a cell is not the same in all rows."""
    others = [row for row in rows if row["policy"] != FULL]
    differ = [name for name in CELL[:-1] if name in CELL[:2] or len({row[name] for row in others}) > 1]
    return differ + [CELL[-1]] * (len({row[CELL[-1]] for row in rows}) > 1)


def _values(rows: Sequence[Row], suite: str, column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows if row["suite"] == suite))


def _text_of(name: str) -> Callable[[Row], str]:
    return lambda row: "" if row["policy"] == FULL and name not in ("policy", "kv_dtype") else str(row[name])


def _number(value: float) -> str:
    """Three digits that tell something."""
    return "0" if value == 0 else f"{value:.3f}" if value >= 0.01 else f"{value:.1e}"


def _speed(row: Row) -> str:
    if row["tokens_per_s"] is None or row["full_tokens_per_s"] is None:
        return "-"
    return f"{row['tokens_per_s']:.0f}/s, x{row['tokens_per_s'] / row['full_tokens_per_s']:.2f}"


def _share(shares: Sequence[float]) -> str:
    return f"{fmean(shares):.1%}" if shares else "-"


def _counted_mean(rows: Sequence[Row]) -> str:
    counted = [row["score"] for row in rows if row["counted"]]
    return f"{fmean(counted):.0%}" if counted else "-"

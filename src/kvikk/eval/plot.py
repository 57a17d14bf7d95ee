"""Quality against bytes held, as an SVG file: no library to install, and any browser shows it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final
from xml.sax.saxutils import escape

from kvikk.eval.answers import PLACES, Tasks
from kvikk.eval.fidelity import Fidelity
from kvikk.eval.report import CELL, PLACE_NAMES, telling_columns
from kvikk.eval.suite import REFERENCE, Row

WIDTH, HEIGHT, LEGEND = 420, 300, 230
"""Of a panel's frame, and of what stands beside all of them."""
ACROSS, DOWN, MARGIN = WIDTH + 80, HEIGHT + 100, 60
"""From panel to panel, and before the first one."""
COLUMNS: Final = 2
COLOURS: Final = (
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf",
    "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#000000",
)  # fmt: skip
DASHES: Final = ("", "6 3", "2 3", "8 3 2 3")
LEAST_KL: Final = 1e-4

Points = list[tuple[float, float]]
"""Share of the full cache's bytes, and quality."""


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Args:
        title: above it.
        lines: by what is compared at several budgets.
        is_log: whether quality is on a logarithmic scale.
        full: the full cache's quality, where it is not the best that there is.
    """

    title: str
    lines: dict[str, Points]
    is_log: bool
    full: float | None = None


def svg(rows: Sequence[Row]) -> str:
    """The picture of all results: distances of each kind of text, then the tasks that count."""
    panels = list(_panels([row for row in rows if row["flag"] != REFERENCE], telling_columns(rows)))
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    beside = MARGIN + min(COLUMNS, len(panels)) * ACROSS
    width, height = beside + LEGEND, MARGIN + max(-(-len(panels) // COLUMNS) * DOWN, 20 * len(names))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        row, column = divmod(index, COLUMNS)
        parts += _drawn(panel, MARGIN + column * ACROSS, MARGIN + row * DOWN, names)
    parts += _legend(names, beside)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panels(rows: Sequence[Row], shown: Sequence[str]) -> Iterator[Panel]:
    of_fidelity = [row for row in rows if row["suite"] == Fidelity.name]
    for kind in dict.fromkeys(row["task"] for row in of_fidelity):
        lines: dict[str, Points] = {}
        for row in of_fidelity:
            if row["task"] == kind:
                lines.setdefault(_line_name(row, shown), []).append((row["kept_share"], max(row["kl_mean"], LEAST_KL)))
        yield Panel(f"{kind}: KL to the full cache, nats", lines, is_log=True)
    for place in PLACES:
        of_cell: dict[tuple[str, ...], list[Row]] = {}
        for row in rows:
            if row["suite"] == Tasks.name and row["question"] == place and row["counted"]:
                of_cell.setdefault(tuple(row[name] for name in CELL), []).append(row)
        lines = {}
        for counted in of_cell.values():
            point = fmean(row["kept_share"] for row in counted), fmean(row["score"] for row in counted)
            lines.setdefault(_line_name(counted[0], shown), []).append(point)
        if lines:
            full = fmean(row["full_score"] for counted in of_cell.values() for row in counted)
            yield Panel(f"tasks that count, {PLACE_NAMES[place]}: score", lines, is_log=False, full=full)


def _line_name(row: Row, shown: Sequence[str]) -> str:
    return " ".join(str(row[name]) for name in shown if name != "budget")


def _drawn(panel: Panel, left: int, top: int, names: Sequence[str]) -> Iterator[str]:
    values = [value for points in panel.lines.values() for _, value in points]
    low, high = (
        (10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values))))
        if panel.is_log
        else (0, 1)
    )
    if low == high:
        high = 10 * low
    bottom = top + HEIGHT

    def x(share: float) -> float:
        return left + min(share, 1.05) / 1.05 * WIDTH

    def y(value: float) -> float:
        part = math.log(value / low) / math.log(high / low) if panel.is_log else value
        return bottom - part * HEIGHT

    yield f'<text x="{left}" y="{top - 16}" font-size="14">{escape(panel.title)}</text>'
    ticks = (
        [low * 10**step for step in range(round(math.log10(high / low)) + 1)]
        if panel.is_log
        else [0, 0.25, 0.5, 0.75, 1]
    )
    for tick in ticks:
        yield f'<line x1="{left}" x2="{left + WIDTH}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#ddd"/>'
        yield f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
    for share in (0, 0.25, 0.5, 0.75, 1):
        yield f'<line x1="{x(share):.1f}" x2="{x(share):.1f}" y1="{top}" y2="{bottom}" stroke="#ddd"/>'
        yield f'<text x="{x(share):.1f}" y="{bottom + 18}" text-anchor="middle">{share:.0%}</text>'
    yield f'<text x="{left + WIDTH / 2}" y="{bottom + 38}" text-anchor="middle">KV bytes held, of the full cache</text>'
    if panel.full is not None:
        at = f"{y(panel.full):.1f}"
        yield f'<line x1="{left}" x2="{left + WIDTH}" y1="{at}" y2="{at}" stroke="#666" stroke-dasharray="4 4"/>'
        yield f'<text x="{left + 6}" y="{y(panel.full) - 6:.1f}" fill="#666">full cache</text>'
    for name, points in panel.lines.items():
        places = [(x(share), y(value)) for share, value in sorted(points)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        yield f'<polyline points="{path}" fill="none" {_stroke(names.index(name))}/>'
        for a, b in places:
            yield f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{COLOURS[names.index(name) % len(COLOURS)]}"/>'


def _legend(names: Sequence[str], left: float) -> Iterator[str]:
    for index, name in enumerate(names):
        y = MARGIN + 20 * index
        yield f'<line x1="{left}" x2="{left + 30}" y1="{y}" y2="{y}" {_stroke(index)}/>'
        yield f'<text x="{left + 38}" y="{y + 4}">{escape(name)}</text>'


def _stroke(index: int) -> str:
    """A colour for each, and another dash when colours are used up."""
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )

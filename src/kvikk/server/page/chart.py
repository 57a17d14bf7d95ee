"""Drawings of the page, as attributes of SVG elements: a strict content policy allows these where it forbids styles."""

from __future__ import annotations

from collections.abc import Sequence

from kvikk.server.metrics.recent import WINDOW_S

BAR_WIDTH = 1000
AREA_WIDTH, AREA_HEIGHT = 600, 100


def bar(parts: Sequence[int], whole: int) -> list[dict[str, str]]:
    """A rectangle for each part, side by side, in a bar of `BAR_WIDTH` that stands for the whole."""
    rectangles, left = [], 0
    for part in parts:
        rectangles.append({"x": _scaled(left, whole, BAR_WIDTH), "width": _scaled(part, whole, BAR_WIDTH)})
        left += part
    return rectangles


def area(points: Sequence[tuple[float, int]], whole: int) -> str:
    """The path of a stepped area: each value, given with its age in seconds and oldest first, holds until the next."""
    moves: list[str] = []
    for age_s, value in points:
        x = AREA_WIDTH * (1 - age_s / WINDOW_S)
        y = AREA_HEIGHT - (AREA_HEIGHT * value / whole if whole else 0.0)
        moves.append(f"H{x:.1f}V{y:.1f}" if moves else f"M{x:.1f} {AREA_HEIGHT}V{y:.1f}")
    return "".join(moves) + f"V{AREA_HEIGHT}Z" if moves else ""


def _scaled(part: int, whole: int, length: int) -> str:
    return f"{length * part / whole:.1f}" if whole else "0"

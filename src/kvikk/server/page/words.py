"""Numbers for a person."""

from __future__ import annotations


def number(value: int) -> str:
    """`1,234`."""
    return f"{value:,}"


def share(part: int, whole: int) -> str:
    """`62 %`; a dash when there is no whole. Nearly nothing and nearly all are not rounded to nothing and all."""
    if not whole:
        return "\N{EN DASH}"
    percent = 100 * part / whole
    if 0 < percent < 1:
        return "< 1 %"
    if 99 < percent < 100:
        return "> 99 %"
    return f"{percent:.0f} %"


def duration(seconds: float) -> str:
    """`4.2 s`, `42 s`, `3 min 05 s`, `2 h 03 min` or `5 d 04 h`."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02} h"

"""Markdown out of values."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; nothing when it has no rows."""
    lines = [_row(cells) for cells in rows]
    return "\n".join([_row(header), _row(["---"] * len(header)), *lines]) + "\n" if lines else ""


BAR = "&#124;"
"""A bar that ends no cell: renderers disagree on one within backticks."""


def code(text: str) -> str:
    """Text as code, or nothing."""
    if "|" in text:
        return f"<code>{html.escape(text, quote=False).replace('|', BAR)}</code>"
    return f"`{text}`" if text else ""


def sentence(text: str) -> str:
    """Text with a capital at its start and nothing at its end."""
    return text[:1].upper() + text[1:].rstrip(".")


def value(given: object) -> str:
    """A value as it stands in JSON or TOML; a dash for None."""
    return "-" if given is None else code(json.dumps(given, ensure_ascii=False))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", BAR).replace("\n", " ") for cell in cells) + " |"

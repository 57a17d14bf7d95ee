"""The file of an evaluation: written after every step, and gone on with by a later run of the same evaluation."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvikk.bench.results import write_rows
from kvikk.errors import ConfigError
from kvikk.eval.grid import Cell
from kvikk.eval.suite import COLUMNS, Row

MAY_DIFFER: Final = ("date",)
"""Of the header, what two runs of one evaluation need not have in common."""


class Results:
    """Rows as they come. What one cell of one suite gives is in the file whole, or not at all.

    Args:
        path: the file; None keeps them in memory.
        header: says what they are results of.

    Raises:
        ConfigError: the file is there, and is another evaluation's, or none.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self._path = path
        self.header = dict(header)
        self.rows: list[Row] = []
        if path is not None and path.exists():
            self.rows = self._read(path)

    def has(self, suite: str, cell: Cell, kv_dtype: str) -> bool:
        """Whether a suite has measured a cell, with K and V stored so."""
        wanted = {"suite": suite, "kv_dtype": kv_dtype, **cell.names}
        return any(all(row[name] == value for name, value in wanted.items()) for row in self.rows)

    def add(self, rows: Sequence[Row]) -> None:
        """What a suite measured of a cell.

        Raises:
            ConfigError: the file cannot be written.
        """
        self.rows += rows
        if self._path is None:
            return
        beside = self._path.with_name(f".{self._path.name}.part")
        write_rows(beside, self.header, self.rows)
        try:
            os.replace(beside, self._path)
        except OSError as error:
            raise ConfigError(f"the result cannot be written to {self._path}: {error}") from None

    def _read(self, path: Path) -> list[Row]:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            header, rows = dict(found["header"]), list(found["rows"])
            known = all(set(COLUMNS) <= row.keys() for row in rows)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            known = False
        if not known:
            raise ConfigError(f"--output {path} is there and holds no results of kvikk eval: name another file")
        ours = json.loads(json.dumps(self.header))
        for name in {**ours, **header}:
            if name not in MAY_DIFFER and ours.get(name) != header.get(name):
                where = f"{name} is {_difference(header.get(name), ours.get(name))}"
                raise ConfigError(
                    f"--output {path} is of another evaluation ({where}): name another file, or remove it"
                )
        return rows


def _difference(theirs: Any, ours: Any) -> str:
    """Where two values of a header differ, in words."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in {**theirs, **ours}:
            if theirs.get(name) != ours.get(name):
                return f"{name} is {_difference(theirs.get(name), ours.get(name))}"
    return f"{theirs!r} there and {ours!r} here"

"""Shared by all tests: `tests/` itself is importable, so that folders can share helpers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def root_logger_as_it_was() -> Iterator[None]:
    """The command line sets up logging for a process of its own; the tests share one, whose stderr changes."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers

"""Shared by all tests: `tests/` itself is importable, so that folders can share helpers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from interpreter import use_interpreter

use_interpreter()


@pytest.fixture(autouse=True)
def root_logger_as_it_was() -> Iterator[None]:
    """The command line sets up logging for a process of its own; the tests share one, whose stderr changes."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where Triton kernels run in this process: a GPU, or the CPU through Triton's interpreter."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

"""Shared by all tests: `tests/` itself is importable, so that folders can share helpers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""The bundled model's tokenizer, read once."""

from __future__ import annotations

from typing import Any

import pytest

from kvikk.bench import tokenizer


@pytest.fixture(scope="session")
def words() -> Any:
    return tokenizer.read("smollm2")

"""One server for all tests that do not need one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from server.running import SMALL, Running, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("server"), "smollm2", *SMALL) as running:
        yield running


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.client()

"""One `LLM` with the bundled model for each module, which has everything back after each test that asks for that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvikk import LLM


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(kv_memory="128MiB", max_model_len=1024, dtype="float32", device="cpu", max_num_seqs=16)


@pytest.fixture
def everything_comes_back(llm: LLM) -> Iterator[None]:
    yield
    llm.engine.check()
    assert llm.engine.pool.held == 0
    assert not llm.engine.has_work

"""A toy model that reads and writes bytes, and the engine that is evaluated on it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvikk.engine import EngineConfig
from kvikk.eval.subject import Subject
from kvikk.memory import MemoryConfig
from kvikk.models import LoadedModel, toy_model
from kvikk.models.config import ModelConfig


class Bytes:
    """A tokenizer: a token is a byte."""

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=list(text.encode()))

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def subject_of(**toy: Any) -> Subject:
    model = toy_model(max_positions=4096, **toy)
    loaded = LoadedModel(model=model, tokenizer=Bytes(), max_model_len=4096, generation_defaults={}, folder=Path())
    config = EngineConfig(model=ModelConfig(device="cpu"), memory=MemoryConfig(kv_memory="64MiB"))
    return Subject.of(loaded, config)


@pytest.fixture(scope="session")
def subject() -> Subject:
    return subject_of()

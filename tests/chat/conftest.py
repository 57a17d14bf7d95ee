"""The bundled model's own tokenizer: its chat template knows no tools."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvikk.models.bundled import bundled_folder


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(bundled_folder())


@pytest.fixture(scope="session")
def with_marks() -> PreTrainedTokenizerBase:
    """The same with marks as tokens of their own: Qwen's common ones, Llama's special one."""
    marked = AutoTokenizer.from_pretrained(bundled_folder())
    marked.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<tool_call>", "</tool_call>")])
    marked.add_tokens([AddedToken("<|python_tag|>", special=True)], special_tokens=True)
    return marked

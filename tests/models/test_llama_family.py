"""The own module computes what transformers' modules compute, for every architecture it takes over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_step import DenseKV
from tiny import config, load, module, own_logits, random_rows, reference_logits, save

from kvikk.models.llama import LlamaModel

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}

FAMILY: dict[str, Any] = {
    "llama": lambda: config("Llama"),
    "llama with tied head": lambda: config("Llama", tie_word_embeddings=True),
    "llama with biases and llama3 rope": lambda: config(
        "Llama", attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3_ROPE
    ),
    "llama with yarn rope": lambda: config("Llama", rope_parameters=YARN_ROPE),
    "llama with wide heads": lambda: config("Llama", head_dim=32),
    "mistral": lambda: config("Mistral", sliding_window=None),
    "qwen2": lambda: config("Qwen2"),
    "qwen3": lambda: config("Qwen3", head_dim=32),
    "olmo2": lambda: config("Olmo2"),
    "phi3": lambda: config("Phi3", sliding_window=None),
    "phi3 with partial rotary": lambda: config("Phi3", rope_parameters=PARTIAL_ROPE, sliding_window=None),
}


@pytest.mark.parametrize("name", FAMILY)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    made = module(FAMILY[name]())
    loaded = load(save(made, tmp_path))
    rows = random_rows(40, 17)
    wanted = reference_logits(made, rows)

    assert isinstance(loaded.model, LlamaModel)
    assert loaded.model.spec.dtype == torch.float32
    torch.testing.assert_close(own_logits(loaded.model, rows), wanted, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(own_logits(loaded.model, rows, new_tokens=1), wanted, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(own_logits(loaded.model, rows, head_rows=7), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "olmo2", "phi3 with partial rotary"])
def test_bf16_errs_no_more_than_transformers_in_bf16(name: str, tmp_path: Path) -> None:
    made = module(FAMILY[name]())
    loaded = load(save(made, tmp_path), dtype="bfloat16")
    rows = random_rows(40, 17)
    exact = reference_logits(made, rows)
    theirs = (reference_logits(made.to(torch.bfloat16), rows).float() - exact).norm()
    ours = (own_logits(loaded.model, rows).float() - exact).norm()

    assert 0 < ours < 1.2 * theirs


def test_phi3_longrope_pinned_below_its_original_length_uses_the_short_factors(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8}
    made = module(config("Phi3", rope_parameters=rope, original_max_position_embeddings=64, sliding_window=None))
    loaded = load(save(made, tmp_path), max_model_len=64)
    rows = random_rows(64, 9)

    assert loaded.max_model_len == 64
    torch.testing.assert_close(own_logits(loaded.model, rows), reference_logits(made, rows), atol=2e-5, rtol=1e-5)


def test_logits_are_returned_for_the_wanted_tokens_in_the_wanted_order(tmp_path: Path) -> None:
    loaded = load(save(module(config("Llama")), tmp_path))
    (row,) = random_rows(12)
    everything = own_logits(loaded.model, [row])
    wanted = torch.tensor([11, 3, 3])
    some = loaded.model.head(loaded.model.forward(row, torch.arange(12), DenseKV().step([12]), wanted))

    torch.testing.assert_close(some, everything[wanted])


def test_the_rope_table_ends_at_max_model_len(tmp_path: Path) -> None:
    loaded = load(save(module(config("Llama")), tmp_path), max_model_len=32)
    assert isinstance(loaded.model, LlamaModel)
    assert loaded.model.rope.shape == (32, 2, 16)
    with pytest.raises(IndexError):
        loaded.model.forward(torch.tensor([1]), torch.tensor([32]), DenseKV().step([1]), torch.tensor([0]))

"""Named shapes: their sizes, and models of these sizes whose random weights can be computed with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dense_step import DenseKV

from kvikk.errors import ConfigError
from kvikk.models import shapes
from kvikk.models.shapes import SHAPES, named_shape, shaped_model


def logits_of(model: shapes.LlamaModel, tokens: int) -> torch.Tensor:
    positions = torch.arange(tokens)
    step = DenseKV().step([tokens])
    return model.head(model.forward(torch.arange(tokens) % 100, positions, step, positions))


def test_a_model_has_the_sizes_of_its_shape_and_no_end_token() -> None:
    spec = shaped_model("smollm2").spec
    assert (spec.layers, spec.q_heads, spec.kv_heads[0], spec.head_dim) == (30, 9, 3, 64)
    assert (spec.vocabulary, spec.max_positions, spec.dtype) == (49_152, 8_192, torch.bfloat16)
    assert spec.eos_token_ids == frozenset()


def test_activations_stay_finite_and_tokens_are_told_apart_in_bf16() -> None:
    logits = logits_of(shaped_model("smollm2"), 32).float()
    assert torch.isfinite(logits).all()
    assert logits.std() < 100
    assert len(set(logits.argmax(-1).tolist())) > 10


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-32b"])
def test_every_shape_runs_with_its_own_kind_of_norms_and_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As narrow and shallow as a test can afford, in the architecture's own variant."""
    shape = SHAPES[name]
    small = replace(
        shape.config, hidden=64, layers=shape.config.layers, q_heads=8, kv_heads=1, head_dim=16, ffn=96, vocabulary=128
    )
    monkeypatch.setitem(SHAPES, name, replace(shape, config=small, max_positions=64))
    model = shaped_model(name, dtype=torch.float32)
    assert torch.isfinite(logits_of(model, 16)).all()
    assert (model.weights.layers[0].q_norm is not None) == (shape.config.qk_norm == "head")


def test_a_seed_gives_the_same_weights_and_another_one_others(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(SHAPES["smollm2"].config, layers=2, vocabulary=512)
    monkeypatch.setitem(SHAPES, "smollm2", replace(SHAPES["smollm2"], config=small))
    first, again, other = (shaped_model("smollm2", seed=seed).spec.fingerprint for seed in (1, 1, 2))
    assert first == again != other


def test_a_name_that_is_no_shape_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"'llama' is no named shape: choose from llama-3\.1-8b, qwen3-32b, smollm2"):
        named_shape("llama")

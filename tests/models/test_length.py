"""No model is served at lengths for which it has no positions, whichever way it was made or loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import config, load, module, save

from kvikk.errors import ConfigError
from kvikk.models import LoadedModel, toy_model


def test_a_model_made_by_hand_is_refused_beyond_its_rotary_table() -> None:
    def served(max_model_len: int) -> LoadedModel:
        model = toy_model(max_positions=64)
        return LoadedModel(
            model=model, tokenizer=None, max_model_len=max_model_len, generation_defaults={}, folder=Path()
        )

    assert served(64).max_model_len == 64
    with pytest.raises(ConfigError, match="65 is more than the model's 64 positions: at most 64"):
        served(65)


@pytest.mark.parametrize("architecture", ["Llama", "Gemma"])
def test_a_loaded_model_is_refused_beyond_the_length_that_it_was_loaded_for(architecture: str, tmp_path: Path) -> None:
    """Its config has more positions, but its tables were made for these: kvikk's own modules and transformers'."""
    loaded = load(save(module(config(architecture)), tmp_path), max_model_len=32)
    assert loaded.model.spec.max_positions > loaded.model.longest == 32
    with pytest.raises(ConfigError, match="33 is more than the model's 32 positions"):
        replace(loaded, max_model_len=33)


def test_a_checkpoint_is_refused_beyond_its_positions_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = save(module(config("Llama")), tmp_path)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(ConfigError, match="--max-model-len 257 is more than the model's 256 positions"):
        load(folder, max_model_len=257)

"""An engine over a model of a named shape with random weights: for measuring speed, without files and without text."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from kvikk.engine import Capacity, Engine, EngineConfig, build_engine
from kvikk.models import LoadedModel
from kvikk.models.shapes import named_shape, shaped_model
from kvikk.models.support import check_length

DEFAULT_SHAPE: Final = "llama-3.1-8b"


def shape_name(config: EngineConfig) -> str:
    """The shape that `--model` names here.

    Raises:
        ConfigError: it is none.
    """
    name = config.model.model or DEFAULT_SHAPE
    named_shape(name)
    return name


def dtype_of(config: EngineConfig) -> torch.dtype:
    """Of weights and KV: bfloat16 unless another is asked for."""
    dtype: torch.dtype = getattr(torch, "bfloat16" if config.model.dtype == "auto" else config.model.dtype)
    return dtype


def random_engine(config: EngineConfig) -> tuple[Engine, Capacity]:
    """An engine on such a model; see `load_random` and `build_engine`."""
    return build_engine(load_random(config), config)


def load_random(config: EngineConfig) -> LoadedModel:
    """A model that knows token ids only: it has no tokenizer, and its texts never end by themselves.

    Raises:
        ConfigError: `--model` is no named shape, or an option cannot be honoured.
    """
    name = shape_name(config)
    positions = named_shape(name).max_positions
    max_model_len = config.model.max_model_len or positions
    check_length(max_model_len, positions)
    model = shaped_model(
        name,
        seed=config.seed,
        dtype=dtype_of(config),
        device=config.model.torch_device(),
        numerics=config.numerics,
    )
    return LoadedModel(
        model=model,
        tokenizer=None,
        max_model_len=max_model_len,
        generation_defaults={},
        folder=Path(),
    )

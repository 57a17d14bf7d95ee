"""Rotary tables, fixed at load for every position the model may see, and the types that cannot be fixed.

transformers recomputes the frequencies of some RoPE types from the largest position of the batch. In a flattened
batch one request would then change the KV of another, so such types are refused, or pinned to the range in which
they are constant.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvikk.errors import ModelError

FIXED_TYPES = frozenset({"default", "linear", "llama3", "yarn", "proportional"})


def rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary parameter sets of a config: none, one, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    if nested:
        yield from nested
    elif parameters:
        yield parameters


def check_rope(config: Any, max_model_len: int) -> None:
    """Accept only rotary types whose factors are the same for every batch.

    Raises:
        ModelError: the type depends on the batch, or is unknown.
    """
    for parameters in rope_parameters(config):
        kind = parameters.get("rope_type", "default")
        if kind == "longrope":
            original = original_positions(config, parameters)
            if max_model_len > original:
                raise ModelError(
                    f"rope type 'longrope' changes its factors once a batch holds a position from {original:,} on, "
                    f"and max_model_len is {max_model_len:,}: "
                    f"pass --max-model-len {original} (or less) to stay with the short factors"
                )
        elif kind not in FIXED_TYPES:
            reason = (
                "takes its frequencies from the longest sequence of the batch"
                if kind == "dynamic"
                else "is not one kvikk knows to be independent of the batch"
            )
            known = ", ".join(sorted(FIXED_TYPES))
            raise ModelError(f"rope type {kind!r} {reason}: use a model whose rope type is one of {known}")


def original_positions(config: Any, parameters: dict[str, Any]) -> int:
    """Positions below which longrope keeps to its short factors."""
    original = parameters.get("original_max_position_embeddings")
    if original is None:
        original = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    return int(original)


def rope_text(config: Any) -> str:
    """The rotary config as canonical JSON, as it enters prefix keys."""
    return json.dumps(getattr(config, "rope_parameters", None) or {}, sort_keys=True, default=str)


def rope_table(architecture: str, config: Any, *, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cos and sin of all positions, from the rotary module that transformers uses for this architecture.

    Returns:
        `[positions, 2, rotary_dim]`: cos, then sin with its first half negated (`llama.rotate` says why).
        In `dtype`, except where transformers keeps the tables in fp32.
    """
    code = importlib.import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    rotary = getattr(code, architecture.removesuffix("ForCausalLM") + "RotaryEmbedding")(config)
    with torch.no_grad():
        cos, sin = rotary(torch.empty(0, dtype=dtype), torch.arange(positions)[None])
    return signed_table(cos[0], sin[0]).to(device)


def signed_table(cos: Tensor, sin: Tensor) -> Tensor:
    """Stack `[positions, rotary_dim]` cos and sin to `[positions, 2, rotary_dim]`, negating sin's first half."""
    first, second = sin.chunk(2, dim=-1)
    return torch.stack((cos, torch.cat((-first, second), dim=-1)), dim=1).contiguous()


def rope_frequencies(table: Tensor) -> Tensor:
    """Radians a position of each pair of dimensions, from a table that has positions 0 and 1 in fp32.

    A factor on cosine and sine, as YaRN has one, is no part of it.

    Returns:
        `[rotary_dim / 2]` fp32.
    """
    cos, sin = table[1].chunk(2, dim=-1)[1]
    return torch.atan2(sin, cos)

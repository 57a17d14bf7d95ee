"""Well-known models as shapes: their sizes, and models of these sizes with random weights, to measure speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kvikk.errors import ConfigError
from kvikk.models.family import FamilyConfig
from kvikk.models.llama import LlamaModel
from kvikk.models.random_weights import Gains, random_model, random_weights
from kvikk.types import Numerics


@dataclass(frozen=True, kw_only=True)
class NamedShape:
    """A model's sizes, from its authors' config.

    Args:
        architecture: Hugging Face's class name.
        config: the sizes.
        rope_base: of the rotary frequencies; their scaling for long contexts is left out, it changes no speed.
        max_positions: the longest sequence.
    """

    architecture: str
    config: FamilyConfig
    rope_base: float
    max_positions: int

    @property
    def parameters(self) -> int:
        """Weights that a decode step reads: all but the embedding, of which it reads a row a token."""
        c = self.config
        attention = (2 * c.q_heads + 2 * c.kv_heads) * c.head_dim * c.hidden
        return c.layers * (attention + 3 * c.ffn * c.hidden) + c.vocabulary * c.hidden


SHAPES: Final = {
    "llama-3.1-8b": NamedShape(
        architecture="LlamaForCausalLM",
        config=FamilyConfig(
            hidden=4_096, layers=32, q_heads=32, kv_heads=8, head_dim=128, ffn=14_336, vocabulary=128_256,
            norm_eps=1e-5,
        ),
        rope_base=500_000.0,
        max_positions=131_072,
    ),
    "qwen3-32b": NamedShape(
        architecture="Qwen3ForCausalLM",
        config=FamilyConfig(
            hidden=5_120, layers=64, q_heads=64, kv_heads=8, head_dim=128, ffn=25_600, vocabulary=151_936,
            norm_eps=1e-6, qk_norm="head",
        ),
        rope_base=1_000_000.0,
        max_positions=40_960,
    ),
    "smollm2": NamedShape(
        architecture="LlamaForCausalLM",
        config=FamilyConfig(
            hidden=576, layers=30, q_heads=9, kv_heads=3, head_dim=64, ffn=1_536, vocabulary=49_152, norm_eps=1e-5,
            tied=True,
        ),
        rope_base=100_000.0,
        max_positions=8_192,
    ),
}  # fmt: skip


def named_shape(name: str) -> NamedShape:
    """A shape by its name.

    Raises:
        ConfigError: it is none.
    """
    if name not in SHAPES:
        raise ConfigError(f"{name!r} is no named shape: choose from {', '.join(SHAPES)}")
    return SHAPES[name]


def shaped_model(
    name: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    numerics: Numerics = "fast",
) -> LlamaModel:
    """A model of a named shape with weights drawn on the device, the same for a seed on one kind of device.

    The maps keep the size of what they are given, so that activations stay finite in bf16. It has no end token.

    Raises:
        ConfigError: no such shape.
    """
    shape = named_shape(name)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float, mean: float = 0.0) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(mean, scale, generator=generator)

    return random_model(
        shape.config,
        random_weights(shape.config, Gains(), normal),
        name=name,
        architecture=shape.architecture,
        seed=seed,
        rope_base=shape.rope_base,
        max_positions=shape.max_positions,
        numerics=numerics,
    )

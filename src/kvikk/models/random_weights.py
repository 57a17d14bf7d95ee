"""Models of the Llama family with drawn weights: what the toy model and the named shapes are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvikk.models.family import FamilyConfig
from kvikk.models.fingerprint import fingerprint
from kvikk.models.llama import LayerWeights, LlamaModel, LlamaWeights
from kvikk.models.projection import Projection
from kvikk.models.rope import signed_table
from kvikk.models.spec import ModelSpec
from kvikk.types import Numerics


class Normal(Protocol):
    """Draws tensors on the model's device and in its dtype, one after the other from one seed."""

    def __call__(self, *shape: int, scale: float, mean: float = 0.0) -> Tensor:
        """Numbers of this standard deviation around this mean."""
        ...


@dataclass(frozen=True, kw_only=True)
class Gains:
    """How much each map enlarges what it is given: weights have the deviation gain / sqrt(width of the input)."""

    qkv: float = 1.0
    output: float = 1.0
    gate_up: float = 1.0
    down: float = 1.0
    head: float = 1.0


def random_weights(config: FamilyConfig, gains: Gains, normal: Normal) -> LlamaWeights:
    """Weights of every map and norm, in the order embedding, layers, last norm, head; no biases."""
    q_width, kv_width = config.q_heads * config.head_dim, config.kv_heads * config.head_dim

    def linear(out_width: int, in_width: int, gain: float) -> Projection:
        return Projection(normal(out_width, in_width, scale=gain / in_width**0.5), None)

    def norm(width: int) -> Tensor:
        return normal(width, scale=0.1, mean=1.0)

    def layer() -> LayerWeights:
        return LayerWeights(
            qkv=linear(q_width + 2 * kv_width, config.hidden, gains.qkv),
            output=linear(config.hidden, q_width, gains.output),
            gate_up=linear(2 * config.ffn, config.hidden, gains.gate_up),
            down=linear(config.hidden, config.ffn, gains.down),
            attention_norm=norm(config.hidden),
            mlp_norm=norm(config.hidden),
            q_norm=norm(config.head_dim) if config.qk_norm == "head" else None,
            k_norm=norm(config.head_dim) if config.qk_norm == "head" else None,
        )

    embedding = normal(config.vocabulary, config.hidden, scale=1.0)
    return LlamaWeights(
        embedding=embedding,
        layers=[layer() for _ in range(config.layers)],
        norm=norm(config.hidden),
        head=Projection(embedding, None) if config.tied else linear(config.vocabulary, config.hidden, gains.head),
    )


def random_model(
    config: FamilyConfig,
    weights: LlamaWeights,
    *,
    name: str,
    architecture: str,
    seed: int,
    rope_base: float,
    max_positions: int,
    eos_token_ids: frozenset[int] = frozenset(),
    numerics: Numerics = "fast",
) -> LlamaModel:
    """The model of drawn weights, with plain rotary tables of `max_positions` positions."""
    device, dtype = weights.embedding.device, weights.embedding.dtype
    frequencies = rope_base ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = (torch.arange(max_positions)[:, None] * frequencies).repeat(1, 2)
    spec = ModelSpec(
        name=name,
        architecture=architecture,
        q_heads=config.q_heads,
        kv_heads=(config.kv_heads,) * config.layers,
        head_dim=config.head_dim,
        vocabulary=config.vocabulary,
        max_positions=max_positions,
        dtype=dtype,
        fingerprint=fingerprint({name: seed}, weights.named()),
        rope=f'{{"rope_theta": {rope_base}, "rope_type": "default"}}',
        eos_token_ids=eos_token_ids,
        numerics=numerics,
    )
    table = signed_table(angles.cos(), angles.sin()).to(device=device, dtype=dtype)
    return LlamaModel(config, spec, weights, table, frequencies.float().to(device))

"""A small seeded model built in code, for tests: grouped queries, random weights, no tokenizer, no download."""

from __future__ import annotations

import torch

from kvikk.models.family import FamilyConfig
from kvikk.models.fingerprint import fingerprint
from kvikk.models.llama import LayerWeights, LlamaModel, LlamaWeights
from kvikk.models.projection import Projection
from kvikk.models.rope import signed_table
from kvikk.models.spec import ModelSpec

ROPE_BASE = 10_000.0


def toy_model(
    seed: int = 0,
    *,
    layers: int = 2,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden: int = 64,
    vocabulary: int = 256,
    max_positions: int = 4096,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    eos_token_ids: frozenset[int] = frozenset(),
) -> LlamaModel:
    """A Llama with random weights: the same for the same arguments on every machine, whatever its dtype or device.

    Weights are drawn so that every layer moves the residual stream and attention looks at particular tokens, which
    makes greedy text depend on the whole prompt. It has no end token unless one is given.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, gain: float = 1.0) -> torch.Tensor:
        drawn: torch.Tensor = torch.randn(*shape, generator=generator) * (gain / shape[-1] ** 0.5)
        return drawn.to(device=device, dtype=dtype)

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(hidden, generator=generator)).to(device=device, dtype=dtype)

    def layer() -> LayerWeights:
        return LayerWeights(
            qkv=Projection(normal((q_heads + 2 * kv_heads) * head_dim, hidden, gain=1.5), None),
            output=Projection(normal(hidden, q_heads * head_dim, gain=2.0), None),
            gate_up=Projection(normal(4 * hidden, hidden, gain=1.5), None),
            down=Projection(normal(hidden, 2 * hidden, gain=1.5), None),
            attention_norm=norm(),
            mlp_norm=norm(),
        )

    config = FamilyConfig(
        hidden=hidden, layers=layers, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, ffn=2 * hidden,
        vocabulary=vocabulary, norm_eps=1e-6,
    )  # fmt: skip
    weights = LlamaWeights(
        embedding=normal(vocabulary, hidden, gain=hidden**0.5),
        layers=[layer() for _ in range(layers)],
        norm=norm(),
        head=Projection(normal(vocabulary, hidden, gain=4.0), None),
    )
    frequencies = ROPE_BASE ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = (torch.arange(max_positions)[:, None] * frequencies).repeat(1, 2)
    spec = ModelSpec(
        name="toy",
        architecture="LlamaForCausalLM",
        q_heads=q_heads,
        kv_heads=(kv_heads,) * layers,
        head_dim=head_dim,
        vocabulary=vocabulary,
        max_positions=max_positions,
        dtype=dtype,
        fingerprint=fingerprint({"toy": seed}, weights.named()),
        rope=f'{{"rope_theta": {ROPE_BASE}, "rope_type": "default"}}',
        eos_token_ids=eos_token_ids,
    )
    return LlamaModel(config, spec, weights, signed_table(angles.cos(), angles.sin()).to(device=device, dtype=dtype))

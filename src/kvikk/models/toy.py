"""A small seeded model built in code, for tests: grouped queries, random weights, no tokenizer, no download."""

from __future__ import annotations

import torch

from kvikk.models.family import FamilyConfig
from kvikk.models.llama import LlamaModel
from kvikk.models.random_weights import Gains, random_model, random_weights
from kvikk.types import Numerics

ROPE_BASE = 10_000.0
GAINS = Gains(qkv=1.5, output=2.0, gate_up=1.5, down=1.5, head=4.0)


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
    numerics: Numerics = "fast",
) -> LlamaModel:
    """A Llama with random weights: the same for the same arguments on every machine, whatever its dtype or device.

    Weights are drawn so that every layer moves the residual stream and attention looks at particular tokens, which
    makes greedy text depend on the whole prompt. It has no end token unless one is given.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float, mean: float = 0.0) -> torch.Tensor:
        drawn = mean + torch.randn(*shape, generator=generator) * scale
        return drawn.to(device=device, dtype=dtype)

    config = FamilyConfig(
        hidden=hidden, layers=layers, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, ffn=2 * hidden,
        vocabulary=vocabulary, norm_eps=1e-6,
    )  # fmt: skip
    return random_model(
        config,
        random_weights(config, GAINS, normal),
        name="toy",
        architecture="LlamaForCausalLM",
        seed=seed,
        rope_base=ROPE_BASE,
        max_positions=max_positions,
        eos_token_ids=eos_token_ids,
        numerics=numerics,
    )

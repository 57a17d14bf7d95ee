"""Which architectures run on kvikk's own module, and how they differ, in one frozen description."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

QKNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """A decoder of the Llama family, as numbers and choices.

    Args:
        hidden: width of the residual stream.
        layers: decoder layers.
        q_heads, kv_heads, head_dim: of every layer's attention.
        ffn: width of the gated MLP (SiLU).
        vocabulary: rows of the embedding and of the head.
        norm_eps: of every RMS norm.
        qkv_bias, output_bias, mlp_bias: which projections add one.
        qk_norm: RMS norm of Q and K over each head (`head`), over all heads at once (`full`), or none.
        post_norm: norms act on what attention and MLP return, not on what they are given.
        tied: the head is the embedding.
        wide: norms multiply and RoPE rotates in fp32, rounding to the model's dtype only afterwards.
    """

    hidden: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    post_norm: bool = False
    tied: bool = False
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the code of an architecture fixes, where its config does not say."""

    qkv_bias: bool = False
    configured_bias: bool = False
    qk_norm: QKNorm = "none"
    post_norm: bool = False
    wide: bool = False


FAMILIES = {
    "LlamaForCausalLM": Traits(configured_bias=True),
    "MistralForCausalLM": Traits(),
    "Qwen2ForCausalLM": Traits(qkv_bias=True),
    "Qwen3ForCausalLM": Traits(configured_bias=True, qk_norm="head"),
    "Olmo2ForCausalLM": Traits(configured_bias=True, qk_norm="full", post_norm=True, wide=True),
    "Phi3ForCausalLM": Traits(),
}


def family_config(architecture: str, config: Any) -> FamilyConfig | None:
    """Read a Hugging Face config; None when kvikk's own module does not cover it."""
    traits = FAMILIES.get(architecture)
    if traits is None or config.hidden_act != "silu":
        return None
    bias = traits.configured_bias and bool(getattr(config, "attention_bias", False))
    return FamilyConfig(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        q_heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn=config.intermediate_size,
        vocabulary=config.vocab_size,
        norm_eps=config.rms_norm_eps,
        qkv_bias=traits.qkv_bias or bias,
        output_bias=bias,
        mlp_bias=traits.configured_bias and bool(getattr(config, "mlp_bias", False)),
        qk_norm=traits.qk_norm,
        post_norm=traits.post_norm,
        tied=bool(config.tie_word_embeddings),
        wide=traits.wide,
    )

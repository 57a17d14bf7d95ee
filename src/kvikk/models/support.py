"""What kvikk can serve, judged by the config alone: refusals by name and reason, and the length a model allows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from kvikk.errors import ConfigError, ModelError

log = logging.getLogger(__name__)

ATTENTION_LAYERS = frozenset({"full_attention", "attention", "sliding_attention"})
STATE_FIELDS = (
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "linear_key_head_dim",
    "conv_L_cache",
    "attn_layer_period",
)


def check_config(config: Any) -> str:
    """The architecture's name, if kvikk can serve it.

    Raises:
        ModelError: with the architecture's name, the reason and a way out.
    """
    names = getattr(config, "architectures", None) or []
    name = names[0] if names else f"model type {config.model_type!r}"
    reason = next(_reasons(config, name), None)
    if reason is not None:
        raise ModelError(f"{name} is not supported: {reason}. Use a decoder-only model with full attention")
    return str(name)


def _reasons(config: Any, name: str) -> Iterator[str]:
    """Why a config cannot be served, the most basic reason first."""
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder model"
    if getattr(config, "text_config", None) is not None or getattr(config, "vision_config", None) is not None:
        yield "it is a multi-modal model"
    if not name.endswith(("ForCausalLM", "LMHeadModel")):
        yield "it has no head that predicts the next token (its class should be ...ForCausalLM)"
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation.quant_method
        yield f"its weights are quantised ({getattr(method, 'value', method)}); take the bf16 or fp16 checkpoint"
    if getattr(config, "kv_lora_rank", None):
        yield f"multi-head latent attention (kv_lora_rank {config.kv_lora_rank}) keeps no K and V by head"
    for field in STATE_FIELDS:
        if getattr(config, field, None):
            yield f"it is a hybrid with recurrent state ({field} {getattr(config, field)}), which pages cannot hold"
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if others:
        yield f"it has layers of type {', '.join(sorted(others))} among its {config.num_hidden_layers}"
    if getattr(config, "attn_logit_softcapping", None):
        yield f"its attention scores are capped (attn_logit_softcapping {config.attn_logit_softcapping})"
    if config.model_type == "gpt_oss":
        yield "its attention has sinks"
    if getattr(config, "num_kv_shared_layers", None):
        yield f"{config.num_kv_shared_layers} of its layers share the KV of others"
    if getattr(config, "alibi", False):
        yield "its attention adds ALiBi biases"
    v_width = getattr(config, "v_head_dim", None)
    if v_width and v_width != getattr(config, "head_dim", v_width):
        yield f"its V heads are {v_width} wide and its K heads {config.head_dim}"


def position_limit(config: Any) -> int:
    """Positions the model was made for.

    Raises:
        ModelError: the config names none.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not limit:
        raise ModelError(
            f"the config of model type {config.model_type!r} names no max_position_embeddings, so its length "
            "has no limit to check (as with ALiBi): use a model with rotary or learned positions"
        )
    return int(limit)


def sliding_window(config: Any) -> int | None:
    """Tokens that a windowed layer of the model sees, itself included; None when no layer has a window."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if window is None or (layer_types is not None and "sliding_attention" not in layer_types):
        return None
    return int(window)


def resolve_length(config: Any, asked: int | None) -> int:
    """The longest sequence to serve: what was asked for, or all the model allows.

    A sliding window no smaller than this is full attention; a smaller one lowers it, with a warning.

    Raises:
        ConfigError: more was asked for than the model has positions.
    """
    limit = position_limit(config)
    if asked is not None and asked > limit:
        raise ConfigError(f"--max-model-len {asked:,} is more than the model's {limit:,} positions: at most {limit}")
    length = asked or limit
    window = sliding_window(config)
    if window is not None and window < length:
        log.warning(
            "max_model_len is lowered from %d to %d: the model's attention slides over a window of %d tokens, "
            "and only within it is it full attention",
            length,
            window,
            window,
        )
        return window
    return length

"""What kvikk can serve, judged by the config alone: refusals by name and reason, and the length a model allows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from enum import StrEnum
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


class Refused(StrEnum):
    """The kinds of model that a config can be refused for."""

    ENCODER_DECODER = "encoder-decoder"
    MULTI_MODAL = "multi-modal"
    HEADLESS = "no head that predicts the next token"
    QUANTISED = "quantised weights"
    LATENT = "multi-head latent attention"
    RECURRENT = "hybrid with recurrent state"
    OTHER_LAYERS = "layers of other types"
    DIFFERING_LAYERS = "layers of different shapes"
    SOFT_CAPPED = "soft-capped scores"
    SINKS = "attention sinks"
    SHARED_KV = "layers that share KV"
    ALIBI = "ALiBi biases"
    WIDTHS = "K and V of different width"
    UNLIMITED = "no limit of positions"


def check_config(config: Any) -> str:
    """The architecture's name, if kvikk can serve it.

    Raises:
        ModelError: with the architecture's name, the reason and a way out.
    """
    name = architecture_name(config)
    found = refusal(config)
    if found is not None:
        raise ModelError(f"{name} is not supported: {found[1]}. Use a decoder-only model with full attention")
    return name


def architecture_name(config: Any) -> str:
    """The class that a config names first."""
    names = getattr(config, "architectures", None) or [f"model type {config.model_type!r}"]
    return str(names[0])


def refusal(config: Any) -> tuple[Refused, str] | None:
    """Why kvikk cannot serve a config, the most basic reason, as kind and sentence; None when the config allows it."""
    return next(_refusals(config, architecture_name(config)), None)


def _refusals(config: Any, name: str) -> Iterator[tuple[Refused, str]]:
    if config.is_encoder_decoder:
        yield Refused.ENCODER_DECODER, "it is an encoder-decoder model"
    if getattr(config, "text_config", None) is not None or getattr(config, "vision_config", None) is not None:
        yield Refused.MULTI_MODAL, "it is a multi-modal model"
    if not name.endswith(("ForCausalLM", "LMHeadModel")):
        yield Refused.HEADLESS, "it has no head that predicts the next token (its class should be ...ForCausalLM)"
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation.quant_method
        how = getattr(method, "value", method)
        yield Refused.QUANTISED, f"its weights are quantised ({how}); take the bf16 or fp16 checkpoint"
    differing = getattr(config, "per_layer_attributes", None)
    if differing:  # its fields cannot be read as one number for all layers, those below included
        yield Refused.DIFFERING_LAYERS, f"its layers differ in {', '.join(sorted(differing))}"
    if getattr(config, "kv_lora_rank", None):
        yield (
            Refused.LATENT,
            f"multi-head latent attention (kv_lora_rank {config.kv_lora_rank}) keeps no K and V by head",
        )
    for field in STATE_FIELDS:
        if getattr(config, field, None):
            yield (
                Refused.RECURRENT,
                f"it is a hybrid with recurrent state ({field} {getattr(config, field)}), which pages cannot hold",
            )
    others = set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS
    if others:
        types = ", ".join(sorted(others))
        yield Refused.OTHER_LAYERS, f"it has layers of type {types} among its {config.num_hidden_layers}"
    capped = getattr(config, "attn_logit_softcapping", None)
    if capped:
        yield Refused.SOFT_CAPPED, f"its attention scores are capped (attn_logit_softcapping {capped})"
    if config.model_type == "gpt_oss":
        yield Refused.SINKS, "its attention has sinks"
    if getattr(config, "num_kv_shared_layers", None):
        yield Refused.SHARED_KV, f"{config.num_kv_shared_layers} of its layers share the KV of others"
    if getattr(config, "alibi", False):
        yield Refused.ALIBI, "its attention adds ALiBi biases"
    v_width = getattr(config, "v_head_dim", None)
    if v_width and v_width != getattr(config, "head_dim", v_width):
        yield Refused.WIDTHS, f"its V heads are {v_width} wide and its K heads {config.head_dim}"
    if not getattr(config, "max_position_embeddings", None):
        yield (
            Refused.UNLIMITED,
            "its config names no max_position_embeddings, so its length has no limit to check (as with ALiBi)",
        )


def position_limit(config: Any) -> int:
    """Positions the model was made for; `check_config` lets none pass that names no limit."""
    return int(config.max_position_embeddings)


def sliding_window(config: Any) -> int | None:
    """Tokens that a windowed layer of the model sees, itself included; None when no layer has a window."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if window is None or (layer_types is not None and "sliding_attention" not in layer_types):
        return None
    return int(window)


def check_length(max_model_len: int, positions: int) -> None:
    """Refuse sequences longer than a model has positions: what lies behind them would be read all the same.

    Raises:
        ConfigError: naming both.
    """
    if max_model_len > positions:
        raise ConfigError(
            f"--max-model-len {max_model_len:,} is more than the model's {positions:,} positions: at most {positions}"
        )


def resolve_length(config: Any, asked: int | None) -> int:
    """The longest sequence to serve: what was asked for, or all the model allows.

    A sliding window no smaller than this is full attention; a smaller one lowers it, with a warning.

    Raises:
        ConfigError: more was asked for than the model has positions.
    """
    limit = position_limit(config)
    length = limit if asked is None else asked
    check_length(length, limit)
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

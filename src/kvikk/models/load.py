"""`load_model`: from a name to a model that runs, its tokenizer, and the length it will be served at."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvikk.errors import ConfigError, ModelError
from kvikk.models import probe
from kvikk.models.family import FamilyConfig, family_config
from kvikk.models.fingerprint import fingerprint
from kvikk.models.fuse import read_weights
from kvikk.models.llama import LlamaModel, LlamaWeights
from kvikk.models.metadata import (
    eos_token_ids,
    generation_defaults,
    read_config,
    read_tokenizer,
    resolve_dtype,
    settings,
)
from kvikk.models.protocol import CausalLM
from kvikk.models.rope import check_rope, rope_frequencies, rope_table, rope_text
from kvikk.models.sources import Checkpoint, locate
from kvikk.models.spec import ModelSpec
from kvikk.models.support import check_config, check_length, position_limit, resolve_length, sliding_window
from kvikk.models.transformers_model import TransformersModel, quiet_transformers, read_module, register
from kvikk.models.weights import SafetensorsFolder, StateDict, safetensors_files
from kvikk.types import Numerics

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to serve.

    Args:
        model: runs it.
        tokenizer: transformers' tokenizer, with the chat template if the model has one.
        max_model_len: tokens of the longest sequence, prompt and output together; no more than the model can compute.
        generation_defaults: the sampling settings that the model's authors recommend, by transformers' names.
        folder: where it was read from.

    Raises:
        ConfigError: the model has fewer positions.
    """

    model: CausalLM
    tokenizer: Any
    max_model_len: int
    generation_defaults: Mapping[str, Any]
    folder: Path

    def __post_init__(self) -> None:
        check_length(self.max_model_len, self.model.longest)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """All that is settled before weights are read."""

    checkpoint: Checkpoint
    config: Any
    architecture: str
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: frozenset[int]
    numerics: Numerics


def load_model(
    model: str | None,
    *,
    dtype: str = "auto",
    device: torch.device,
    max_model_len: int | None = None,
    revision: str | None = None,
    tokenizer: str | None = None,
    numerics: Numerics = "fast",
) -> LoadedModel:
    """Load a decoder-only model.

    Args:
        model: None or `smollm2` for the bundled model, a folder, a `.gguf` file (or a folder with one), a hub id
            `org/name`, or `org/name:file.gguf`. Code that comes with a model is never run.
        dtype: `auto` (the checkpoint's; fp16 becomes bf16 on CPU), `bfloat16`, `float16` or `float32`.
        device: where weights go and steps run.
        max_model_len: tokens of the longest sequence; None for all the model allows.
        revision: of a hub model.
        tokenizer: folder or hub id of a tokenizer other than the model's own.
        numerics: `exact` for logits that do not depend, in any bit, on what else is computed in a step.

    Raises:
        ModelError: not found, broken, or not supported, with the reason and a way out.
        ConfigError: `max_model_len` is more than the model has positions, or `exact` numerics is not to be had.
    """
    checkpoint = locate(model, revision)
    with quiet_transformers():
        config = read_config(checkpoint)
        architecture = check_config(config)
        length = resolve_length(config, max_model_len)
        check_rope(config, length)
        loaded_tokenizer = read_tokenizer(checkpoint, tokenizer)
        plan = _Plan(
            checkpoint=checkpoint,
            config=config,
            architecture=architecture,
            max_model_len=length,
            dtype=resolve_dtype(dtype, checkpoint, config, device),
            device=device,
            eos_token_ids=eos_token_ids(checkpoint, config, loaded_tokenizer),
            numerics=numerics,
        )
        family = family_config(architecture, config)
        if numerics == "exact":
            _check_exact(plan, family)
        loaded: CausalLM = _load_other(plan) if family is None else _load_family(plan, family)
    log.info("%s: %s in %s on %s, %d tokens", checkpoint.name, architecture, plan.dtype, device, length)
    return LoadedModel(
        model=loaded,
        tokenizer=loaded_tokenizer,
        max_model_len=length,
        generation_defaults=generation_defaults(checkpoint),
        folder=checkpoint.folder,
    )


def _check_exact(plan: _Plan, family: FamilyConfig | None) -> None:
    """Refuse `exact` numerics where it cannot be kept, before any weight is read."""
    if family is None:
        raise ConfigError(
            f"--numerics exact: {plan.architecture} runs on transformers' own module, whose operations may depend on "
            "the batch in their last bits: use --numerics fast, or a model of the Llama family"
        )
    if plan.device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--numerics exact is not available on {plan.device.type}: use --device cpu or cuda, or fast")
    if plan.device.type == "cuda" and find_spec("triton") is None:
        raise ConfigError("--numerics exact on a GPU needs triton: pip install 'kvikk[cuda]', or use --numerics fast")
    if plan.device.type == "cpu" and plan.dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"--numerics exact computes in bfloat16 and float32 on a CPU, not in {plan.dtype}: pass --dtype bfloat16"
        )


def _load_family(plan: _Plan, family: FamilyConfig) -> LlamaModel:
    """Onto kvikk's own module."""
    weights = _family_weights(plan, family)
    spec = _spec(
        plan,
        shape=probe.Shape(
            q_heads=family.q_heads, kv_heads=(family.kv_heads,) * family.layers, head_dim=family.head_dim
        ),
        vocabulary=family.vocabulary,
        digest=fingerprint(asdict(family) | {"rope": rope_text(plan.config)}, weights.named()),
    )
    table = rope_table(
        plan.architecture, plan.config, positions=plan.max_model_len, dtype=plan.dtype, device=plan.device
    )
    start = rope_table(plan.architecture, plan.config, positions=2, dtype=torch.float32, device=plan.device)
    return LlamaModel(family, spec, weights, table, rope_frequencies(start))


def _family_weights(plan: _Plan, family: FamilyConfig) -> LlamaWeights:
    folder, gguf = plan.checkpoint.folder, plan.checkpoint.gguf
    if gguf is None and safetensors_files(folder):
        with SafetensorsFolder(folder) as source:
            return read_weights(source, family, dtype=plan.dtype, device=plan.device)
    module = read_module(folder, dtype=plan.dtype, device=torch.device("cpu"), gguf=gguf)
    return read_weights(StateDict(module.state_dict()), family, dtype=plan.dtype, device=plan.device)


def _load_other(plan: _Plan) -> TransformersModel:
    """Onto transformers' module, if it proves to compute through the step."""
    register()
    module = read_module(plan.checkpoint.folder, dtype=plan.dtype, device=plan.device, gguf=plan.checkpoint.gguf)
    vocabulary = module.get_output_embeddings().weight.shape[0]
    layers = plan.config.num_hidden_layers
    unproved = _spec(plan, shape=probe.Shape(q_heads=0, kv_heads=(), head_dim=0), vocabulary=vocabulary, digest="")
    try:
        shape = probe.check(TransformersModel(module, unproved, plan.max_model_len), vocabulary, layers)
    except ModelError as error:
        raise ModelError(f"{plan.architecture} is not supported: {error}") from error
    digest = fingerprint(settings(plan.config), dict(module.state_dict()))
    return TransformersModel(module, _spec(plan, shape=shape, vocabulary=vocabulary, digest=digest), plan.max_model_len)


def _spec(plan: _Plan, *, shape: probe.Shape, vocabulary: int, digest: str) -> ModelSpec:
    return ModelSpec(
        name=plan.checkpoint.name,
        architecture=plan.architecture,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocabulary=vocabulary,
        max_positions=min(position_limit(plan.config), sliding_window(plan.config) or position_limit(plan.config)),
        dtype=plan.dtype,
        fingerprint=digest,
        rope=rope_text(plan.config),
        eos_token_ids=plan.eos_token_ids,
        numerics=plan.numerics,
    )


@dataclass(frozen=True, kw_only=True)
class TextSide:
    """What of a model deals with text: enough for a process that does not run it.

    Args:
        name: as the user gave it.
        tokenizer: transformers' tokenizer, with the chat template if the model has one.
        generation_defaults: the sampling settings that the model's authors recommend, by transformers' names.
    """

    name: str
    tokenizer: Any
    generation_defaults: Mapping[str, Any]


def load_text_side(model: str | None, *, revision: str | None = None, tokenizer: str | None = None) -> TextSide:
    """Load a model's tokenizer and defaults without its weights; the files are fetched or converted when needed.

    Raises:
        ModelError: not found, or the tokenizer cannot be read.
    """
    checkpoint = locate(model, revision)
    with quiet_transformers():
        return TextSide(
            name=checkpoint.name,
            tokenizer=read_tokenizer(checkpoint, tokenizer),
            generation_defaults=generation_defaults(checkpoint),
        )

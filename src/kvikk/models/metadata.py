"""Reading what stands beside the weights: config, dtype, end tokens, recommended sampling, tokenizer."""

from __future__ import annotations

import logging
from typing import Any

import torch

from kvikk.errors import ModelError
from kvikk.models.sources import Checkpoint
from kvikk.models.weights import WAY_OUT

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
INCIDENTAL = frozenset({
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "pad_token_id",
    "transformers_version", "use_cache",
})  # fmt: skip


def read_config(checkpoint: Checkpoint) -> Any:
    """The Hugging Face config.

    Raises:
        ModelError: it cannot be read, needs code of its own, or is a GGUF of an unknown architecture.
    """
    from transformers import AutoConfig

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        if checkpoint.gguf is not None:
            options["gguf_file"] = checkpoint.gguf
        config = AutoConfig.from_pretrained(checkpoint.folder, **options)
    except Exception as error:  # transformers raises whatever its parsers do
        raise ModelError(_unreadable(checkpoint, error)) from error
    if not config.architectures:
        config.architectures = [_causal_class(config)]
    return config


def _unreadable(checkpoint: Checkpoint, error: Exception) -> str:
    if checkpoint.gguf is not None:
        path = checkpoint.folder / checkpoint.gguf
        architecture = _gguf_architecture(checkpoint)
        if architecture is None:
            return f"{path} ({path.stat().st_size:,} bytes) is truncated or no GGUF file ({error}): {WAY_OUT}"
        return f"{path} has architecture {architecture!r}, which cannot be read from GGUF ({error}): take safetensors"
    text = str(error)
    if "trust_remote_code" in text:
        return (
            f"{checkpoint.name} needs code of its own (auto_map in its config.json), which is never run: "
            "use a model whose architecture transformers has"
        )
    return f"{checkpoint.folder / 'config.json'} cannot be read ({text.splitlines()[0]}): {WAY_OUT}"


def _gguf_architecture(checkpoint: Checkpoint) -> str | None:
    from gguf import GGUFReader

    try:
        field = GGUFReader(checkpoint.folder / str(checkpoint.gguf)).get_field("general.architecture")
    except Exception:  # the reader indexes past the end of a broken file
        return None
    return None if field is None else str(field.contents())


def _causal_class(config: Any) -> str:
    """The class that transformers would load for a config that names none, as GGUF configs do."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type))


def resolve_dtype(asked: str, checkpoint: Checkpoint, config: Any, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV.

    Raises:
        ModelError: no such dtype.
    """
    if asked != "auto":
        if asked not in DTYPES:
            raise ModelError(f"dtype {asked!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[asked]
    if checkpoint.gguf is not None:
        return torch.bfloat16
    stored = config.dtype
    if isinstance(stored, str):
        stored = getattr(torch, stored, None)
    if stored is None:
        stored = torch.float32  # what transformers takes for a checkpoint that does not say
    if stored == torch.float16 and device.type == "cpu":
        log.info("the checkpoint is fp16, which CPUs compute slowly: loading it as bf16")
        return torch.bfloat16
    if stored not in DTYPES.values():
        raise ModelError(f"the checkpoint's dtype is {stored}: pass --dtype bfloat16, float16 or float32")
    return stored  # type: ignore[no-any-return]


def read_tokenizer(checkpoint: Checkpoint, other: str | None) -> Any:
    """The model's tokenizer, or another one named by folder or hub id.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        if other is not None:
            return AutoTokenizer.from_pretrained(other, trust_remote_code=False)
        gguf = {} if checkpoint.gguf is None else {"gguf_file": checkpoint.gguf}
        return AutoTokenizer.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False, **gguf)
    except Exception as error:  # transformers and tokenizers raise whatever their parsers do
        where = other or checkpoint.folder
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"no tokenizer can be read from {where} ({first}): name one with --tokenizer") from error


def _generation_config(checkpoint: Checkpoint) -> Any | None:
    from transformers import GenerationConfig

    if not (checkpoint.folder / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    except Exception as error:
        path = checkpoint.folder / "generation_config.json"
        raise ModelError(f"{path} cannot be read ({error}): repair or remove it") from error


def eos_token_ids(checkpoint: Checkpoint, config: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text: what generation config, config and tokenizer say, together."""
    found: set[int] = set()
    for source in (_generation_config(checkpoint), config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)


def generation_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """The sampling settings that stand in generation_config.json."""
    generation = _generation_config(checkpoint)
    said = {} if generation is None else generation.to_diff_dict()
    return {name: said[name] for name in SAMPLING if said.get(name) is not None}


def settings(config: Any) -> dict[str, Any]:
    """The part of a config that changes a model's numbers."""
    return {name: value for name, value in config.to_diff_dict().items() if name not in INCIDENTAL}

"""Tiny random Hugging Face models, saved to a folder as real ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from dense_step import DenseKV
from tokenizers import Tokenizer, models

from kvikk.models import CausalLM, LoadedModel, load_model

CPU = torch.device("cpu")
VOCABULARY = 128
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def config(kind: str, **changes: Any) -> Any:
    """A tiny config of a class such as `Llama`."""
    return getattr(transformers, f"{kind}Config")(**(COMMON | changes))


def module(config: Any, seed: int = 0) -> Any:
    """A random fp32 module whose norms and biases are random too, so that leaving one out shows."""
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    made.tie_weights()
    return made


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of three words; `</s>` (2) ends a text."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "</s>": 2}, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>").save_pretrained(
        folder
    )


def save(made: Any, folder: Path, **options: Any) -> Path:
    """Save a module and a tokenizer; returns the folder."""
    made.save_pretrained(folder, **options)
    save_tokenizer(folder)
    return folder


def load(folder: Path | str, **options: Any) -> LoadedModel:
    """`load_model` on the CPU."""
    return load_model(str(folder), device=CPU, **options)


def own_logits(
    model: CausalLM, rows: list[torch.Tensor], new_tokens: int = 0, head_rows: int | None = None
) -> torch.Tensor:
    """Logits of all tokens of all rows, run as one flattened step, or with the last tokens in a second step.

    The head runs on all outputs of a step at once, or on `head_rows` at a time.
    """
    kv = DenseKV()
    parts = [row[: len(row) - new_tokens] for row in rows]
    logits = [_step(model, kv, parts, [0] * len(rows), head_rows)]
    if new_tokens:
        starts = [len(part) for part in parts]
        lasts = [row[start:] for row, start in zip(rows, starts, strict=True)]
        logits.append(_step(model, kv, lasts, starts, head_rows))
    per_step = [
        step.split([len(part) for part in ps])
        for step, ps in zip(logits, [parts, [row[-new_tokens:] for row in rows]][: len(logits)], strict=True)
    ]
    return torch.cat([torch.cat(row) for row in zip(*per_step, strict=True)])


def _step(
    model: CausalLM, kv: DenseKV, rows: list[torch.Tensor], starts: list[int], head_rows: int | None
) -> torch.Tensor:
    step = kv.step([len(row) for row in rows])
    positions = torch.cat([torch.arange(at, at + len(row)) for at, row in zip(starts, rows, strict=True)])
    tokens = torch.cat(rows)
    hidden = model.forward(tokens, positions, step, torch.arange(len(tokens)))
    assert sorted(step.calls) == list(range(model.spec.layers)), "every layer attends exactly once"
    return torch.cat([model.head(part) for part in hidden.split(head_rows or len(hidden))])


def reference_logits(made: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    """transformers' own logits, each row alone."""
    with torch.no_grad():
        return torch.cat([made(input_ids=row[None], use_cache=False).logits[0] for row in rows])


def random_rows(*lengths: int, seed: int = 1) -> list[torch.Tensor]:
    """Rows of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]

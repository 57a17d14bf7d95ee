"""Which model to run, where, and how long its sequences may get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvikk.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model and the device.

    Args:
        model: local folder, GGUF file or hub id; the bundled smollm2 when none is named.
        tokenizer: folder or hub id of the tokenizer, where it is not the model's own.
        revision: branch, tag or commit of a hub model.
        dtype: of weights and KV; auto takes the checkpoint's.
        device: where to run; auto takes CUDA where there is some.
        max_model_len: tokens of a sequence at most, prompt and answer; the model's own maximum when not given.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(
                f"--max-model-len {self.max_model_len} leaves no room for a prompt and an answer: at least 2"
            )

    def torch_device(self) -> torch.device:
        """The device named, or the best there is.

        Raises:
            ConfigError: CUDA was asked for and is not there.
        """
        has_cuda = torch.cuda.is_available()
        if self.device == "cuda" and not has_cuda:
            raise ConfigError("--device cuda: this machine has no CUDA device, or torch was built without; use cpu")
        return torch.device("cuda" if has_cuda and self.device != "cpu" else "cpu")

"""Where weights come from: named tensors out of safetensors files, or out of a module that transformers has read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvikk.errors import ModelError

INDEX = "model.safetensors.index.json"
WAY_OUT = "download the model again, or name another folder"


class TensorSource(Protocol):
    """Tensors by the names that Hugging Face's checkpoint gives them."""

    def names(self) -> frozenset[str]:
        """All names."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the dtype it is stored in. The name must be one of `names`."""
        ...


class StateDict:
    """The state dict of a module that transformers has loaded (`.bin` checkpoints, GGUF)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> frozenset[str]:
        """All names."""
        return frozenset(self._tensors)

    def read(self, name: str) -> Tensor:
        """The module's own tensor, not a copy."""
        return self._tensors[name]


class SafetensorsFolder:
    """The safetensors files of a folder, mapped into memory: a tensor is read from disk when it is asked for.

    Use as a context manager; the files are closed on leaving it.

    Raises:
        ModelError: on entering, when a file is missing, truncated or no safetensors file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> SafetensorsFolder:
        with ExitStack() as stack:
            for path in safetensors_files(self._folder):
                file = stack.enter_context(_open(path))
                self._files.update(dict.fromkeys(file.keys(), file))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def names(self) -> frozenset[str]:
        """All names, over all shards."""
        return frozenset(self._files)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def safetensors_files(folder: Path) -> list[Path]:
    """The safetensors files that make a checkpoint: the shards of its index, its only file, or none.

    Raises:
        ModelError: the index cannot be read, or names a file that is not there.
    """
    index = folder / INDEX
    if not index.is_file():
        single = folder / "model.safetensors"
        return [single] if single.is_file() else []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} is no safetensors index ({error}): {WAY_OUT}") from error
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{index} names the shard {name}, which is missing from {folder}: {WAY_OUT}")
    return [folder / name for name in names]


def _open(path: Path) -> Any:
    opener: Callable[..., Any] = safe_open
    try:
        return opener(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ModelError(f"{path} ({size:,} bytes) is truncated or no safetensors file ({error}): {WAY_OUT}") from error

"""The tokenizer that makes prompts, and counts where a server does not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvikk.models.bundled import BUNDLED
from kvikk.models.metadata import read_tokenizer
from kvikk.models.sources import Checkpoint, locate
from kvikk.models.transformers_model import quiet_transformers


def read(name: str) -> Any:
    """A tokenizer by folder, GGUF file, hub id, or `smollm2`; of a hub model, nothing else is fetched.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    is_local = name == BUNDLED or Path(name).expanduser().exists()
    checkpoint = locate(name) if is_local else Checkpoint(name=name, folder=Path(name))
    with quiet_transformers():
        return read_tokenizer(checkpoint, None if is_local else name)


def name_for(listed: Mapping[str, Any]) -> str:
    """Where the tokenizer of a model should be, as a server lists it: the name it serves it under may be anything."""
    root = listed.get("root")
    return root if isinstance(root, str) and root else str(listed["id"])

"""Prompts and lengths of answers from a file of conversations in ShareGPT's form."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvikk.errors import ConfigError

log = logging.getLogger(__name__)


class Turn(NamedTuple):
    """The first question of a conversation, and its answer."""

    prompt: str
    answer: str


def read_turns(path: Path) -> list[Turn]:
    """The first two turns of every conversation that has two: a list of `{"conversations": [{"value": text}, ...]}`.

    Raises:
        ConfigError: the file cannot be read, or has another form.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read as JSON: {error}") from None
    if not isinstance(entries, list):
        raise ConfigError(f"--dataset-path {path} must hold a list of conversations, not {type(entries).__name__}")
    turns = list(_turns(entries))
    if not turns:
        raise ConfigError(
            f"--dataset-path {path} holds no conversation of two turns: its form must be "
            '[{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}, ...]'
        )
    log.info("%s: %d of %d conversations have two turns", path, len(turns), len(entries))
    return turns


def _turns(entries: list[Any]) -> Iterator[Turn]:
    for entry in entries:
        said = entry.get("conversations") if isinstance(entry, dict) else None
        if isinstance(said, list) and len(said) >= 2:
            values = [turn.get("value") if isinstance(turn, dict) else None for turn in said[:2]]
            if isinstance(values[0], str) and isinstance(values[1], str):
                yield Turn(values[0], values[1])

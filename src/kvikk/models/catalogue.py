"""What runs here: the architectures of the installed transformers, as `support` judges them, and the models on disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvikk.errors import ModelError
from kvikk.models.bundled import BUNDLED, CONVERSION, cache_folder
from kvikk.models.family import family_config
from kvikk.models.metadata import read_config
from kvikk.models.sources import Checkpoint
from kvikk.models.support import Refused, architecture_name, check_config, refusal
from kvikk.models.transformers_model import quiet_transformers

log = logging.getLogger(__name__)

Way = Literal["own", "transformers", "refused"]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A class of transformers that predicts the next token.

    Args:
        name: as `architectures` in a config.json says it.
        model_types: the configs that stand for it.
        way: by kvikk's own module, by transformers' (which a test at load may still refuse), or not at all.
        refused: the kind it is refused for.
    """

    name: str
    model_types: tuple[str, ...]
    way: Way
    refused: Refused | None = None


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """A model whose files are on this machine.

    Args:
        name: what `--model` calls it.
        source: the bundled model, or the Hugging Face hub's cache.
        folder: where its files are.
        size_bytes: of all its files, of every revision.
        architecture: of its config, where it has one that can be read.
        refused: why it cannot be served, as far as its config tells.
    """

    name: str
    source: Literal["bundled", "hub"]
    folder: Path
    size_bytes: int
    architecture: str | None = None
    refused: str | None = None


def architectures() -> list[Architecture]:
    """Every causal language model of transformers, judged by its default config, in order of name.

    A checkpoint's own config may say otherwise (quantised weights, say), and what runs on transformers' module is
    tried at load.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found: dict[tuple[str, Way, Refused | None], list[str]] = {}
    with quiet_transformers():
        for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
            name = names if isinstance(names, str) else names[0]
            way, kind = _judged(name, CONFIG_MAPPING[model_type])
            found.setdefault((name, way, kind), []).append(model_type)
    return [
        Architecture(name=name, model_types=tuple(model_types), way=way, refused=kind)
        for (name, way, kind), model_types in sorted(found.items(), key=lambda item: item[0][0])
    ]


def _judged(name: str, config_class: Any) -> tuple[Way, Refused | None]:
    try:
        config = config_class()
    except Exception:  # a class whose own defaults do not pass its validation tells nothing before a checkpoint does
        return "transformers", None
    config.architectures = [name]
    found = refusal(config)
    if found is not None:
        return "refused", found[0]
    return ("transformers" if family_config(name, config) is None else "own"), None


def cached_models(hub: Path | None = None) -> list[CachedModel]:
    """The models that can be named without a download: the converted bundled one, then the hub cache's by name.

    Args:
        hub: the hub cache, where it is not the hub client's own.
    """
    return [*_bundled(), *sorted(_hub(hub), key=lambda model: model.name)]


def _bundled() -> Iterator[CachedModel]:
    folder = cache_folder() / CONVERSION
    if folder.is_dir():
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        yield _judged_on_disk(BUNDLED, "bundled", folder, size)


def _hub(folder: Path | None) -> Iterator[CachedModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        scanned = scan_cache_dir(folder)
    except CacheNotFound:  # nothing was ever downloaded
        return
    for warning in scanned.warnings:
        log.warning("the hub cache has a broken entry: %s", warning)
    for repository in scanned.repos:
        revisions = sorted(repository.revisions, key=lambda revision: revision.last_modified)
        if repository.repo_type == "model" and revisions:
            newest = repository.refs.get("main", revisions[-1])
            yield _judged_on_disk(repository.repo_id, "hub", newest.snapshot_path, repository.size_on_disk)


def _judged_on_disk(name: str, source: Literal["bundled", "hub"], folder: Path, size_bytes: int) -> CachedModel:
    architecture = refused = None
    if (folder / "config.json").is_file():  # GGUF files are not opened: reading one takes seconds
        try:
            with quiet_transformers():
                config = read_config(Checkpoint(name=name, folder=folder))
            architecture = architecture_name(config)
            check_config(config)
        except ModelError as error:
            refused = str(error)
    return CachedModel(
        name=name, source=source, folder=folder, size_bytes=size_bytes, architecture=architecture, refused=refused
    )

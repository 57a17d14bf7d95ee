"""From what the user named to a folder on this machine: a folder, a GGUF file, a hub id, or the bundled model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvikk.errors import ModelError
from kvikk.models.bundled import BUNDLED, bundled_folder

TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
GGUF_MAGIC = b"GGUF"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model's files.

    Args:
        name: as the user gave it.
        folder: holds all files.
        gguf: name of the GGUF file in it that is the model, if it is one.
    """

    name: str
    folder: Path
    gguf: str | None = None


def locate(model: str | None, revision: str | None = None) -> Checkpoint:
    """Find a model's files, downloading or converting them when needed.

    Args:
        model: None or `smollm2` (the bundled model), a folder, a `.gguf` file, `org/name`, or `org/name:file.gguf`.
        revision: branch, tag or commit of a hub model.

    Raises:
        ModelError: nothing of that name, no network, or a folder or file that is no model.
    """
    if model is None or model == BUNDLED:
        return Checkpoint(name=BUNDLED, folder=bundled_folder())
    path = Path(model).expanduser()
    if path.is_file():
        return _file(model, path)
    if path.is_dir():
        return _folder(model, path)
    repository, _, file = model.partition(":")
    if repository.count("/") != 1 or model.startswith((".", "/", "~")) or (file and not file.endswith(".gguf")):
        raise ModelError(
            f"{model!r} is no folder or file here, and no hub id (org/name, org/name:file.gguf): "
            f"check the path, or name {BUNDLED!r}"
        )
    if file:
        return _file(model, _download(repository, revision, (file,)) / file)
    folder = _download(repository, revision, ("*.safetensors", *TEXT_FILES))
    if not any(folder.glob("*.safetensors")):
        folder = _download(repository, revision, ("*.bin", *TEXT_FILES))
    return _folder(model, folder)


def _file(name: str, path: Path) -> Checkpoint:
    with path.open("rb") as file:
        magic = file.read(len(GGUF_MAGIC))
    if magic != GGUF_MAGIC:
        raise ModelError(f"{path} is no GGUF file: name a GGUF file, or the folder of a Hugging Face model")
    return Checkpoint(name=name, folder=path.parent, gguf=path.name)


def _folder(name: str, folder: Path) -> Checkpoint:
    if (folder / "config.json").is_file():
        return Checkpoint(name=name, folder=folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _file(name, ggufs[0])
    if ggufs:
        found = ", ".join(path.name for path in ggufs)
        raise ModelError(f"{folder} holds {len(ggufs)} GGUF files ({found}): name one of them by its path")
    raise ModelError(f"{folder} is no model: it has no config.json and no GGUF file. Name the folder that has them")


def _download(repository: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ModelError(f"{repository} is gated on the hub: accept its terms there, then `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"the hub has no public model {repository}: check the name, or `hf auth login`") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{repository} is not in the local hub cache and the hub cannot be reached: "
            "check the network, or name a local folder"
        ) from error
    except Exception as error:  # the client's transport has its own errors
        raise ModelError(f"{repository} could not be downloaded ({error}): name a local folder instead") from error

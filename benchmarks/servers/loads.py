"""The loads: what is asked of every server, and the run of `kvikk bench serve` that asks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvikk.bench.datasets import DatasetConfig, Request, make_requests
from kvikk.configuration import build

OUTPUT_TOKENS = 64
LOAD_TIMEOUT_S = 1800.0
REHEARSAL_SEED = 1000
"""Added to a load's seed when it is only to warm the server up: other prompts, nothing measured is cached after."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One row of the table.

    Args:
        work: what the prompts are.
        concurrency: requests underway at once.
        prompts: requests in all.
        options: of the dataset, by name.
        seed: of the prompts, another for each load, so that none finds another's cached.
    """

    work: str
    concurrency: int
    prompts: int
    options: dict[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """For file names and people."""
        return f"{self.work} x{self.concurrency}"

    def requests(self, tokenizer: Any) -> list[Request]:
        """What `kvikk bench serve` will ask."""
        return make_requests(build(DatasetConfig, self.options | {"num_prompts": self.prompts}), tokenizer, self.seed)


WORKS: dict[str, dict[str, Any]] = {
    "random_256": {"dataset_name": "random", "random_input_len": 256, "random_output_len": OUTPUT_TOKENS},
    "shared_1024+64": {
        "dataset_name": "shared-prefix",
        "prefix_repetition_num_prefixes": 1,
        "prefix_repetition_prefix_len": 1024,
        "prefix_repetition_suffix_len": 64,
        "prefix_repetition_output_len": OUTPUT_TOKENS,
    },
}
PROMPTS = {1: 8, 8: 32}
"""Requests by concurrency."""


def make_loads(works: Sequence[str], concurrencies: Sequence[int], scale: float = 1.0) -> list[Load]:
    """All loads; the prompts of one do not depend on which others run.

    Args:
        works: of `WORKS`.
        concurrencies: of `PROMPTS`.
        scale: of the numbers of prompts, which stay a whole batch at least.
    """
    every = [(work, concurrency) for work in WORKS for concurrency in PROMPTS]
    return [
        Load(
            work=work,
            concurrency=concurrency,
            prompts=max(concurrency, round(PROMPTS[concurrency] * scale)),
            options=WORKS[work],
            seed=index,
        )
        for index, (work, concurrency) in enumerate(every)
        if work in works and concurrency in concurrencies
    ]


class LoadFailed(Exception):
    """`kvikk bench serve` could not measure a load."""


def send(
    load: Load, *, port: int, model: str, flags: Sequence[str], folder: Path, reference: Path | None
) -> dict[str, Any]:
    """Send a load to a server; the detailed result.

    Args:
        load: what to send; without a reference only to warm up: fewer and other prompts.
        port: of the server on this machine.
        model: folder of the model, also its name in requests.
        flags: further ones.
        folder: where the result goes.
        reference: a detailed result to compare texts with.

    Raises:
        LoadFailed: no request succeeded, or the command refused.
    """
    is_rehearsal = reference is None
    file = folder / f"{'rehearsal ' if is_rehearsal else ''}{load.name}.json"
    file.unlink(missing_ok=True)
    options = load.options | {
        "num_prompts": min(load.prompts, 2 * load.concurrency) if is_rehearsal else load.prompts,
        "seed": load.seed + (REHEARSAL_SEED if is_rehearsal else 0),
        "max_concurrency": load.concurrency,
        "port": port,
        "model": model,
        "result_filename": str(file),
    }
    if reference is not None:
        options["compare"] = str(reference)
    command = [sys.executable, "-m", "kvikk", "bench", "serve", "--disable-tqdm", "--save-result", "--save-detailed"]
    command += [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch comes along, and has nothing to compute here
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, env=variables, timeout=LOAD_TIMEOUT_S, check=False
    )
    if done.returncode or not file.exists():
        raise LoadFailed(" | ".join(done.stderr.strip().splitlines()[-3:]) or f"exit code {done.returncode}")
    result: dict[str, Any] = json.loads(file.read_text())
    return result

"""From measured samples to the result file's flat rows, and to a table for people."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvikk.bench.device import commit
from peers.engines import VLLM, EngineKind
from peers.works import Tokens, Work, token_match

Row = dict[str, Any]


@dataclass(kw_only=True)
class Samples:
    """What one engine did in one work: a sample for each round, or why there is none."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)
    failure: str | None = None


def row(kind: EngineKind, version: str, work: Work, samples: Samples, references: dict[str, Tokens]) -> Row:
    """A flat row; `references` are the right tokens by the dtype they were computed in.

    The lowest match of all rounds is written, the median of their seconds, and the speed of the median.
    """
    made: Row = {"engine": kind.name, "version": version, "work": work.name}
    if samples.failure is not None:
        return {**made, "tokens_per_s": None, "token_match": None, "note": samples.failure}
    median = statistics.median(samples.seconds)
    if median <= 0:
        note = "the longer run took no longer than the shorter one: the machine is too noisy"
        return {**made, "tokens_per_s": None, "token_match": None, "note": note}
    made["tokens_per_s"] = round(work.counted_tokens / median, 2)
    for dtype, reference in references.items():
        name = "token_match" if dtype == "bfloat16" else f"token_match_{dtype}"
        made[name] = round(min(token_match(tokens, reference) for tokens in samples.tokens), 4)
    made |= {"tokens": work.counted_tokens, "seconds": round(median, 4), "seconds_min": round(min(samples.seconds), 4)}
    return made | {"rounds": len(samples.seconds)}


def add_ratios(rows: Sequence[Row], kinds: Sequence[EngineKind]) -> None:
    """Write into each row its speed over that of vLLM's faster setting for the same work."""
    names = {kind.name for kind in kinds if kind.family == VLLM}
    for made in rows:
        peers = [r["tokens_per_s"] for r in rows if r["engine"] in names and r["work"] == made["work"]]
        best = max((speed for speed in peers if speed), default=None)
        made["ratio_to_vllm"] = round(made["tokens_per_s"] / best, 3) if best and made["tokens_per_s"] else None


def header(*, model: Path, threads: int, rounds: int, descriptions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Where the numbers are from: machine, versions, commit, settings."""
    import torch

    versions = {name: description["version"] for name, description in descriptions.items()}
    return {
        "device": "cpu",
        "cpu": cpu_name(),
        "threads": threads,
        "versions": {**versions, "torch": torch.__version__, "python": platform.python_version()},
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "dtype": "bfloat16",
        "model": model.name,
        "rounds": rounds,
        "settings": {name: description["settings"] for name, description in descriptions.items()},
    }


def show(rows: Sequence[Row], kinds: Sequence[EngineKind], works: Sequence[Work], console: Console) -> None:
    """Print the table, and under it what could not be measured."""
    table = Table(title="tokens/s (x the faster vLLM), token match with transformers generate", show_lines=True)
    table.add_column("work")
    for kind in kinds:
        table.add_column(kind.name, justify="right")
    by_place = {(made["engine"], made["work"]): made for made in rows}
    for work in works:
        table.add_row(work.name, *(_cell(by_place[kind.name, work.name]) for kind in kinds))
    console.print(table)
    for made in rows:
        if "note" in made:
            console.print(f"{made['engine']}, {made['work']}: {made['note']}", markup=False)


def _cell(made: Row) -> str:
    if made["tokens_per_s"] is None:
        return "-"
    ratio = f" (x{made['ratio_to_vllm']:.2f})" if made["ratio_to_vllm"] else ""
    lines = [f"{made['tokens_per_s']:,.1f}{ratio}", f"match {made['token_match']:.1%}"]
    if "token_match_float32" in made:
        lines.append(f"fp32 {made['token_match_float32']:.1%}")
    return "\n".join(lines)


def cpu_name() -> str:
    """The processor as the kernel names it, with the instruction sets that bf16 depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    named = {name.strip(): value.strip() for name, value in facts.items()}
    flags = set(named.get("flags", "").split())
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{named.get('model name', platform.machine())} ({', '.join(wide)})"

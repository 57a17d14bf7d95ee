"""From the results of `kvikk bench serve` to flat rows, and to a table for people."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from peers.report import Row, cpu_name
from rich.console import Console
from rich.table import Table

from kvikk.bench.device import commit
from servers.kinds import KV_GIB, VLLM, ServerKind
from servers.loads import OUTPUT_TOKENS, Load
from servers.process import CpuTimes


@dataclass(kw_only=True)
class Samples:
    """What one server did under one load: a result and its CPU time for each round, or why there is none."""

    results: list[dict[str, Any]] = field(default_factory=list)
    cpu: list[CpuTimes] = field(default_factory=list)
    failure: str | None = None


def row(kind: ServerKind, version_: str, load: Load, samples: Samples) -> Row:
    """A flat row: medians of the rounds, percentiles of all their samples together, the lowest of their matches."""
    made: Row = {"engine": kind.name, "version": version_, "work": load.work, "concurrency": load.concurrency}
    if samples.failure is not None:
        return {**made, "output_tokens_per_s": None, "token_match": None, "note": samples.failure}
    results = samples.results
    tokens = [result["total_output_tokens"] for result in results]
    made |= {
        "output_tokens_per_s": _median([result["output_throughput"] for result in results], 2),
        "requests_per_s": _median([result["request_throughput"] for result in results], 3),
        **_percentiles("ttft", [s for result in results for s in _of_successes(result, "ttfts")]),
        **_percentiles("itl", [s for result in results for gaps in _of_successes(result, "itls") for s in gaps]),
        "errors": sum(result["failed"] for result in results),
        "token_match": round(min(result["token_match"] for result in results), 4),
        "identical_texts": min(result["identical_texts"] for result in results),
        "requests": load.prompts,
        "answers_of_other_length": sum(
            length != OUTPUT_TOKENS for result in results for length in _of_successes(result, "output_lens")
        ),
        "cached_input_tokens": results[-1]["cached_input_tokens"],
    }
    for part in ("front", "engine"):
        per_token = [getattr(cpu, part) * 1000 / count for cpu, count in zip(samples.cpu, tokens, strict=True)]
        made[f"{part}_cpu_ms_per_token"] = _median(per_token, 3)
    made["client_cpu_share"] = round(max(result["client_cpu_share"] for result in results), 3)
    made["client_lag_p99_ms"] = round(max(result["client_lag_p99_ms"] for result in results), 2)
    made["rounds"] = len(results)
    return made


def add_ratios(rows: Sequence[Row], kinds: Sequence[ServerKind]) -> None:
    """Write into each row its speed over that of vLLM's faster setting under the same load."""
    names = {kind.name for kind in kinds if kind.family == VLLM}
    for made in rows:
        place = (made["work"], made["concurrency"])
        peers = [
            other["output_tokens_per_s"]
            for other in rows
            if other["engine"] in names and (other["work"], other["concurrency"]) == place
        ]
        best = max((speed for speed in peers if speed), default=None)
        speed = made["output_tokens_per_s"]
        made["ratio_to_vllm"] = round(speed / best, 3) if best and speed else None


def header(
    *, model: Path, threads: int, rounds: int, versions: dict[str, str], settings: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Where the numbers are from: machine, versions, commit, settings."""
    return {
        "device": "cpu",
        "cpu": cpu_name(),
        "threads": threads,
        "versions": {**versions, "torch": version("torch"), "python": platform.python_version()},
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "dtype": "bfloat16",
        "kv_gib": KV_GIB,
        "model": model.name,
        "rounds": rounds,
        "settings": settings,
    }


def show(rows: Sequence[Row], kinds: Sequence[ServerKind], loads: Sequence[Load], console: Console) -> None:
    """Print the table, and under it what could not be measured."""
    title = "output tokens/s (x the faster vLLM), p50 / p99 in ms, token match with transformers generate"
    table = Table(title=title, show_lines=True)
    table.add_column("load")
    for kind in kinds:
        table.add_column(kind.name, justify="right")
    by_place = {(made["engine"], made["work"], made["concurrency"]): made for made in rows}
    for load in loads:
        table.add_row(load.name, *(_cell(by_place[kind.name, load.work, load.concurrency]) for kind in kinds))
    console.print(table)
    for made in rows:
        if "note" in made:
            note = f"{made['engine']}, {made['work']} x{made['concurrency']}: {made['note']}"
            console.print(note, markup=False)


def _cell(made: Row) -> str:
    if made["output_tokens_per_s"] is None:
        return "-"
    ratio = f" (x{made['ratio_to_vllm']:.2f})" if made["ratio_to_vllm"] else ""
    lines = [
        f"{made['output_tokens_per_s']:,.1f}{ratio}",
        f"TTFT {made['ttft_p50_ms']:,.0f} / {made['ttft_p99_ms']:,.0f}",
        f"ITL {made['itl_p50_ms']:,.1f} / {made['itl_p99_ms']:,.1f}",
        f"CPU/token {made['front_cpu_ms_per_token']:.2f} + {made['engine_cpu_ms_per_token']:.1f}",
        f"match {made['token_match']:.1%}",
    ]
    return "\n".join([*lines, f"{made['errors']} errors"] if made["errors"] else lines)


def _of_successes(result: dict[str, Any], name: str) -> list[Any]:
    """A detail of the requests that did not fail."""
    return [value for value, error in zip(result[name], result["errors"], strict=True) if not error]


def _percentiles(metric: str, seconds: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{metric}_p{rank}_ms": round(float(np.percentile(seconds, rank)) * 1000, 2) if len(seconds) else None
        for rank in (50, 99)
    }


def _median(values: Sequence[float], digits: int) -> float:
    return round(statistics.median(values), digits)

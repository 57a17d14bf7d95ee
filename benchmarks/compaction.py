"""What compaction takes of a decode step: time in which rows are scored, planned and packed, beside all of it.

    .venv/bin/python benchmarks/compaction.py --device cuda --output benchmarks/results/compaction_h200.json

The engine on random weights of a named shape; every row is compacted once in as many steps as lie between two triggers.
First these steps are run twice over as they are: what they take more than those of them that no compaction is near is
what it adds, since a device has other work meanwhile, and so has the host. Then once more with the device waited for
before and after each compaction, for what one takes by itself. A budget of more tokens than there are shows what the
mere asking costs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from kvikk.bench.device import header, synchronize
from kvikk.bench.random_engine import random_engine
from kvikk.bench.results import write_rows
from kvikk.bench.step import NotMeasured, StepConfig
from kvikk.configuration import build
from kvikk.engine import Engine, EngineConfig, SamplingParams
from kvikk.models.shapes import SHAPES, named_shape

WARM_UP_STEPS: Final = 8
LEAST_DECODING: Final = 0.9
"""Of the rows in a step, on average."""
PREFILL_TOKENS: Final = 8192
NEAR: Final = 2
"""Steps that a compaction is felt in, its own included: the device may still be at the one before."""
LEAST_QUIET: Final = 8
"""Steps that no compaction is near, to say what one adds."""


@dataclass(frozen=True)
class Steps:
    """Steps in which every row decodes, but for those that wait to be compacted until the step before has been read.

    Args:
        seconds: that each took.
        compactions: in each.
        tokens: that all gave.
    """

    seconds: list[float]
    compactions: list[int]
    tokens: int

    @property
    def mean(self) -> float:
        """Seconds of a step."""
        return fmean(self.seconds)

    def quiet(self) -> float | None:
        """Seconds of a step that no compaction is near; None: there are too few."""
        counts = self.compactions
        found = [
            seconds
            for at, seconds in enumerate(self.seconds)
            if at + 1 >= NEAR and not any(counts[at + 1 - NEAR : at + 1])
        ]
        return fmean(found) if len(found) >= LEAST_QUIET else None

    def median_of(self, compactions: int) -> float | None:
        """Seconds of the median step with so many compactions in it; None: there is none."""
        found = [seconds for seconds, count in zip(self.seconds, self.compactions, strict=True) if count == compactions]
        return median(found) if found else None


@dataclass
class Spent:
    """Seconds in compactions, those of them in which policies choose, and how many there were."""

    compacting: float = 0.0
    choosing: float = 0.0
    compactions: int = 0


@contextmanager
def measured(engine: Engine, device: torch.device) -> Iterator[Spent]:
    """Within, the device is waited for before and after each compaction."""
    spent, kv = Spent(), engine.kv
    compact, compressor = kv.compact, kv.compressor
    assert compressor is not None
    choose = compressor.choose

    def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        synchronize(device)
        start = time.perf_counter()
        result = call(*arguments)
        synchronize(device)
        return result, time.perf_counter() - start

    def compacting(*arguments: Any) -> Any:
        result, seconds = timed(compact, *arguments)
        spent.compacting += seconds
        spent.compactions += 1
        return result

    def choosing(*arguments: Any) -> Any:
        result, seconds = timed(choose, *arguments)
        spent.choosing += seconds
        return result

    kv.compact, compressor.choose = compacting, choosing  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        del kv.compact, compressor.choose  # what the classes have comes back


def run_steps(engine: Engine, rows: int, steps: int, device: torch.device) -> Steps:
    """Let all rows decode. The device is waited for before the first step and at the end of the last."""
    seconds, compactions, tokens = [0.0] * steps, [0] * steps, 0
    compact = engine.kv.compact

    def counted(*arguments: Any) -> bool:
        compactions[step] += 1
        return compact(*arguments)

    engine.kv.compact = counted  # type: ignore[method-assign]
    try:
        synchronize(device)
        for step in range(steps):
            start = time.perf_counter()
            tokens += len(engine.step())
            if step == steps - 1:
                synchronize(device)
            seconds[step] = time.perf_counter() - start
    finally:
        engine.kv.compact = compact  # type: ignore[method-assign]
    if tokens < LEAST_DECODING * rows * steps:
        raise NotMeasured(f"{steps} steps of {rows} rows gave {tokens:,} tokens: give more --kv-memory")
    return Steps(seconds, compactions, tokens)


def measure(
    engine: Engine, prompts: list[list[int]], kv_cache: dict[str, Any], every: int, device: torch.device
) -> dict[str, Any]:
    """Figures of one method: all times in milliseconds of a step."""
    rows = len(prompts)
    tokens = WARM_UP_STEPS + 3 * every + 2 * rows + 2
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, kv_cache=kv_cache)
    requests = [engine.add(prompt, params) for prompt in prompts]
    try:
        begun: set[str] = set()
        while len(begun) < rows:
            begun |= {out.request.id for out in engine.step()}
        run_steps(engine, rows, WARM_UP_STEPS, device)
        steps = run_steps(engine, rows, 2 * every, device)
        with measured(engine, device) as spent:
            run_steps(engine, rows, every, device)
        usages = [request.kv_usage for request in requests if request.kv_usage is not None and request.kv_usage.tokens]
    finally:
        for request in requests:
            engine.abort(request.id)
    step_ms, compaction_ms = steps.mean * 1e3, spent.compacting / every * 1e3
    quiet = steps.quiet()
    added_ms = None if quiet is None else step_ms - quiet * 1e3
    medians = {f"step_{count}_ms": _ms(steps.median_of(count)) for count in range(3)}
    return {
        "step_ms": step_ms, "quiet_ms": _ms(quiet), "added_ms": added_ms,
        "added_share": None if quiet is None or added_ms is None else added_ms / (quiet * 1e3), **medians,
        "decoding": steps.tokens / (rows * len(steps.seconds)),
        "compaction_ms": compaction_ms, "choosing_ms": spent.choosing / every * 1e3,
        "share": compaction_ms / step_ms, "compactions": spent.compactions,
        "row_us": spent.compacting / spent.compactions * 1e6 if spent.compactions else None,
        "kept": sum(usage.kept_tokens / usage.tokens for usage in usages) / len(usages) if usages else 1.0,
    }  # fmt: skip


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def methods(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The full cache without any policy, then every policy with every budget."""
    yield {"policy": "full"}
    for policy in args.policies:
        for budget in args.budgets:
            yield {"policy": policy, "budget": budget, "trigger": f"every:{args.every}"}


def engine_for(args: argparse.Namespace, points: list[tuple[int, int]]) -> Engine:
    """An engine that all points fit, whose graphs serve compressed rows from the start."""
    shape = named_shape(args.model).config
    rows = max(rows for rows, _ in points)
    longest = max(context for _, context in points) + WARM_UP_STEPS + 3 * args.every + 2 * rows + 2
    token_bytes = shape.layers * shape.kv_heads * 2 * shape.head_dim * torch.bfloat16.itemsize
    size = max(rows * (context + 3 * args.every + 2 * rows + 64) for rows, context in points) * token_bytes
    options = {
        "model": args.model, "device": args.device, "kv_memory": args.kv_memory or str(size + size // 20),
        "max_num_seqs": rows, "max_num_batched_tokens": max(rows, PREFILL_TOKENS), "max_model_len": longest,
        "enable_prefix_caching": False, "kv_policy": args.policies[0], "kv_budget": args.budgets[0],
        "kv_trigger": f"every:{args.every}",
    }  # fmt: skip
    return random_engine(build(EngineConfig, options))[0]


def _said(row: dict[str, Any]) -> tuple[str, str]:
    """What compactions add to a step."""
    return ("", "") if row["added_ms"] is None else (f"{row['added_ms']:.4f}", f"{row['added_share']:.2%}")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--at", default="64x7680,8x7680", help="rows x context, with commas")
    parser.add_argument("--policies", nargs="+", default=["snapkv", "streaming", "knorm", "h2o"])
    parser.add_argument("--budgets", nargs="+", default=["50%", "25%", "1000000"])
    parser.add_argument("--every", type=int, default=128, help="steps between two triggers of a row")
    parser.add_argument("--kv-memory", help="as much as all rows take when not given")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(given)
    device, points = torch.device(args.device), StepConfig(at=args.at, steps=1, warm_up_steps=0).points
    engine = engine_for(args, points)
    found = []
    for rows, context in points:
        shape = (rows, context)
        prompts = np.random.default_rng(0).integers(0, engine.limits.vocabulary, shape).tolist()
        for method in methods(args):  # meets what is compiled at first use
            measure(engine, prompts[:2], method, args.every, device)
        plain_ms = None
        for method in methods(args):
            figures = measure(engine, prompts, method, args.every, device)
            plain_ms = plain_ms or figures["step_ms"]
            case = {"model": args.model, "rows": rows, "context": context, "budget": "100%", **method}
            found.append(case | {"every": args.every} | figures | {"of_full": figures["step_ms"] / plain_ms})
    table = Table(
        "rows x context",
        "policy",
        "budget",
        "kept",
        "step ms",
        "added ms",
        "share",
        "compaction ms",
        "choosing",
        "us a row",
    )
    for row in found:
        table.add_row(
            f"{row['rows']} x {row['context']}", row["policy"], row["budget"], f"{row['kept']:.1%}",
            f"{row['step_ms']:.3f}", *_said(row), f"{row['compaction_ms']:.4f}", f"{row['choosing_ms']:.4f}",
            "" if row["row_us"] is None else f"{row['row_us']:.0f}",
        )  # fmt: skip
    Console(width=120).print(table)
    if args.output is not None:
        write_rows(args.output, header(device) | {"dtype": "bfloat16"}, found)


if __name__ == "__main__":
    main()

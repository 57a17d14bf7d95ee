"""`kvikk bench attention`: decode attention alone, beside FlashInfer, over the traces of `traces`.

Planned once, then all layers in one CUDA graph, each layer with KV of its own, random, its blocks in random order, and
more of it than the L2 cache holds. Every route computes the same case in the same run; one whose output is not that of
the reference has failed, however fast it was.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from tqdm import tqdm

from kvikk.attention.gpu.flashinfer import FLASHINFER_ROUTES
from kvikk.bench.attention_shape import AttentionShape
from kvikk.bench.contenders import OURS, Contenders, DeviceSpoilt, chosen_routes, guarded
from kvikk.bench.decode_cases import Case, KVMemory
from kvikk.bench.decode_timing import measured, queries
from kvikk.bench.device import copy_tb_per_s, count_launches, header, require_cuda
from kvikk.bench.serving_steps import Served, ServingCase, serving_rows
from kvikk.bench.traces import MOST_ROWS, SERVING_TRACES, TRACES, checked_numbers, chosen_traces, parse_lengths
from kvikk.errors import ConfigError
from kvikk.models.shapes import named_shape

log = logging.getLogger(__name__)

Row = dict[str, Any]
COMMAND: Final = "kvikk bench attention"
LAUNCHES_S: Final = 45.0
"""How long launches are counted at the end."""
MOST_SEEDS: Final = 100


@dataclass(frozen=True, kw_only=True)
class AttentionBenchConfig:
    """What is measured.

    Args:
        trace: traces, separated by commas, or all.
        rows: batch sizes, separated by commas; traces with a number of rows of their own keep it.
        seeds: draws of each trace.
        model: whose attention, by the name of a shape: llama-3.1-8b, qwen3-32b or smollm2.
        block_size: tokens in a block.
        routes: worklist, fa2 and persistent, separated by commas; auto takes those that are installed.
        explain: instead of the traces, show for `lengths` what each route was predicted to cost, what it did cost, and
            which one is chosen.
        lengths: tokens of each row for `explain`, separated by commas; 2048x47 is 47 rows of 2,048.
        json: file to write the result to; not with `explain`.
        max_seconds: begin no further case after so long; the rest is left out and a warning says so.
        disable_tqdm: show no progress bar.
    """

    trace: str = "all"
    rows: str = "1,2,4,8,16,32,48,64,128"
    seeds: int = 5
    model: str = "llama-3.1-8b"
    block_size: int = 16
    routes: str = "auto"
    explain: bool = False
    lengths: str | None = None
    json: str | None = None
    max_seconds: float = 480.0
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        checked_numbers("--seeds", str(self.seeds), least=1, most=MOST_SEEDS)
        if self.block_size not in (16, 32):
            raise ConfigError(f"--block-size {self.block_size} is not supported: choose 16 or 32")
        if self.max_seconds <= 0:
            raise ConfigError(f"--max-seconds {self.max_seconds} must be above 0")
        if self.explain != (self.lengths is not None):
            raise ConfigError("--explain and --lengths go together: such as --explain --lengths 65536,2048x47")
        if self.explain and self.json is not None:
            raise ConfigError("--json holds the result of the traces, --explain prints: leave one of them out")
        if self.lengths is not None:
            parse_lengths(self.lengths)
        _ = self.batch_sizes, self.traces, self.shape, chosen_routes(self.routes)

    @property
    def batch_sizes(self) -> list[int]:
        """`rows`, one by one."""
        return checked_numbers("--rows", self.rows, least=1, most=MOST_ROWS)

    @property
    def traces(self) -> list[str]:
        """`trace`, one by one."""
        return chosen_traces(self.trace)

    @property
    def shape(self) -> AttentionShape:
        """The attention of `model`."""
        return AttentionShape.of_model(named_shape(self.model).config, self.block_size)

    def cases(self) -> list[Case]:
        """All cases, seed by seed, so that a run that ends early has whole seeds."""
        shape, sizes = self.shape, self.batch_sizes
        return [
            Case.draw(name, TRACES[name], rows, seed, shape.kv_heads)
            for seed in range(self.seeds)
            for name in self.traces
            if name in TRACES
            for rows in TRACES[name].sizes(sizes)
        ]

    def serving_cases(self) -> list[ServingCase]:
        """The published serving traces among the chosen ones."""
        return [
            ServingCase.draw(name, SERVING_TRACES[name], seed, self.shape)
            for seed in range(self.seeds)
            for name in self.traces
            if name in SERVING_TRACES
        ]


@dataclass(frozen=True, kw_only=True)
class AttentionResult:
    """What was measured.

    Args:
        header: device, versions, commit, date, settings.
        rows: one for each case and route.
    """

    header: dict[str, Any]
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        """The result file."""
        return {"header": self.header, "rows": self.rows}

    def lines(self) -> Iterator[str]:
        """For each trace and number of rows: TB/s of each route, the median over the seeds, and how ours compares."""
        yield f"{self.header['device']}, copy {self.header['copy_tb_per_s']:.2f} TB/s"
        routes = list(dict.fromkeys(row["route"] for row in self.rows))
        yield f"{'trace':<22}{'rows':>5}{'MB':>9}" + "".join(f"{route:>12}" for route in routes) + "   ours/best"
        for trace, rows in dict.fromkeys((row["trace"], row["rows"]) for row in self.rows):
            of_case = [row for row in self.rows if (row["trace"], row["rows"]) == (trace, rows)]
            rates = [
                _median([row["tb_per_s"] for row in of_case if row["route"] == route and row["tb_per_s"]])
                for route in routes
            ]
            lowest = min(
                (row["ratio_to_flashinfer"] for row in of_case if row.get("ratio_to_flashinfer")), default=None
            )
            yield (
                f"{trace:<22}{rows:>5}{_median([row['kv_bytes'] for row in of_case]) / 1e6:>9.1f}"
                + "".join(f"{rate:>12.2f}" if rate else f"{'-':>12}" for rate in rates)
                + ("" if lowest is None else f"   >= {lowest:.2f}")
            )
        for row in self.rows:
            if row["failure"] is not None and not row["is_refused"]:
                yield f"failed: {row['trace']} {row['rows']} seed {row['seed']} {row['route']}: {row['failure']}"


def bench_attention(config: AttentionBenchConfig) -> AttentionResult:
    """Measure all cases on the GPU of this process.

    Raises:
        ConfigError: no GPU, or a case that does not fit the memory.
    """
    device = require_cuda(COMMAND)
    shape = config.shape
    cases: list[Case | ServingCase] = [*config.serving_cases(), *config.cases()]
    routes = chosen_routes(config.routes)
    memory = KVMemory.make(max(case.pool_bytes(shape) for case in cases), shape.dtype, device)
    copied = copy_tb_per_s(memory.numbers)
    memory.fill()
    contenders = Contenders(
        shape,
        rows=max(case.rows for case in cases),
        entries=max(case.blocks(shape) for case in cases),
    )
    head = header(device) | {
        "copy_tb_per_s": round(copied, 3), "model": config.model, "dtype": str(shape.dtype).removeprefix("torch."),
        "q_heads": shape.q_heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "block_size": shape.page_size,
    }  # fmt: skip
    result = AttentionResult(header=head, rows=[])
    deadline = time.monotonic() + config.max_seconds
    try:
        for case in tqdm(cases, desc="cases", disable=config.disable_tqdm):
            if time.monotonic() > deadline:
                log.warning("--max-seconds %g are over: the rest of the cases is left out", config.max_seconds)
                break
            if isinstance(case, ServingCase):
                rows = serving_rows(case, memory, contenders, routes)
            else:
                rows = _case_rows(case, shape, memory, contenders, routes)
            result.rows.extend(compared(rows, copied))
    except DeviceSpoilt as error:  # what was measured before is good
        log.error("%s: the rest of the cases is left out", error)
        result.header["ended_by"] = str(error)
        return result
    _add_launches(result.rows, cases, memory, contenders, until=time.monotonic() + LAUNCHES_S)
    return result


def _case_rows(
    case: Case, shape: AttentionShape, memory: KVMemory, contenders: Contenders, routes: list[str]
) -> Iterator[Row]:
    """A row for each route; one that cannot serve the case, fails or is wrong has no time."""
    placed = memory.place(case, shape)
    q = queries(case, shape, memory.device)
    for name in routes:
        row: Row = {
            "trace": case.trace, "rows": case.rows, "seed": case.seed, "route": name,
            "kv_bytes": case.kv_bytes(shape), "layers": placed.store.geometry.layers, "longest": max(case.lengths),
        }  # fmt: skip
        yield row | guarded(partial(measured, contenders, name, placed, q))


def _add_launches(
    rows: list[Row], cases: Sequence[Case | ServingCase], memory: KVMemory, contenders: Contenders, *, until: float
) -> None:
    """Count the launches of the first seed's cases, in the end: a device that was traced may be slower from then on."""
    by_name = {(case.trace, case.rows): case for case in cases if case.seed == 0}
    for row in rows:
        if row["seed"] != 0 or row["time_us"] is None:
            continue
        if time.monotonic() > until:
            return
        case = by_name[row["trace"], row["rows"]]
        if isinstance(case, ServingCase):
            row["launches_per_step"] = Served(case, memory).launches(row["route"], contenders)
            continue
        contender = contenders.make(row["route"], memory.place(case, contenders.shape))
        contender.plan()
        q = queries(case, contenders.shape, memory.device)
        row["launches_per_layer"] = count_launches(
            partial(contender.route.attend, 0, q, torch.empty_like(q), scale=1.0)
        )


def compared(rows: Iterator[Row], copied: float) -> list[Row]:
    """The rows of a case with their rates, beside the best of FlashInfer's and the copy's."""
    found = list(rows)
    for row in found:
        row["tb_per_s"] = None if row["time_us"] is None else row["kv_bytes"] / row["time_us"] / 1e6
    best = max(
        (row["tb_per_s"] for row in found if row["route"] in FLASHINFER_ROUTES and row["tb_per_s"]), default=None
    )
    for row in found:
        row["best_flashinfer_tb_per_s"] = best
        row["copy_tb_per_s"] = copied
        is_ours = row["route"] == OURS and row["tb_per_s"] is not None
        row["ratio_to_flashinfer"] = row["tb_per_s"] / best if is_ours and best else None
    return found


def _median(values: list[Any]) -> float:
    """Their median; 0 of none."""
    return float(statistics.median(values)) if values else 0.0

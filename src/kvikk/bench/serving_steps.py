"""Serving traces step by step: each step is planned and run as a server would, one graph for all steps of a trace."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from kvikk.attention.gpu.rows import DecodeRows
from kvikk.bench.attention_shape import AttentionShape
from kvikk.bench.contenders import MOST_ERROR, Contender, Contenders, guarded
from kvikk.bench.decode_cases import COLD_BYTES, LAYERS, KVMemory, Placed, uniform_case
from kvikk.bench.device import capture, count_launches, timed_us
from kvikk.bench.traces import ServedRow, ServingTrace
from kvikk.memory import KVStore

Row = dict[str, Any]
WARM_UP_STEPS: Final = 3
PAGE_SEED: Final = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCase:
    """A serving trace drawn with a seed.

    Args:
        trace, seed: where it is from.
        shape: of the attention.
        rows: of each step; those that no request has are padded.
        batches: the rows of each step.
        held: tokens that each request has in its last measured step, by its number.
    """

    trace: str
    seed: int
    shape: AttentionShape
    rows: int
    batches: list[list[ServedRow]]
    held: dict[int, int]

    @staticmethod
    def draw(name: str, trace: ServingTrace, seed: int, shape: AttentionShape) -> ServingCase:
        """The trace's steps."""
        batches = trace.batches(seed)
        held = {row.request: row.length for batch in batches for row in batch}  # lengths only grow
        return ServingCase(trace=name, seed=seed, shape=shape, rows=trace.rows, batches=batches, held=held)

    def step_bytes(self, step: int) -> int:
        """Bytes of KV that one layer reads in a step."""
        return sum(row.length for row in self.batches[step]) * self.shape.token_bytes

    def blocks(self, shape: AttentionShape) -> int:
        """Blocks of all requests, the null block included."""
        return 1 + sum(-(-length // shape.page_size) for length in self.held.values())

    @property
    def layers(self) -> int:
        """How many layers it is measured with: the fewest that are cold in every step."""
        least = min(map(self.step_bytes, range(len(self.batches))))
        return next((n for n in LAYERS if n * least >= COLD_BYTES), LAYERS[-1])

    def pool_bytes(self, shape: AttentionShape) -> int:
        """Bytes of the pool that it takes."""
        return self.blocks(shape) * shape.geometry(self.layers).block_bytes


def serving_rows(case: ServingCase, memory: KVMemory, contenders: Contenders, routes: list[str]) -> Iterator[Row]:
    """A row for each route: means over the steps, and its rate over all of them."""
    steps = range(len(case.batches))
    served = Served(case, memory)
    for name in routes:
        row: Row = {
            "trace": case.trace, "rows": case.rows, "seed": case.seed, "route": name, "layers": case.layers,
            "kv_bytes": statistics.fmean(map(case.step_bytes, steps)), "steps": len(steps),
            "longest": max(case.held.values()),
        }  # fmt: skip
        yield row | guarded(partial(served.measure, name, contenders))


class Served:
    """A serving trace in memory, whose rows change from step to step in buffers that stay.

    Args:
        case: the trace.
        memory: where all of its requests lie, each in blocks of its own.
    """

    def __init__(self, case: ServingCase, memory: KVMemory) -> None:
        self.case = case
        shape, device = case.shape, memory.device
        store = KVStore(shape.geometry(case.layers), case.blocks(shape), device, memory=memory.numbers)
        order = torch.Generator().manual_seed(case.seed + PAGE_SEED)
        tables = uniform_case(store, list(case.held.values()), order).tables
        self._seats = {request: seat for seat, request in enumerate(case.held)}
        rows = DecodeRows(
            tables=tables,
            seats=torch.zeros(case.rows, dtype=torch.int32, device=device),
            lengths=torch.zeros(case.rows, dtype=torch.int32, device=device),
        )
        self.placed = Placed(
            store=store, rows=rows, lengths=[0] * case.rows, lanes=[[0] * shape.kv_heads] * case.rows,
            is_ragged=False, apart=memory.apart(store),
        )  # fmt: skip

    def measure(self, name: str, contenders: Contenders) -> Row:
        """Kernel time of a layer, plan time and time of a whole step, in microseconds: means over the steps."""
        shape, steps = self.case.shape, range(len(self.case.batches))
        contender = contenders.make(name, self.placed, fixed=True)
        q = self._queries()
        out, scale = torch.empty_like(q), shape.head_dim**-0.5

        def layers() -> None:
            contender.attend_all(q, out, scale=scale)

        def planned_layers() -> None:
            contender.plan()
            layers()

        contender.plan(self._begin(0))
        layers()  # compiles what a graph then holds
        graph = capture(layers)
        whole = capture(planned_layers) if contender.plans_on_device else None
        plan_us, layer_us, step_us = [], [], []
        for step in [*range(WARM_UP_STEPS), *steps]:
            lengths = self._begin(step)
            start = _now()
            contender.plan(lengths)
            plan_us.append((_now() - start) * 1e6)
            layer_us.append(timed_us(graph.replay, replays=3) / self.case.layers)
            start = _now()
            if whole is None:
                contender.plan(lengths)
                graph.replay()
            else:
                whole.replay()
            step_us.append((_now() - start) * 1e6)
        error = max(self._error(contender, step, q, scale) for step in (len(steps) // 2, len(steps) - 1))
        if error > MOST_ERROR:
            return {"error": error, "failure": f"the output is off by {error:.3g} of its length, allowed: {MOST_ERROR}"}
        return {
            "time_us": statistics.fmean(layer_us[WARM_UP_STEPS:]),
            "plan_us": statistics.fmean(plan_us[WARM_UP_STEPS:]),
            "step_us": statistics.fmean(step_us[WARM_UP_STEPS:]),
            "error": error,
            "is_apart": contender.is_apart,
        }

    def launches(self, name: str, contenders: Contenders) -> int | None:
        """Kernels that a step launches, its plan included; None where the device cannot be traced."""
        contender = contenders.make(name, self.placed, fixed=True)
        q = self._queries()
        out, lengths = torch.empty_like(q), self._begin(0)

        def step() -> None:
            contender.plan(lengths)
            contender.attend_all(q, out, scale=1.0)

        return count_launches(step)

    def _queries(self) -> torch.Tensor:
        shape, device = self.case.shape, self.placed.store.device
        return torch.randn(self.case.rows, shape.q_heads, shape.head_dim, dtype=shape.dtype, device=device)

    def _begin(self, step: int) -> list[int]:
        """Put a step's rows into the buffers; returns their lengths."""
        batch = self.case.batches[step]
        padding = [0] * (self.case.rows - len(batch))
        lengths = [row.length for row in batch] + padding
        rows = self.placed.rows
        rows.seats.copy_(torch.tensor([self._seats[row.request] for row in batch] + padding, dtype=torch.int32))
        rows.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        return lengths

    def _error(self, contender: Contender, step: int, q: torch.Tensor, scale: float) -> float:
        lengths = self._begin(step)
        contender.plan(lengths)
        live = [length for length in lengths if length]
        lanes = [[length] * self.case.shape.kv_heads for length in live]
        placed = replace(self.placed, lengths=lengths, lanes=lanes)
        return replace(contender, placed=placed).error(q, scale=scale)


def _now() -> float:
    """Seconds, when the device has done all it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()

"""One shape of step on the device, from the descriptor to the sampled tokens: run as it is, or captured as a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvikk.attention.gpu.attend import Partials
from kvikk.attention.gpu.rows import Bodies, DecodeRows, RunRows
from kvikk.attention.gpu.step import GpuStep, Runs, Singles
from kvikk.attention.gpu.watch import QueryWatch
from kvikk.attention.gpu.worklist import WorkListDecode, WorkListRuns
from kvikk.engine.gpu.descriptor import StepShape
from kvikk.engine.gpu.sampling import DeviceSampling, SampledOnDevice, sample_on_device
from kvikk.engine.gpu.state import SeatState, StepInputs, derive, finish
from kvikk.memory import KVStore
from kvikk.models import CausalLM
from kvikk.types import Numerics


@dataclass(slots=True)
class Workspace:
    """Memory that all programs use in turn.

    Args:
        partials: partial results, by those programs that first needed them: the largest.
        pool: of the graphs' activations.
    """

    partials: list[Partials] = field(default_factory=list)
    pool: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What every program runs on.

    Args:
        model: a `CausalLM` that hands packed heads to its attention.
        store: the pool.
        state: the seats.
        bodies: of compressed rows, by seat.
        watch_window: queries that can be kept of a seat.
        queries: `[layers, seats * watch_window, q_heads, head_dim]`; None: none are kept.
        scales: of each layer's attention, as far as known.
        words: the descriptor on the device.
        numerics: of attention.
        workspace: shared.
    """

    model: CausalLM
    store: KVStore
    state: SeatState
    bodies: Bodies
    watch_window: int
    queries: Tensor | None
    scales: list[float]
    words: Tensor
    numerics: Numerics
    workspace: Workspace


class StepProgram:
    """All kernels of one shape of step.

    Args:
        machine: what it runs on.
        shape: how much a step holds.
    """

    def __init__(self, machine: Machine, shape: StepShape) -> None:
        self.shape = shape
        self.is_new = True
        """Whether no step has used it yet: the first one may wait for what it is compiled to."""
        self._machine = machine
        store, state, spec = machine.store, machine.state, machine.model.spec
        self.inputs = StepInputs(shape, store.device)
        max_slots = state.tables.shape[1] * store.geometry.page_size
        bodies = None
        if shape.ragged:  # the last frame of a body and the last block of a tail may both be part filled
            bodies, max_slots = machine.bodies, max_slots + store.geometry.page_size
        numerics, shared = machine.numerics, machine.workspace.partials
        singles = runs = None
        if shape.singles:
            rows = DecodeRows(state.tables, self.inputs.single_seats, self.inputs.single_lengths, bodies)
            route = WorkListDecode(
                store, spec.q_heads, shape.singles, max_slots=max_slots, ragged=shape.ragged, numerics=numerics,
                shared=shared,
            )  # fmt: skip
            singles = Singles(rows, route)
        if shape.runs:
            attention = WorkListRuns(
                store, spec.q_heads, runs=shape.runs, tokens=shape.tokens, max_slots=max_slots, short=shape.short_runs,
                ragged=shape.ragged, numerics=numerics, shared=shared,
            )  # fmt: skip
            i = self.inputs
            run_rows = RunRows(state.tables, i.run_seats, i.run_starts, i.run_lengths, i.run_offsets, bodies)
            runs = Runs(run_rows, attention)
        watch = None
        if shape.watched:
            assert machine.queries is not None
            watch = QueryWatch(machine.queries, self.inputs.places, machine.scales)
        self._step = GpuStep(store, singles, runs, self.inputs.slots, self.inputs.positions, watch)
        outputs, device = shape.outputs, store.device
        self._sampled = SampledOnDevice(
            tokens=torch.zeros(outputs, dtype=torch.int64, device=device),
            is_bad=torch.zeros(outputs, dtype=torch.int32, device=device),
            leads=torch.zeros(outputs, dtype=torch.float32, device=device),
        )
        self._sampling = DeviceSampling(
            temperature=state.temperature, top_k=state.top_k, top_p=state.top_p, min_p=state.min_p,
            seed=state.seed, choice=state.choice,
            seats=self.inputs.output_seats, positions=self.inputs.output_positions,
        )  # fmt: skip
        self.result = torch.zeros(outputs, dtype=torch.int32, device=device)
        self.logits: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def compute(self) -> None:
        """Issue every kernel of the step: on a GPU this returns before they have run."""
        machine, inputs = self._machine, self.inputs
        derive(
            machine.words, machine.state, inputs,
            page_size=machine.store.geometry.page_size, watch_window=machine.watch_window,
        )  # fmt: skip
        self._step.plan()
        hidden = machine.model.forward(inputs.token_ids, inputs.positions, self._step, inputs.outputs_at)
        self.logits = machine.model.head(hidden)
        sample_on_device(self.logits, self._sampling, self._sampled)
        finish(machine.state, inputs, self._sampled.tokens, self._sampled.is_bad, self.result)

    @property
    def leads(self) -> Tensor:
        """`[outputs]` fp32: by how much the likeliest token of each output leads the next one, in the last step."""
        return self._sampled.leads

    def capture(self) -> None:
        """Make a graph of it. The descriptor on the device must hold a step of padding."""
        workspace = self._machine.workspace
        self.compute()  # compiles, and lets libraries make what they keep
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=workspace.pool):
            self.compute()
        workspace.pool = workspace.pool or graph.pool()
        self._graph = graph

    def launch(self) -> None:
        """Start the step that the descriptor describes."""
        if self._graph is None:
            self.compute()
        else:
            self._graph.replay()

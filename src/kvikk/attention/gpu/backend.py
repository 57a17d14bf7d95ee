"""The Triton kernels behind `AttentionBackend`: any step that a host describes, without a captured graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvikk.attention.gpu.attend import Bias
from kvikk.attention.gpu.rows import Bodies, DecodeRows, RunRows
from kvikk.attention.gpu.step import GpuStep, Runs, Singles
from kvikk.attention.gpu.worklist import WorkListDecode, WorkListRuns
from kvikk.attention.plan import IntArray, QueryRun, Schedule, plan_step
from kvikk.errors import ConfigError
from kvikk.memory.storage import KVStore
from kvikk.models.protocol import HeadNorm
from kvikk.types import Numerics


class TritonBackend:
    """Attention by work list over a pool on a GPU (or on a CPU, through Triton's interpreter).

    Args:
        store: the pool; every layer has the same number of KV heads, and pages are of 16 or 32 slots. Quantised rows
            are of an even number of bytes.
        numerics: `exact`: a query's bits depend on nothing but its own row.

    Raises:
        ConfigError: the pool is of another kind.
    """

    name = "triton"

    def __init__(self, store: KVStore, *, numerics: Numerics = "fast") -> None:
        geometry = store.geometry
        if len(set(geometry.kv_heads)) != 1 or geometry.page_size not in (16, 32):
            raise ConfigError(
                f"attention backend 'triton' serves layers that are alike and pages of 16 or 32 slots, not KV heads "
                f"{sorted(set(geometry.kv_heads))} and pages of {geometry.page_size}: use 'reference'"
            )
        row_bytes = geometry.row_elements * geometry.stored.itemsize
        if geometry.quantised is not None and row_bytes % 2:
            raise ConfigError(
                f"attention backend 'triton' takes quantised rows as words of 2 bytes, and a head_dim of "
                f"{geometry.head_dim} gives rows of {row_bytes}: use 'reference', or the KV dtype 'auto'"
            )
        self.store = store
        self.numerics: Numerics = numerics

    def plan(self, runs: Sequence[QueryRun]) -> Schedule:
        """See `AttentionBackend.plan`."""
        return plan_step(runs, geometry=self.store.geometry, blocks=self.store.blocks)

    def begin(self, schedule: Schedule) -> EagerStep:
        """See `AttentionBackend.begin`."""
        return EagerStep(self, schedule)

    def warm_up(self) -> None:
        """See `AttentionBackend.warm_up`: kernels are compiled where graphs are captured, or at their first use."""

    def step(self, schedule: Schedule, q_heads: int) -> tuple[GpuStep, NDArray[np.int64]]:
        """The step on the device, and the order in which it takes the tokens: single queries first."""
        singles, multi = list(schedule.decode), list(schedule.multi)
        slots = np.full(schedule.tokens, -1, dtype=np.int64)
        slots[schedule.write_tokens] = schedule.write_slots
        positions = np.arange(schedule.tokens) + np.repeat(schedule.starts - schedule.offsets, schedule.lengths)
        order = np.concatenate([_tokens(schedule, index) for index in singles + multi])
        step = GpuStep(
            self.store,
            self._singles(schedule, singles, q_heads) if singles else None,
            self._runs(schedule, multi, q_heads) if multi else None,
            self._tensor(slots[order]),
            self._tensor(positions[order]),
        )
        step.plan()
        return step, order

    def attend_run(self, layer: int, run: QueryRun, q: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.attend_run`."""
        schedule = self.plan([run])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        make = self._singles if run.length == 1 else self._runs
        part = make(schedule, [0], q.shape[1])
        attention = part.route if isinstance(part, Singles) else part.attention
        assert isinstance(attention, WorkListDecode | WorkListRuns)
        attention.plan(part.rows)
        attention.attend(layer, q.contiguous(), out, scale=scale, lse=lse, bias=part.bias)
        return out, lse

    def _singles(self, schedule: Schedule, indices: list[int], q_heads: int) -> Singles:
        rows = DecodeRows(
            tables=self._tables(schedule, indices),
            seats=torch.arange(len(indices), dtype=torch.int32, device=self.store.device),
            lengths=self._tensor((schedule.tail_starts[indices] + 1).astype(np.int32)),
            bodies=self._bodies(schedule, indices),
        )
        route = WorkListDecode(
            self.store,
            q_heads,
            len(indices),
            max_slots=self._slots(schedule, indices),
            ragged=rows.bodies is not None,
            numerics=self.numerics,
        )
        return Singles(rows, route, self._bias(schedule, indices))

    def _runs(self, schedule: Schedule, indices: list[int], q_heads: int) -> Runs:
        lengths = schedule.lengths[indices]
        rows = RunRows(
            tables=self._tables(schedule, indices),
            seats=torch.arange(len(indices), dtype=torch.int32, device=self.store.device),
            starts=self._tensor(schedule.tail_starts[indices].astype(np.int32)),
            lengths=self._tensor(lengths.astype(np.int32)),
            offsets=self._tensor((np.cumsum(lengths) - lengths).astype(np.int32)),
            bodies=self._bodies(schedule, indices),
        )
        attention = WorkListRuns(
            self.store,
            q_heads,
            runs=len(indices),
            tokens=int(lengths.sum()),
            max_slots=self._slots(schedule, indices),
            ragged=rows.bodies is not None,
            numerics=self.numerics,
        )
        return Runs(rows, attention, self._bias(schedule, indices))

    def _tables(self, schedule: Schedule, indices: list[int]) -> Tensor:
        parts = [schedule.table(index) for index in indices]
        tables = np.zeros((len(parts), max(len(part) for part in parts)), dtype=np.int32)
        for row, part in zip(tables, parts, strict=True):
            row[: len(part)] = part
        return self._tensor(tables)

    def _bodies(self, schedule: Schedule, indices: list[int]) -> Bodies | None:
        """The bodies of these runs, each run's own: the live frames of its lanes one after another."""
        if not set(indices) & set(schedule.with_body):
            return None
        page, lanes = self.store.geometry.page_size, self.store.geometry.frames_per_block
        arena = []
        lengths = np.zeros((len(indices), lanes), dtype=np.int64)
        for row, index in enumerate(indices):
            body = schedule.runs[index].body
            if body is not None:
                lengths[row] = body.lengths
                arena.append(body.held(page))
        held = -(-lengths // page)
        offsets = (np.cumsum(held) - held.ravel()).reshape(held.shape)
        frames = np.concatenate([*arena, np.zeros(1, dtype=np.int64)])  # an address, where no lane has a frame
        return Bodies(*(self._tensor(part.astype(np.int32)) for part in (frames, offsets, lengths)))

    def _slots(self, schedule: Schedule, indices: list[int]) -> int:
        """Slots of the longest row, in whole frames and blocks."""
        page = self.store.geometry.page_size
        tails = schedule.tail_starts[indices] + schedule.lengths[indices]
        return int((-(-schedule.body_slots[indices] // page) * page + -(-tails // page) * page).max())

    def _bias(self, schedule: Schedule, indices: list[int]) -> Bias | None:
        biases = [schedule.runs[index].bias for index in indices]
        given = [bias.float().contiguous() for bias in biases if bias is not None]
        if not given:
            return None
        offsets, strides, end = [], [], 0
        for bias in biases:
            offsets.append(-1 if bias is None else end)
            strides.append(0 if bias is None else bias.shape[1])
            end += 0 if bias is None else bias.numel()
        values = torch.cat([bias.flatten() for bias in given]).to(self.store.device)
        return Bias(values, self._tensor(np.array(offsets)), self._tensor(np.array(strides)))

    def _tensor(self, array: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.store.device)


class EagerStep:
    """A step whose buffers are made when the first layer shows how many query heads there are.

    Args:
        backend: of the pool.
        schedule: the step.
    """

    def __init__(self, backend: TritonBackend, schedule: Schedule) -> None:
        self._backend = backend
        self._schedule = schedule
        self._step: GpuStep | None = None
        self._order: Tensor | None = None
        self._back: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """See `kvikk.models.protocol.AttentionStep.attend`."""
        step = self._made(q.shape[1], q.device)
        if self._order is None or self._back is None:
            return step.attend(layer, q, k, v, scale=scale)
        order = self._order
        return step.attend(layer, q[order], k[order], v[order], scale=scale)[self._back]

    def attend_packed(
        self, layer: int, heads: Tensor, rope: Tensor, *, scale: float, norm: HeadNorm | None = None
    ) -> Tensor:
        """See `kvikk.models.protocol.PackedAttentionStep.attend_packed`."""
        kv_heads = self._backend.store.geometry.kv_heads[layer]
        step = self._made(heads.shape[1] - 2 * kv_heads, heads.device)
        if self._order is None or self._back is None:
            return step.attend_packed(layer, heads, rope, scale=scale, norm=norm)
        return step.attend_packed(layer, heads[self._order], rope, scale=scale, norm=norm)[self._back]

    def _made(self, q_heads: int, device: torch.device) -> GpuStep:
        if self._step is None:
            self._step, order = self._backend.step(self._schedule, q_heads)
            if not bool((order == np.arange(len(order))).all()):
                self._order = torch.from_numpy(order).to(device)
                self._back = torch.from_numpy(np.argsort(order)).to(device)
        return self._step


def _tokens(schedule: Schedule, run: int) -> IntArray:
    first = int(schedule.offsets[run])
    return np.arange(first, first + int(schedule.lengths[run]))

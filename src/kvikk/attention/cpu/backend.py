"""The compiled CPU backend: numba kernels over pages where they lie, on the threads that torch uses.

The kernels run in torch's own OpenMP team. numba's threading layers would bring a second set of threads beside
torch's: two sets that spin for the same cores. The rule is therefore: the backend works where torch is built on an
OpenMP that has the GNU entry points (all Linux builds), and elsewhere `attention_backend("auto")` takes the reference.
Like all of torch's threads, the team does not survive a fork(): start workers by spawn.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from kvikk.attention.cpu.work import plan_work
from kvikk.attention.plan import IntArray, QueryRun, Schedule, plan_step
from kvikk.errors import ConfigError
from kvikk.geometry import INT4
from kvikk.memory.storage import KVStore
from kvikk.types import NULL_BLOCK, Numerics, Position

SPLIT_SLOTS: Final = 256
"""Slots of one split of a single query, rounded down to whole pages. By position only, never by load, so that a row's
result is the same alone and in any batch."""
TILE_ROWS: Final = 384
"""Query rows (positions times group) that share a packed tile of keys: enough to make packing cheap."""
ALONE: Final = 1024
"""Query heads times slots up to which one thread is done before a second one has started."""

_NUMBERS: Final = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_STORAGE: Final = {**_NUMBERS, torch.int8: "int8", INT4: "int4"}
_ALIGNMENT: Final = 64


class CpuUnavailableError(ConfigError):
    """The compiled backend cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class _OpenMP:
    """Entry points of the OpenMP runtime that torch is linked to."""

    team_start: int
    thread: int
    team: int
    barrier: int


def _torch_openmp() -> _OpenMP:
    libraries = sorted(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))
    try:
        library = ctypes.CDLL(str(libraries[0]))  # already loaded: this finds what it is linked to
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier")
        return _OpenMP(*(_address(getattr(library, name)) for name in names))
    except (IndexError, OSError, AttributeError) as error:
        raise CpuUnavailableError(f"torch's OpenMP has no GNU entry points ({error})") from error


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def numba_layer() -> str:
    """What runs the compiled kernels, in words, for a diagnosis: the OpenMP of torch, or why there is none."""
    try:
        _torch_openmp()
        import numba
    except (CpuUnavailableError, ImportError) as error:
        return f"none: {error}"
    return f"numba {numba.__version__} on torch's OpenMP, {torch.get_num_threads()} threads"


class CpuBackend:
    """Compiled attention for a pool in CPU memory, in fp32, bf16 or fp16, or quantised to int8 or int4.

    A row's result does not depend on the other rows of the step, on the number of threads, or on how a prompt was cut
    into runs of 2 and more positions, bit for bit. In `fast` numerics a run of one position uses another kernel than
    longer runs, and the two agree up to rounding; in `exact` there is one kernel and one result.

    Args:
        store: the pool.
        threads: how many to use; torch's own number when None.
        numerics: whether a position computed alone must have the bits of the same position in a longer run.

    Raises:
        CpuUnavailableError: numba or torch's OpenMP cannot be used, or the pool is not on the CPU or of another type.
    """

    name = "cpu"

    def __init__(self, store: KVStore, *, threads: int | None = None, numerics: Numerics = "fast") -> None:
        g = store.geometry
        if store.device.type != "cpu" or g.dtype not in _NUMBERS or (g.quantised or g.dtype) not in _STORAGE:
            raise CpuUnavailableError(
                f"the pool is {g.format} on {store.device} for a model in {g.dtype}; the compiled backend takes models "
                "in fp32, bf16 and fp16, and these, int8 or int4 in the pool, on cpu: use 'reference'"
            )
        self.store = store
        self.threads = threads or torch.get_num_threads()
        self.numerics = numerics
        self._openmp = _torch_openmp()
        try:
            from kvikk.attention.cpu import kernels, table  # numba takes a second to import: only when it is used
        except ImportError as error:
            raise CpuUnavailableError(f"numba cannot be imported ({error})") from error
        self._kernels, self._layout = kernels, table
        self._layer, self._body = kernels.compile_kernels(_NUMBERS[g.dtype], _STORAGE[g.quantised or g.dtype])
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._layer.address)
        self._split_pages = max(1, SPLIT_SLOTS // g.page_size)
        self._buffers: dict[str, Tensor] = {}

    def plan(self, runs: Sequence[QueryRun]) -> Schedule:
        """See `AttentionBackend.plan`."""
        return plan_step(runs, geometry=self.store.geometry, blocks=self.store.blocks)

    def begin(self, schedule: Schedule) -> CpuStep:
        """See `AttentionBackend.begin`."""
        return CpuStep(self, schedule)

    def attend_run(self, layer: int, run: QueryRun, q: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.attend_run`."""
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        step = CpuStep(self, self.plan([run._replace(write=False)]))
        return step.run(layer, q, None, None, scale, lse).clone(), lse

    def warm_up(self) -> None:
        """Run every kernel once on the null block, so that no request pays for loading them."""
        g = self.store.geometry
        for length in (1, 2):
            run = QueryRun(blocks=[NULL_BLOCK] * 2, start=Position(0), length=length, write=False)
            self.attend_run(0, run, torch.zeros(length, g.kv_heads[0], g.head_dim, dtype=g.dtype), scale=1.0)

    def buffer(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """A named flat buffer of at least `size` numbers, kept between steps and grown by half when too small."""
        held = self._buffers.get(name)
        if held is None or held.numel() < size or held.dtype != dtype:
            held = torch.empty(size + size // 2, dtype=dtype)
            self._buffers[name] = held
        return held


class CpuStep:
    """One step of the compiled backend: its table of numbers is packed once, and a layer changes a few of them."""

    def __init__(self, backend: CpuBackend, schedule: Schedule) -> None:
        self.backend = backend
        self.schedule = schedule
        self._work: dict[tuple[int, int], tuple[bytes, list[Any]]] = {}  # and what its addresses point at
        self._bias, self._biases = _bias_table(schedule)
        self._bodies, self._body_arrays = _body_table(schedule)
        size = backend._layout.LAYER.size + backend._layout.STEP.size
        raw = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        skip = -raw.data_ptr() % _ALIGNMENT
        self._table = raw[skip : skip + size]
        self._buffer = memoryview(self._table.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
        self._at = self._table.data_ptr()
        self._frames = backend.store.words.data_ptr()
        self._shape: tuple[int, int] = (0, 0)
        self._out: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """See `kvikk.models.protocol.AttentionStep.attend`."""
        return self.run(layer, q, k, v, scale, None)

    def run(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, scale: float, lse: Tensor | None
    ) -> Tensor:
        """`attend`, with K and V optional when nothing is written, and the log-sum-exp written to `lse` if given."""
        backend, g = self.backend, self.backend.store.geometry
        heads = g.kv_heads[layer]
        q = _checked("q", q, self.schedule.tokens, q.shape[1], g.head_dim, g.dtype)
        if k is None or v is None:
            k = v = q
        else:
            k = _checked("k", k, self.schedule.tokens, heads, g.head_dim, g.dtype)
            v = _checked("v", v, self.schedule.tokens, heads, g.head_dim, g.dtype)
        if self._shape != (q.shape[1], heads):
            self._prepare(q.shape[1], heads)
        out = self._out
        assert out is not None
        size = g.dtype.itemsize
        q_token, q_head, _ = q.stride()
        k_token, k_head, _ = k.stride()
        v_token, v_head, _ = v.stride()
        backend._layout.LAYER.pack_into(
            self._buffer, 0,
            q.data_ptr(), q_token * size, q_head * size,
            k.data_ptr(), k_token * size, k_head * size,
            v.data_ptr(), v_token * size, v_head * size,
            out.data_ptr(), 0 if lse is None else lse.data_ptr(), scale, 0.0,
            self._frames + g.first_frame[layer] * g.frame_bytes, g.first_frame[layer], 0,
        )  # fmt: skip
        backend._call(self._at)
        return out

    def _prepare(self, q_heads: int, kv_heads: int) -> None:
        """Fill in what stays the same from layer to layer, for one pair of head counts."""
        backend, schedule, kernels = self.backend, self.schedule, self.backend._kernels
        g, omp = backend.store.geometry, backend._openmp
        if q_heads % kv_heads:
            raise ValueError(f"{q_heads} query heads cannot share {kv_heads} KV heads evenly: check the model's config")
        for index, run in enumerate(schedule.runs):
            if run.bias is not None and run.bias.shape[0] != kv_heads:
                raise ValueError(f"run {index} has a bias for {run.bias.shape[0]} KV heads, the layer has {kv_heads}")
        key = (q_heads, kv_heads)
        group = q_heads // kv_heads
        tile_positions = max(1, TILE_ROWS // group)
        tile_rows = -(-tile_positions * group // kernels.ROWS) * kernels.ROWS
        logits = -(-backend._split_pages * g.page_size // 16) * 16
        if schedule.with_body:  # 16 keys are taken at once, and begin anywhere
            logits += 16
        if key not in self._work:
            work = plan_work(
                schedule, kv_heads, backend._split_pages * g.page_size, tile_positions,
                tiles_only=backend.numerics == "exact",
            )  # fmt: skip
            scratch_bytes = kernels.scratch_bytes(g.head_dim, group, logits, tile_rows)
            scratch = backend.buffer("scratch", scratch_bytes * backend.threads + _ALIGNMENT, torch.uint8)
            partials = backend.buffer(
                "partials", work.splits * q_heads * kernels.partial_floats(g.head_dim) + 16, torch.float32
            )
            packed = backend._layout.STEP.pack(
                _pointer(work.items), len(work.items), _pointer(work.merges), _pointer(work.done),
                _pointer(schedule.write_tokens), _pointer(schedule.write_slots), len(schedule.write_slots),
                q_heads, kv_heads, g.head_dim, g.page_size, g.block_bytes, g.frame_bytes,
                _pointer(schedule.tail_starts), _pointer(schedule.offsets),
                _pointer(schedule.tables), _pointer(schedule.table_offsets),
                0 if self._bodies is None else _pointer(self._bodies),
                0 if self._bias is None else _pointer(self._bias),
                _aligned(partials.data_ptr()), logits, _aligned(scratch.data_ptr()), scratch_bytes,
                backend.threads if work.size * group > ALONE else 1, backend._body.address,
                omp.team_start, omp.thread, omp.team, omp.barrier,
            )  # fmt: skip
            self._work[key] = (packed, [work, scratch, partials])
        packed = self._work[key][0]
        self._buffer[backend._layout.LAYER.size :] = packed
        flat = backend.buffer("out", schedule.tokens * q_heads * g.head_dim, g.dtype)
        self._out = flat[: schedule.tokens * q_heads * g.head_dim].view(schedule.tokens, q_heads, g.head_dim)
        self._shape = key


def _aligned(address: int) -> int:
    return -(-address // _ALIGNMENT) * _ALIGNMENT


def _pointer(array: IntArray) -> int:
    return int(array.ctypes.data)


def _checked(name: str, x: Tensor, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """The tensor, with adjacent numbers adjacent in memory, or an error that says what is wrong with it."""
    if x.shape != (tokens, heads, head_dim) or x.dtype != dtype:
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}, the step and its pool need {dtype} {(tokens, heads, head_dim)}"
        )
    return x if x.stride(2) == 1 else x.contiguous()


def _body_table(schedule: Schedule) -> tuple[IntArray | None, list[IntArray]]:
    """`[runs, 3]` of each run's body: addresses of its frames and lengths, and columns; and what must stay alive."""
    if not schedule.with_body:
        return None, []
    table = np.zeros((len(schedule.runs), 3), dtype=np.int64)
    kept = []
    for index in schedule.with_body:
        body = schedule.runs[index].body
        assert body is not None
        kept += [body.frames, body.lengths]
        table[index] = _pointer(body.frames), _pointer(body.lengths), body.frames.shape[1]
    return table, kept


def _bias_table(schedule: Schedule) -> tuple[IntArray | None, list[Tensor]]:
    """`[runs, 2]` of address and head stride of each run's bias, and the tensors that must stay alive for it."""
    if all(run.bias is None for run in schedule.runs):
        return None, []
    table = np.zeros((len(schedule.runs), 2), dtype=np.int64)
    kept = []
    for index, run in enumerate(schedule.runs):
        if run.bias is not None:
            bias = run.bias.to(device="cpu", dtype=torch.float32).contiguous()
            kept.append(bias)
            table[index] = bias.data_ptr(), bias.stride(0) * 4
    return table, kept

"""The contract of an attention backend, and the choice of one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from torch import Tensor

from kvikk.attention.plan import QueryRun, Schedule
from kvikk.errors import ConfigError
from kvikk.memory.storage import KVStore
from kvikk.models.protocol import AttentionStep
from kvikk.types import Numerics

_LOG = logging.getLogger(__name__)

BackendName = Literal["auto", "reference", "cpu", "triton"]


class AttentionBackend(Protocol):
    """Attention over the pages of one pool: plan a step once, then run each layer.

        schedule = backend.plan(runs)
        step = backend.begin(schedule)
        out = step.attend(layer, q, k, v, scale=scale)     # for each layer

    Callers can rely on this:

    - A run's output and the KV it stores do not depend on the other runs of the step, bit for bit.
    - In `exact` numerics a position's output does not depend on its run either: the same bits alone, in a chunk and in
      any other chunk.
    - The same step on the same pool gives the same bits again.
    - Slots beyond a row's length are never read into a result, whatever they hold, and the null block is never
      written.
    - Maths is in fp32 whatever the storage is, except that a backend may round attention weights to the storage type.

    A backend runs one step at a time: steps may be planned and begun ahead, but `attend` of two steps at once, from
    two threads, is not allowed.
    """

    @property
    def name(self) -> str:
        """As `attention_backend` knows it."""
        ...

    @property
    def store(self) -> KVStore:
        """The pool."""
        ...

    @property
    def numerics(self) -> Numerics:
        """What it was made for."""
        ...

    def plan(self, runs: Sequence[QueryRun]) -> Schedule:
        """Check and pack the runs of a step.

        Reads block tables once: later changes of them are not seen. Bodies are read where they lie, and must stay as
        they are until the step's last `attend`.

        Raises:
            ValueError: a run that cannot be computed; the text says which and why.
        """
        ...

    def begin(self, schedule: Schedule) -> AttentionStep:
        """A step ready to run. Its outputs may share one buffer: each is valid until the next `attend`.

        Tensors must have the shapes of `AttentionStep.attend`, and on the compiled backend the geometry's dtype; any
        strides will do. A tensor that does not fit is a ValueError, and nothing was stored.
        """
        ...

    def warm_up(self) -> None:
        """Load or compile what steps will need, so that no request waits for it. Changes nothing in the pool."""
        ...

    def attend_run(self, layer: int, run: QueryRun, q: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        """Attend one run to what the pool holds; nothing is stored.

        Args:
            layer: which layer.
            run: the positions; `write` is ignored.
            q: `[length, q_heads, head_dim]`.
            scale: factor on `q @ k`.

        Returns:
            Output `[length, q_heads, head_dim]`, in fp32 or q's dtype, and log-sum-exp `[length, q_heads]`: natural
            log, fp32. A query that sees nothing gives (0, -inf).
        """
        ...


def _reference(store: KVStore, numerics: Numerics) -> AttentionBackend:
    from kvikk.attention.reference import ReferenceBackend

    return ReferenceBackend(store, numerics=numerics)


def _cpu(store: KVStore, numerics: Numerics) -> AttentionBackend:
    from kvikk.attention.cpu.backend import CpuBackend

    return CpuBackend(store, numerics=numerics)


def _triton(store: KVStore, numerics: Numerics) -> AttentionBackend:
    from kvikk.attention.gpu.backend import TritonBackend

    return TritonBackend(store, numerics=numerics)


def _auto(store: KVStore, numerics: Numerics) -> AttentionBackend:
    from kvikk.attention.cpu.backend import CpuUnavailableError

    if store.device.type == "cuda":
        try:
            return _triton(store, numerics)
        except (ImportError, ConfigError) as error:
            _LOG.warning(
                "attention runs on the slow reference backend: %s (pip install 'kvikk[cuda]' has triton)", error
            )
    if store.device.type != "cpu":
        return _reference(store, numerics)
    try:
        return _cpu(store, numerics)
    except CpuUnavailableError as error:
        _LOG.warning("attention runs on the slow reference backend: %s", error)
        return _reference(store, numerics)


def attention_backend(name: BackendName, store: KVStore, *, numerics: Numerics = "fast") -> AttentionBackend:
    """Make a backend by name.

    Args:
        name: `triton` (a GPU), `cpu` (compiled), `reference` (PyTorch, any device), or `auto`: the first of these that
            serves the pool where it lies; a fall-back is logged with its reason.
        store: the pool.
        numerics: `exact` for outputs that do not depend on how positions were cut into runs.

    Raises:
        ConfigError: no such backend.
        CpuUnavailableError: `cpu` was asked for by name and cannot run here.
    """
    makers: dict[str, Callable[[KVStore, Numerics], AttentionBackend]] = {
        "auto": _auto,
        "reference": _reference,
        "cpu": _cpu,
        "triton": _triton,
    }
    if name not in makers:
        raise ConfigError(f"attention backend {name!r} does not exist: use one of {', '.join(sorted(makers))}")
    return makers[name](store, numerics)

"""What is compared: every way of keeping less that a grid spans."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from kvikk.bench.datasets import names_in
from kvikk.compress import KVCacheParams
from kvikk.errors import ConfigError, InvalidRequest

FULL = "full"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way of keeping less, under the names that a request has for it.

    Args:
        policy: which tokens matter.
        budget: what may stay; None for `full`.
        allocator: how that is shared.
        rest: what becomes of the others.
        trigger: when.
    """

    policy: str
    budget: str | None
    allocator: str
    rest: str
    trigger: str

    @property
    def is_full(self) -> bool:
        """Whether it is what all others are compared with."""
        return self.policy == FULL

    @property
    def names(self) -> dict[str, str | None]:
        """What tells it from the others, as a row of results has it."""
        return asdict(self)

    def __str__(self) -> str:
        return FULL if self.is_full else " ".join(str(value) for value in asdict(self).values())


FULL_CELL = Cell(policy=FULL, budget=None, allocator="uniform", rest="drop", trigger="prefill")


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """What is compared: all combinations of these, each a list with commas, and the full cache.

    Args:
        policies: names that `kvikk policies` lists.
        budgets: shares (25%), tokens (512) or memory of a request (16MiB).
        allocators: of uniform, pyramid, pooled.
        rests: of drop.
        triggers: of prefill, every:N.
        sinks: so many of the first tokens always stay.
        window: so many of the last tokens always stay.
    """

    policies: str = "snapkv"
    budgets: str = "50%,25%,12.5%"
    allocators: str = "uniform"
    rests: str = "drop"
    triggers: str = "prefill"
    sinks: int = 4
    window: int = 32

    def __post_init__(self) -> None:
        for cell in self.cells():
            self.kv_cache(cell)

    def cells(self) -> list[Cell]:
        """The full cache first, then every combination once.

        Raises:
            ConfigError: a list is empty.
        """
        lists = [
            names_in(getattr(self, name), f"--{name}")
            for name in ("policies", "budgets", "allocators", "rests", "triggers")
        ]
        fields = ("policy", "budget", "allocator", "rest", "trigger")
        cells = (Cell(**dict(zip(fields, values, strict=True))) for values in product(*lists))
        return [FULL_CELL, *(cell for cell in cells if not cell.is_full)]

    def kv_cache(self, cell: Cell) -> dict[str, Any]:
        """What a request says to be kept so.

        Raises:
            ConfigError: it can never be done.
        """
        asked = {"policy": FULL} if cell.is_full else cell.names | {"sinks": self.sinks, "window": self.window}
        try:
            KVCacheParams.from_dict(asked, None)
        except InvalidRequest as error:
            raise ConfigError(f"{cell} cannot be evaluated: {error}") from None
        return asked

"""The kinds of metrics: what the table says of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvikk.server.messages import Ready, Stats

PREFIX = "kvikk:"
MODEL = "model_name"
"""The label that every series has."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What all have.

    Args:
        name: without the prefix; a counter's shows with `_total`.
        help: what it counts, exactly.
        is_vllm: whether vLLM has it under the same name with the same meaning.
    """

    kind: ClassVar[str]

    name: str
    help: str
    is_vllm: bool = False

    @property
    def full_name(self) -> str:
        """As it is registered: `kvikk:num_preemptions`."""
        return PREFIX + self.name

    @property
    def shown_name(self) -> str:
        """As the exposition in text names it: `kvikk:num_preemptions_total`."""
        return self.full_name + "_total" * (self.kind == "counter")

    @property
    def label_help(self) -> str:
        """Its labels besides `model_name`, for the documentation."""
        return ""


@dataclass(frozen=True, kw_only=True)
class EngineValue(Metric):
    """Read from the engine's latest `Stats` when Prometheus asks."""

    value: Callable[[Stats], float]


class EngineGauge(EngineValue):
    """Something that the engine has now."""

    kind: ClassVar[str] = "gauge"


class EngineCounter(EngineValue):
    """Something that the engine counts; it starts at 0 with the process."""

    kind: ClassVar[str] = "counter"


@dataclass(frozen=True, kw_only=True)
class EngineCounterBy(Metric):
    """Something that the engine counts apart by one label.

    Args:
        label: its name.
        values: what it can be: each shows from the start, as 0.
        counts: the counters by the label's value; those that are not in it are 0.
    """

    kind: ClassVar[str] = "counter"

    label: str
    values: tuple[str, ...]
    counts: Callable[[Stats], Mapping[str, float]]

    @property
    def label_help(self) -> str:
        """The label's name and values; numbers in a row by the first and the last."""
        if all(value.isdecimal() for value in self.values):
            return f"`{self.label}`: {self.values[0]} to {self.values[-1]}"
        return f"`{self.label}`: {', '.join(self.values)}"


@dataclass(frozen=True, kw_only=True)
class EngineInfo(Metric):
    """Always 1; what it says is in its labels."""

    kind: ClassVar[str] = "gauge"

    labels: Mapping[str, Callable[[Ready], object]]

    @property
    def label_help(self) -> str:
        """The labels' names."""
        return _quoted(self.labels)


@dataclass(frozen=True, kw_only=True)
class FrontCounter(Metric):
    """Counted by the front.

    Args:
        labels: names of its labels besides `model_name`.
        values: what its one label can be, where that is known: each shows from the start, as 0.
    """

    kind: ClassVar[str] = "counter"

    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def label_help(self) -> str:
        """The labels' names and known values."""
        return _quoted(self.labels) + (": " + ", ".join(self.values) if self.values else "")


@dataclass(frozen=True, kw_only=True)
class FrontHistogram(Metric):
    """Observed by the front.

    Args:
        bounds: upper ends of its buckets; none for 1, 2, 5, 10, ... up to the model's longest sequence.
    """

    kind: ClassVar[str] = "histogram"

    bounds: tuple[float, ...] = ()

    def bounds_for(self, max_model_len: int) -> tuple[float, ...]:
        """The upper ends of its buckets on a model of that length."""
        if self.bounds:
            return self.bounds
        series = (digit * 10**zeros for zeros in range(len(str(max_model_len))) for digit in (1, 2, 5))
        return tuple(bound for bound in series if bound <= max_model_len)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)

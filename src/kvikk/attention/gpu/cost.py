"""What a layer of decode attention will cost by each route, and which one to take: few constants, fitted to times.

    time = fixed + part x partial results + max(bytes / bandwidth, chain x tokens of the busiest program)

How a route cuts rows into parts follows from its planner, so the model knows that FlashInfer's fa2 stops cutting when
there are more rows than it has programs for (2 x multiprocessors / KV heads), and then waits for its longest row.
The idea is PersistentKV's (arXiv 2606.26666); its own model takes FlashInfer's rows as never cut, and is not used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

RouteName = Literal["worklist", "fa2", "persistent"]
Lengths = NDArray[np.integer]
Floats = NDArray[np.float64]

SAFE: Final[RouteName] = "worklist"
"""The route of shapes that nobody has measured."""
FA2_LEAST_SLOTS: Final = 128
WAYS: Final = 32
"""Part sizes that are tried at once when fa2's is searched for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """What constants are measured for.

    Args:
        kv_heads: of a layer.
        group: query heads of each.
        head_dim: of each.
        dtype: `bfloat16` or `float16`.
        page_size: slots of a frame.
    """

    kv_heads: int
    group: int
    head_dim: int
    dtype: str
    page_size: int

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token in a layer; both dtypes take two a number."""
        return self.kv_heads * 2 * self.head_dim * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """How many programs a route's planner shares the work among, and the least that one is given.

    Args:
        count: programs at once, of all KV heads.
        least_slots: no part is smaller.
        step_slots: part sizes are multiples of this.
    """

    count: int
    least_slots: int
    step_slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteCost:
    """The constants of a route on one device, for one shape.

    Args:
        programs: of its planner.
        fixed_us: of every layer.
        us_per_gb: at full bandwidth.
        us_per_kilotoken: of a program that reads 1,000 tokens of its lane one after the other.
        us_per_kilopart: of 1,000 partial results, written and merged.
        plan_us: on the host, once for all layers of a step.
    """

    programs: Programs
    fixed_us: float
    us_per_gb: float
    us_per_kilotoken: float
    us_per_kilopart: float
    plan_us: float


class Cut(NamedTuple):
    """What a planner makes of rows: parts that have to be merged, and tokens of the busiest program."""

    parts: int
    chain: int


class Batch(NamedTuple):
    """The rows of a step: their lengths (as floats, which divide faster), the sum of these, and the largest."""

    lengths: Floats
    total: int
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int] | Lengths) -> Batch:
        """Rows of these lengths, or padded ones of none."""
        array = np.asarray(lengths, dtype=np.float64)
        return cls(array, int(array.sum()), int(array.max(initial=0)))


@dataclass(frozen=True, slots=True)
class Choice:
    """A route, and what each one was predicted to cost in microseconds a layer; nothing where nobody measured."""

    route: RouteName
    predicted_us: Mapping[RouteName, float]


def cut_worklist(rows: Batch, kv_heads: int, programs: Programs) -> Cut:
    """Ours: a part for each program, all alike. The planner weighs some other sizes beside this one."""
    share = -(-rows.total * kv_heads // programs.count)
    part = max(-(-share // programs.step_slots) * programs.step_slots, programs.least_slots)
    return Cut(_merged_parts(rows, part, kv_heads), min(part, rows.longest))


def cut_fa2(rows: Batch, kv_heads: int, programs: Programs) -> Cut:
    """FlashInfer's fa2 in a graph: the smallest part size whose parts fit the programs; else rows stay whole.

    It always merges, whole rows too.
    """
    page, slots, count = programs.step_slots, programs.count // kv_heads, len(rows.lengths)
    pages = np.ceil(rows.lengths / page)
    low, high = programs.least_slots // page, -(-rows.longest // page)
    if count > slots:
        low = high
    elif count < slots:  # parts of a size are fewer than all pages / size + rows
        low, high = max(low, rows.total // page // slots), min(high, int(pages.sum()) // (slots - count) + 1)
    while low < high:
        step = -(-(high - low) // WAYS)
        sizes = np.arange(low, high, step, dtype=np.float64)
        fits = np.ceil(pages / sizes[:, None]).sum(axis=1) <= slots
        first = int(fits.argmax()) if fits[-1] else len(sizes)
        high = low + first * step if first < len(sizes) else high
        low = low + (first - 1) * step + 1 if first else low
    part = max(low, 1) * page
    return Cut(int(np.ceil(rows.lengths / part).sum()) * kv_heads, min(part, rows.longest))


def cut_persistent(rows: Batch, kv_heads: int, programs: Programs) -> Cut:
    """FlashInfer's persistent planner: parts of an equal share, rounded up, each to the program with the least work."""
    share = -(-rows.total * kv_heads // programs.count)
    part = programs.least_slots
    if share > part:
        part = -(-share // programs.step_slots) * programs.step_slots
    return Cut(_merged_parts(rows, part, kv_heads), max(min(part, rows.longest), share))


def _merged_parts(rows: Batch, part: int, kv_heads: int) -> int:
    """Parts of the rows that are longer than one."""
    if rows.longest <= part:
        return 0
    lengths = rows.lengths[rows.lengths > part]
    return int(np.ceil(lengths / part).sum()) * kv_heads


CUTS: Final[Mapping[RouteName, Callable[[Batch, int, Programs], Cut]]] = {
    "worklist": cut_worklist,
    "fa2": cut_fa2,
    "persistent": cut_persistent,
}


def flashinfer_programs(route: Literal["fa2", "persistent"], shape: DecodeShape, multiprocessors: int) -> Programs:
    """The programs of FlashInfer's planners, which are the same for everyone."""
    if route == "fa2":
        return Programs(count=2 * multiprocessors, least_slots=FA2_LEAST_SLOTS, step_slots=shape.page_size)
    return Programs(
        count=multiprocessors if shape.head_dim >= 256 else 2 * multiprocessors, least_slots=128, step_slots=256
    )


class CostModel:
    """Predicts and chooses. Pure and cheap: it runs on the host in every step.

    Args:
        shape: of the layers.
        costs: by route, of those that can serve; without any, `choose` gives the safe one.
        layers: over which a plan is shared.
    """

    def __init__(self, shape: DecodeShape, costs: Mapping[RouteName, RouteCost], *, layers: int) -> None:
        self.shape = shape
        self.costs = dict(costs) if SAFE in costs else {}
        self.layers = layers

    def choose(self, lengths: Sequence[int] | Lengths) -> Choice:
        """The route with the least predicted time for rows of these lengths; padded rows are 0."""
        rows = Batch.of(lengths)
        predicted = {route: self._predict(route, cost, rows) for route, cost in self.costs.items()}
        return Choice(min(predicted, key=predicted.__getitem__, default=SAFE), predicted)

    def _predict(self, route: RouteName, cost: RouteCost, rows: Batch) -> float:
        return kernel_us(route, cost, self.shape, rows) + cost.plan_us / self.layers


def kernel_us(route: RouteName, cost: RouteCost, shape: DecodeShape, rows: Batch) -> float:
    """Predicted time of a layer in microseconds, without its share of the plan."""
    parts, chain = CUTS[route](rows, shape.kv_heads, cost.programs)
    gigabytes = rows.total * shape.token_bytes / 1e9
    reading = max(gigabytes * cost.us_per_gb, chain / 1e3 * cost.us_per_kilotoken)
    return cost.fixed_us + parts / 1e3 * cost.us_per_kilopart + reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted constants, and how far they are from what was measured: relative errors, mean and largest."""

    cost: RouteCost
    mean_error: float
    worst_error: float


def fit(
    route: RouteName,
    shape: DecodeShape,
    programs: Programs,
    measured: Sequence[tuple[Sequence[int], float]],
    *,
    plan_us: float,
) -> Fit:
    """Constants with the least squares of relative errors, none below zero.

    Args:
        route: which planner.
        shape: that was measured.
        programs: of the planner.
        measured: lengths of the rows and microseconds of a layer, at least four of them.
        plan_us: as of `RouteCost`.

    Raises:
        ValueError: fewer than four points.
    """
    if len(measured) < 4:
        raise ValueError(f"{len(measured)} points were measured, four constants need at least 4")
    rows = [Batch.of(lengths) for lengths, _ in measured]
    times = np.array([time for _, time in measured])
    cuts = [CUTS[route](batch, shape.kv_heads, programs) for batch in rows]
    gigabytes = np.array([batch.total * shape.token_bytes / 1e9 for batch in rows])
    chain = np.array([cut.chain / 1e3 for cut in cuts])
    parts = np.array([cut.parts / 1e3 for cut in cuts])
    best: tuple[float, Floats] | None = None
    for ratio in np.geomspace(1e-4, 1e4, 33):  # of the two limits: decides which one binds a point, at first
        is_chain = chain > gigabytes * ratio
        for _ in range(8):
            columns = np.stack(
                [np.ones(len(rows)), parts, np.where(is_chain, 0.0, gigabytes), np.where(is_chain, chain, 0.0)], axis=1
            )
            constants = _nonnegative_least_squares(columns / times[:, None], np.ones(len(rows)))
            moved = chain * constants[3] > gigabytes * constants[2]
            if (moved == is_chain).all():
                break
            is_chain = moved
        reading = np.maximum(gigabytes * constants[2], chain * constants[3])
        errors = (constants[0] + parts * constants[1] + reading) / times - 1
        if best is None or float(errors @ errors) < best[0]:
            best = float(errors @ errors), constants
            found = np.abs(errors)
    assert best is not None
    fixed, part, gigabyte, token = map(float, best[1])
    cost = RouteCost(
        programs=programs, fixed_us=fixed, us_per_gb=gigabyte, us_per_kilotoken=token, us_per_kilopart=part,
        plan_us=plan_us,
    )  # fmt: skip
    return Fit(cost=cost, mean_error=float(found.mean()), worst_error=float(found.max()))


def _nonnegative_least_squares(columns: Floats, target: Floats) -> Floats:
    """The exact solution for a handful of columns: of all subsets, the best one whose solution has no negative part."""
    width = columns.shape[1]
    best, least = np.zeros(width), float("inf")
    for chosen in _subsets(range(width)):
        part, *_ = np.linalg.lstsq(columns[:, chosen], target, rcond=None)
        if (part < 0).any():
            continue
        rest = target - columns[:, chosen] @ part
        if float(rest @ rest) < least:
            least, best = float(rest @ rest), np.zeros(width)
            best[chosen] = part
    return best


def _subsets(items: Iterable[int]) -> Iterable[list[int]]:
    kept = list(items)
    return (list(some) for size in range(1, len(kept) + 1) for some in itertools.combinations(kept, size))

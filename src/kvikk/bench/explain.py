"""`kvikk bench attention --explain`: what each route was predicted to cost, what it cost, and which one is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from kvikk.attention.gpu.calibration import costs_of
from kvikk.attention.gpu.cost import Choice, CostModel
from kvikk.bench.attention import COMMAND, AttentionBenchConfig
from kvikk.bench.contenders import Contenders, Row, chosen_routes, guarded
from kvikk.bench.decode_cases import Case, KVMemory
from kvikk.bench.decode_timing import measured, queries
from kvikk.bench.device import device_name, require_cuda
from kvikk.bench.traces import parse_lengths
from kvikk.models.shapes import named_shape


def explain(config: AttentionBenchConfig) -> Iterator[str]:
    """Measure rows of given lengths and show them beside the cost model.

    Raises:
        ConfigError: no GPU, or the rows do not fit the memory.
    """
    device = require_cuda(COMMAND)
    shape = config.shape
    case = Case.of("given", parse_lengths(config.lengths or ""), shape.kv_heads)
    memory = KVMemory.make(case.pool_bytes(shape), shape.dtype, device)
    memory.fill()
    placed, q = memory.place(case, shape), queries(case, shape, device)
    contenders = Contenders(shape, rows=case.rows, entries=case.blocks(shape))
    layers = named_shape(config.model).config.layers
    costs = costs_of(device_name(device), shape.decode)
    routes = chosen_routes(config.routes)
    able = {name: cost for name, cost in costs.items() if name in routes}
    model = CostModel(shape.decode, able, layers=layers)
    found = {name: guarded(partial(measured, contenders, name, placed, q, fixed=True)) for name in routes}
    yield from table(case, model.choose(case.lengths), found, layers)


def table(case: Case, choice: Choice, found: Mapping[str, Row], layers: int) -> Iterator[str]:
    """The lines: microseconds of a layer, with its share of the plan, as predicted and as measured."""
    yield f"{case.rows:,} rows, {sum(case.lengths):,} tokens, the longest {max(case.lengths):,}"
    yield f"{'route':<12}{'predicted us':>14}{'measured us':>14}{'off by':>9}"
    for name, row in found.items():
        predicted = next((us for route, us in choice.predicted_us.items() if route == name), None)
        actual = None if row["time_us"] is None else row["time_us"] + row["plan_us"] / layers
        off = f"{predicted / actual - 1:+.0%}" if predicted is not None and actual is not None else "-"
        mark = "   chosen" if name == choice.route else ""
        reason = f"   {row['failure']}" if row["failure"] is not None else ""
        yield f"{name:<12}{_number(predicted):>14}{_number(actual):>14}{off:>9}{mark}{reason}"
    if not choice.predicted_us:
        yield "this shape is not calibrated on this device, so it takes the safe route: see `kvikk calibrate`"


def _number(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:.1f}"

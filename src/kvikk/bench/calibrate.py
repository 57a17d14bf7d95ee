"""`kvikk calibrate`: measures the attention routes on this GPU and fits the constants of the cost model to them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
from tqdm import tqdm

from kvikk.attention.gpu.calibration import RouteCosts, save, user_file
from kvikk.attention.gpu.cost import Fit, Programs, RouteName, fit, flashinfer_programs
from kvikk.bench.attention_shape import AttentionShape
from kvikk.bench.contenders import OURS, Contenders, chosen_routes, guarded
from kvikk.bench.decode_cases import Case, KVMemory, Placed
from kvikk.bench.decode_timing import measured, queries
from kvikk.bench.device import device_name, header, require_cuda
from kvikk.bench.traces import TRACES
from kvikk.errors import ConfigError
from kvikk.models.shapes import named_shape

COMMAND: Final = "kvikk calibrate"
EVEN_ROWS: Final = (1, 2, 4, 8, 16, 32, 48, 64, 128)
EVEN_LENGTHS: Final = (128, 512, 2_048, 8_192, 32_768)
SKEWED_ROWS: Final = (4, 8, 16, 32, 48, 64)
SKEWED: Final = ("uniform", "bimodal", "zipf", "one_long", "short")
MOST_LAYER_BYTES: Final = 3_000_000_000
"""Of a pattern: larger ones tell nothing more, and two layers of these are within reach of every route."""


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Which attention is measured, and where its constants go.

    Args:
        model: whose attention, by the name of a shape: llama-3.1-8b, qwen3-32b or smollm2. Or give its sizes.
        kv_heads: KV heads of a layer, with `group` and `head_dim` instead of `model`.
        group: query heads of each KV head.
        head_dim: width of a head.
        dtype: bfloat16 or float16.
        block_size: tokens in a block.
        routes: worklist, fa2 and persistent, separated by commas; auto takes those that are installed.
        output: file to write to; the one in the user's cache folder when not given.
        disable_tqdm: show no progress bar.
    """

    model: str | None = None
    kv_heads: int | None = None
    group: int | None = None
    head_dim: int | None = None
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    block_size: int = 16
    routes: str = "auto"
    output: str | None = None
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        if self.block_size not in (16, 32):
            raise ConfigError(f"--block-size {self.block_size} is not supported: choose 16 or 32")
        sizes = {"--kv-heads": self.kv_heads, "--group": self.group, "--head-dim": self.head_dim}
        missing = [flag for flag, size in sizes.items() if size is None]
        if (self.model is None) == bool(missing) or (self.model is not None and len(missing) < len(sizes)):
            raise ConfigError("name the attention: --model llama-3.1-8b, or --kv-heads, --group and --head-dim")
        for flag, size in sizes.items():
            if size is not None and size < 1:
                raise ConfigError(f"{flag} {size} must be at least 1")
        _ = self.shape
        if OURS not in chosen_routes(self.routes):
            raise ConfigError(f"--routes {self.routes} leaves out {OURS}, beside which the others are chosen: add it")

    @property
    def shape(self) -> AttentionShape:
        """What is measured."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        if self.model is not None:
            return AttentionShape.of_model(named_shape(self.model).config, self.block_size, dtype)
        kv_heads, group, head_dim = self.kv_heads or 0, self.group or 0, self.head_dim or 0
        return AttentionShape(
            q_heads=kv_heads * group, kv_heads=kv_heads, head_dim=head_dim, page_size=self.block_size, dtype=dtype
        )


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """What was fitted, and where it was written."""

    device: str
    path: Path
    fits: dict[RouteName, Fit]
    left_out: dict[str, str]

    def lines(self) -> Iterator[str]:
        """The constants of each route and how well they fit."""
        yield f"{self.device}: a layer's time in microseconds is fixed + parts + the larger of reading and chain"
        yield (
            f"{'route':<12}{'fixed':>9}{'per GB':>9}{'1K tokens':>11}{'1K parts':>10}{'plan':>9}"
            f"{'mean error':>12}{'worst':>8}"
        )
        for route, found in self.fits.items():
            cost = found.cost
            yield (
                f"{route:<12}{cost.fixed_us:>9.2f}{cost.us_per_gb:>9.1f}{cost.us_per_kilotoken:>11.2f}"
                f"{cost.us_per_kilopart:>10.2f}{cost.plan_us:>9.1f}{found.mean_error:>12.1%}{found.worst_error:>8.0%}"
            )
        for name, reason in self.left_out.items():
            yield f"{name}: left out: {reason}"
        yield f"wrote {self.path}"


def patterns(shape: AttentionShape) -> list[Case]:
    """The fixed set of lengths that is measured: even rows of every size, and the skewed traces."""
    even = [[length] * rows for rows in EVEN_ROWS for length in EVEN_LENGTHS]
    skewed = [TRACES[name].lengths(rows, seed=0) for name in SKEWED for rows in SKEWED_ROWS]
    cases = [Case.of("pattern", lengths, shape.kv_heads) for lengths in [*even, *skewed]]
    return [case for case in cases if case.kv_bytes(shape) <= MOST_LAYER_BYTES]


def calibrate(config: CalibrateConfig) -> CalibrationResult:
    """Measure and fit, and write the constants.

    Raises:
        ConfigError: no GPU, too little memory, our own kernels fail, or the file cannot be written.
    """
    device = require_cuda(COMMAND)
    shape, routes = config.shape, chosen_routes(config.routes)
    cases = patterns(shape)
    memory = KVMemory.make(max(case.pool_bytes(shape) for case in cases), shape.dtype, device)
    memory.fill()
    contenders = Contenders(shape, rows=max(EVEN_ROWS), entries=max(case.blocks(shape) for case in cases))
    times: dict[str, list[tuple[list[int], float, float]]] = {route: [] for route in routes}
    left_out: dict[str, str] = {}
    for case in tqdm(cases, desc="patterns", disable=config.disable_tqdm):
        placed, q = memory.place(case, shape), queries(case, shape, device)
        for name in routes:
            if name in left_out:
                continue
            row = guarded(partial(measured, contenders, name, placed, q, fixed=True))
            if row["failure"] is None:
                times[name].append((case.lengths, row["time_us"], row["plan_us"]))
            else:
                left_out[name] = row["failure"]
    if OURS in left_out:
        raise ConfigError(f"our own kernels cannot be measured here: {left_out[OURS]}")
    fits: dict[RouteName, Fit] = {}
    for route in _names(set(routes) - left_out.keys()):
        points = [(lengths, time_us) for lengths, time_us, _ in times[route]]
        plan_us = statistics.median(plan_us for _, _, plan_us in times[route])
        programs = _programs(route, contenders, placed, device)
        fits[route] = fit(route, shape.decode, programs, points, plan_us=plan_us)
    gpu = device_name(device)
    path = user_file(gpu) if config.output is None else Path(config.output)
    costs: RouteCosts = {route: found.cost for route, found in fits.items()}
    save(path, gpu, header(device), shape.decode, costs)
    return CalibrationResult(device=gpu, path=path, fits=fits, left_out=left_out)


def _names(chosen: set[str]) -> list[RouteName]:
    known: tuple[RouteName, ...] = ("worklist", "fa2", "persistent")
    return [route for route in known if route in chosen]


def _programs(route: RouteName, contenders: Contenders, placed: Placed, device: torch.device) -> Programs:
    """How a route's planner shares work out."""
    if route != "worklist":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        return flashinfer_programs(route, contenders.shape.decode, multiprocessors)
    from kvikk.attention.gpu.worklist import WorkListDecode  # imports triton: only where it is used

    ours = contenders.make(OURS, placed).route
    assert isinstance(ours, WorkListDecode)
    cut = ours.chunking
    return Programs(count=cut.residents, least_slots=cut.min_slots, step_slots=cut.tile_slots)

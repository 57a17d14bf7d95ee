"""`kvikk bench step`: the time of a whole decode step of the engine, beside reading all weights and KV once.

Prompts are random tokens. The engine computes them once with an answer of one token each, so that the prefix cache
holds them; then all rows start together, at the same context. Steps are run in a loop, and the device is waited for
before the first and after the last of them only.
"""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from kvikk.bench.datasets import at_least
from kvikk.bench.device import copy_rate_tb_per_s, header, synchronize, waits
from kvikk.bench.random_engine import dtype_of, random_engine, shape_name
from kvikk.engine import Engine, EngineConfig, EngineOutput, SamplingParams
from kvikk.errors import ConfigError, KvikkError
from kvikk.models.shapes import NamedShape, named_shape

Row = dict[str, Any]
PROMPTS_LIMIT_S: Final = 300.0
STARTING_STEPS: Final = 64
"""In which rows whose prompts are cached must begin."""


class NotMeasured(KvikkError):
    """The engine did not come to the point that was to be measured."""

    code = "not_measured"


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What is measured; `--model` names a shape here: llama-3.1-8b, qwen3-32b or smollm2, with random weights.

    Args:
        at: rows x context of each measurement, separated by commas.
        steps: timed steps of each.
        warm_up_steps: steps before them, in which all rows decode already.
        floor_tb_per_s: rate at which the floor reads weights and KV; that of a copy on this device when not given.
        json: file to write the result to.
    """

    at: str = "1x8192,8x8192,64x2048,8x32768"
    steps: int = 32
    warm_up_steps: int = 8
    floor_tb_per_s: float | None = None
    json: str | None = None

    def __post_init__(self) -> None:
        at_least("--steps", self.steps, 1)
        at_least("--warm-up-steps", self.warm_up_steps, 0)
        if self.floor_tb_per_s is not None and self.floor_tb_per_s <= 0:
            raise ConfigError(f"--floor-tb-per-s {self.floor_tb_per_s} must be above 0")
        for _, context in self.points:
            if context <= self.prompt_margin:
                raise ConfigError(
                    f"--at has a context of {context:,} tokens, {self.warm_up_steps} + {self.steps} steps are run "
                    f"around it: at least {self.prompt_margin + 1:,}, or give fewer --steps"
                )

    @property
    def prompt_margin(self) -> int:
        """How much shorter than the context prompts are, so that it is reached halfway through the timed steps."""
        return self.warm_up_steps + self.steps // 2 + 1

    @property
    def points(self) -> list[tuple[int, int]]:
        """`at`, as (rows, context)."""
        return parse_points(self.at)


def parse_points(text: str) -> list[tuple[int, int]]:
    """`8x8192,64x2048` as (rows, context).

    Raises:
        ConfigError: it is written otherwise.
    """
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)x([1-9]\d*)\s*", part)
        if match is None:
            raise ConfigError(f"--at {part!r} is not rows x context: write 8x8192")
        found.append((int(match[1]), int(match[2])))
    return found


@dataclass(frozen=True, kw_only=True)
class BenchStepConfig:
    """Everything `kvikk bench step` can be told."""

    step: StepConfig = field(default_factory=StepConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What was measured: a header, and a row for each number of rows and context."""

    header: dict[str, Any]
    rows: list[Row]

    def lines(self) -> Iterator[str]:
        """The table."""
        yield f"{self.header['device']}, {self.header['floor_tb_per_s']:.2f} TB/s for the floor"
        yield f"{'model':<14}{'rows':>5}{'context':>9}{'step ms':>9}{'floor ms':>10}{'ratio':>7}{'host ms':>9}"
        for row in self.rows:
            yield (
                f"{row['model']:<14}{row['rows']:>5}{row['context']:>9}{row['step_ms']:>9.3f}{row['floor_ms']:>10.3f}"
                f"{row['ratio']:>7.2f}{row['host_ms']:>9.3f}"
            )


def bench_step(config: BenchStepConfig, *, clock: Callable[[], float] = time.perf_counter) -> StepResult:
    """Build an engine on random weights and measure each point of `--at`.

    Raises:
        ConfigError: no such shape, or rows and context do not fit its KV memory.
        NotMeasured: not every row decoded in each of the steps.
    """
    name = shape_name(config.engine)
    device, dtype = config.engine.model.torch_device(), dtype_of(config.engine)
    rate = config.step.floor_tb_per_s or copy_rate_tb_per_s(device)
    engine, capacity = random_engine(config.engine)
    for rows, context in config.step.points:
        if context + config.step.steps > capacity.max_model_len:
            raise ConfigError(
                f"--at {rows}x{context} and its steps do not fit sequences of {capacity.max_model_len:,} tokens: "
                "give a shorter context, or raise --max-model-len"
            )
        needed = rows * capacity.geometry.blocks_for(context + config.step.steps + config.step.warm_up_steps)
        if needed > capacity.blocks:
            raise ConfigError(
                f"--at {rows}x{context} takes {needed:,} blocks, the KV memory has {capacity.blocks:,}: "
                "raise --kv-memory, or measure fewer rows"
            )
    measured = []
    for rows, context in config.step.points:
        floor_ms = floor_bytes(named_shape(name), rows, context, dtype) / rate / 1e9
        step_ms, host_ms = _time_steps(engine, config.step, rows, context, device, clock)
        measured.append(
            {
                "model": name, "rows": rows, "context": context, "step_ms": step_ms, "floor_ms": floor_ms,
                "ratio": step_ms / floor_ms, "host_ms": host_ms, "steps": config.step.steps,
            }
        )  # fmt: skip
    head = header(device) | {
        "floor_tb_per_s": round(rate, 3), "dtype": str(dtype).removeprefix("torch."),
        "block_size": config.engine.memory.block_size, "numerics": config.engine.numerics,
    }  # fmt: skip
    return StepResult(header=head, rows=measured)


def floor_bytes(shape: NamedShape, rows: int, context: int, dtype: torch.dtype) -> int:
    """What a step must read: every weight but the embedding, and the K and V of all rows."""
    c = shape.config
    return (shape.parameters + rows * context * c.layers * c.kv_heads * 2 * c.head_dim) * dtype.itemsize


def _time_steps(
    engine: Engine, config: StepConfig, rows: int, context: int, device: torch.device, clock: Callable[[], float]
) -> tuple[float, float]:
    """Milliseconds of a step, and of the part of it in which the host did not wait for the device."""
    shape = (rows, context - config.prompt_margin)
    drawn = np.random.default_rng(0).integers(0, engine.limits.vocabulary, shape)
    prompts = [array("i", prompt) for prompt in drawn.tolist()]
    _run(engine, prompts, max_tokens=1)
    _add(engine, prompts, max_tokens=config.steps + 2 * config.warm_up_steps + STARTING_STEPS)
    try:
        begun: set[str] = set()
        for _ in range(STARTING_STEPS):
            begun |= {out.request.id for out in checked_step(engine)}
            if len(begun) == rows:
                break
        for _ in range(config.warm_up_steps):
            checked_step(engine)
        with waits() as waited:
            synchronize(device)
            start = clock()
            waited.seconds = 0.0
            tokens = sum(len(checked_step(engine)) for _ in range(config.steps))
            blocked = waited.seconds
            synchronize(device)
            seconds = clock() - start
    finally:
        for request in list(engine.requests):
            engine.abort(request.id)
    if tokens != rows * config.steps:
        raise NotMeasured(f"{config.steps} steps of {rows} rows gave {tokens:,} tokens: not every row decoded in each")
    return seconds / config.steps * 1e3, (seconds - blocked) / config.steps * 1e3


def _add(engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    for prompt in prompts:
        engine.add(prompt, params)


def _run(engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> None:
    """Answer prompts to the end."""
    _add(engine, prompts, max_tokens=max_tokens)
    start = time.monotonic()
    while engine.has_work:
        checked_step(engine)
        if time.monotonic() - start > PROMPTS_LIMIT_S:
            raise NotMeasured(f"{len(prompts)} prompts were not computed in {PROMPTS_LIMIT_S:.0f} s: give fewer")


def checked_step(engine: Engine) -> list[EngineOutput]:
    """A step of the engine, none of whose rows may fail."""
    outputs = engine.step()
    for out in outputs:
        if out.error is not None:
            raise NotMeasured(f"a row failed before it was measured: {out.error}") from out.error
    return outputs

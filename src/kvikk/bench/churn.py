"""`kvikk bench churn`: many requests with short answers that come in bursts, and what that does to the time of steps.

Steps that compute as many tokens, rounded up to the next power of two, and are of one kind (`decode`: one token for
each row; `mixed`: prompts among them) are compared with each other, as a captured graph would serve them.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from tqdm import tqdm

from kvikk.bench.datasets import at_least
from kvikk.bench.device import header, synchronize
from kvikk.bench.random_engine import dtype_of, random_engine, shape_name
from kvikk.engine import Engine, EngineConfig, SamplingParams
from kvikk.errors import ConfigError

Row = dict[str, Any]
Kind = Literal["decode", "mixed"]
WARM_UP_SHARE: Final = 0.1
"""Of the requests: the first ones meet what is compiled or captured at first use, and their steps are left out."""


@dataclass(frozen=True, kw_only=True)
class ChurnConfig:
    """The requests; `--model` names a shape here: llama-3.1-8b, qwen3-32b or smollm2, with random weights.

    Args:
        requests: in all.
        burst: requests that come at once.
        burst_steps: steps from one burst to the next.
        input_len: tokens of a prompt, at the most; a quarter of it at the least.
        output_len: tokens of an answer, at the most; an eighth of it at the least.
        json: file to write the result to.
        disable_tqdm: show no progress bar.
    """

    requests: int = 1000
    burst: int = 32
    burst_steps: int = 16
    input_len: int = 256
    output_len: int = 64
    json: str | None = None
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        for flag, value in (
            ("--requests", self.requests),
            ("--burst", self.burst),
            ("--burst-steps", self.burst_steps),
            ("--input-len", self.input_len),
            ("--output-len", self.output_len),
        ):
            at_least(flag, value, 1)


@dataclass(frozen=True, kw_only=True)
class BenchChurnConfig:
    """Everything `kvikk bench churn` can be told; the engine's seed is that of the requests too."""

    churn: ChurnConfig = field(default_factory=ChurnConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, kw_only=True)
class ChurnResult:
    """What was measured: a header, and a row for each kind and size of step, and one for all of them."""

    header: dict[str, Any]
    rows: list[Row]

    def lines(self) -> Iterator[str]:
        """The table."""
        total = self.rows[-1]
        yield (
            f"{total['requests']:,} requests, {total['output_tokens']:,} tokens in {total['steps']:,} steps and "
            f"{total['seconds']:.1f} s; reserved and unused: {total['unused_blocks_mean']:.2f} blocks a request, "
            f"{total['unused_blocks_most']} at the most"
        )
        yield f"{'step':<8}{'tokens':>8}{'steps':>8}{'p50 ms':>9}{'p99 ms':>9}{'p99/p50':>9}"
        for row in self.rows[:-1]:
            yield (
                f"{row['kind']:<8}{'<=' + str(row['bucket']):>8}{row['steps']:>8}{row['p50_ms']:>9.2f}"
                f"{row['p99_ms']:>9.2f}{row['p99_over_p50']:>9.2f}"
            )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and before which step it comes."""

    step: int
    prompt: array[int]
    output_tokens: int


@dataclass(slots=True)
class Record:
    """What the steps did: seconds by kind and bucket, and of each decoding row in each step its unused blocks."""

    seconds: dict[tuple[Kind, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    unused: list[int] = field(default_factory=list)
    output_tokens: int = 0
    steps: int = 0


def arrivals(config: ChurnConfig, vocabulary: int, seed: int) -> list[Arrival]:
    """The requests of a seed, in the order in which they come."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(config.requests):
        length = int(rng.integers(max(1, config.input_len // 4), config.input_len + 1))
        tokens = int(rng.integers(max(1, config.output_len // 8), config.output_len + 1))
        step = index // config.burst * config.burst_steps
        made.append(Arrival(step, array("i", rng.integers(0, vocabulary, length).tolist()), tokens))
    return made


def bench_churn(config: BenchChurnConfig, *, clock: Callable[[], float] = time.perf_counter) -> ChurnResult:
    """Build an engine on random weights and send it all requests.

    Raises:
        ConfigError: no such shape, or a request that the engine cannot serve.
    """
    name = shape_name(config.engine)
    engine, _ = random_engine(config.engine)
    churn, device = config.churn, config.engine.model.torch_device()
    if churn.input_len + churn.output_len > engine.limits.max_model_len:
        raise ConfigError(
            f"--input-len {churn.input_len} and --output-len {churn.output_len} do not fit the engine, which holds "
            f"{engine.limits.max_model_len:,} tokens a request: give less, or raise --kv-memory"
        )
    requests = arrivals(churn, engine.limits.vocabulary, config.engine.seed)
    synchronize(device)
    start = clock()
    record = _run(engine, requests, config.engine.memory.block_size, clock, show=not churn.disable_tqdm)
    synchronize(device)
    seconds = clock() - start
    total = {
        "model": name, "kind": "all", "requests": churn.requests, "steps": record.steps, "seconds": seconds,
        "output_tokens": record.output_tokens, "unused_blocks_mean": statistics.fmean(record.unused or [0]),
        "unused_blocks_most": max(record.unused, default=0),
    }  # fmt: skip
    head = header(device) | {
        "dtype": str(dtype_of(config.engine)).removeprefix("torch."), "burst": churn.burst,
        "burst_steps": churn.burst_steps, "input_len": churn.input_len, "output_len": churn.output_len,
        "block_size": config.engine.memory.block_size,
    }  # fmt: skip
    return ChurnResult(header=head, rows=[*_bucket_rows(name, record), total])


def _bucket_rows(name: str, record: Record) -> Iterator[Row]:
    for (kind, bucket), seconds in sorted(record.seconds.items()):
        middle, high = (float(np.percentile(seconds, rank)) * 1e3 for rank in (50, 99))
        yield {
            "model": name, "kind": kind, "bucket": bucket, "steps": len(seconds), "p50_ms": middle, "p99_ms": high,
            "p99_over_p50": high / middle,
        }  # fmt: skip


def _run(engine: Engine, requests: list[Arrival], page_size: int, clock: Callable[[], float], *, show: bool) -> Record:
    """Step through all requests."""
    record, waiting, finished = Record(), requests[::-1], 0
    warm_up = int(len(requests) * WARM_UP_SHARE)
    with tqdm(total=len(requests), desc="requests", disable=not show) as bar:
        step = 0
        while waiting or engine.has_work:
            while waiting and (waiting[-1].step <= step or not engine.has_work):
                _add(engine, waiting.pop())
            computed, start = engine.computed_tokens, clock()
            outputs = engine.step()
            seconds, tokens = clock() - start, engine.computed_tokens - computed
            step += 1
            record.steps += 1
            record.output_tokens += sum(out.token is not None for out in outputs)
            ended = sum(out.finish_reason is not None for out in outputs)
            finished += ended
            bar.update(ended)
            if tokens and finished >= warm_up:
                rows = sum(out.token is not None for out in outputs)
                kind: Kind = "decode" if tokens == rows else "mixed"
                record.seconds[kind, 1 << (tokens - 1).bit_length()].append(seconds)
                record.unused += _unused_blocks(engine, page_size)
    return record


def _add(engine: Engine, arrival: Arrival) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=arrival.output_tokens)
    engine.add(arrival.prompt, params)


def _unused_blocks(engine: Engine, page_size: int) -> list[int]:
    """Of each decoding row, the blocks it holds beyond those that its tokens take."""
    return [len(row.blocks) - -(-row.front // page_size) for row in engine.scheduler.running if row.missing_tokens == 1]

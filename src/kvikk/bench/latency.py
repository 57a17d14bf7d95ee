"""`kvikk bench latency`: how long one batch takes, from handing it over to its last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from kvikk.bench.datasets import at_least
from kvikk.bench.prompts import PromptWriter
from kvikk.engine import EngineConfig, SamplingParams
from kvikk.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, kw_only=True)
class LatencyConfig:
    """The batch, and how often it is run; without prefix caching unless it is asked for.

    Args:
        input_len: tokens of each prompt.
        output_len: tokens of each answer; the end of the text is ignored.
        batch_size: prompts at once.
        num_iters_warmup: runs before the measured ones.
        num_iters: measured runs.
        output_json: file to write the result to.
        disable_tqdm: show no progress bar.
    """

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    num_iters_warmup: int = 10
    num_iters: int = 30
    output_json: str | None = None
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        at_least("--input-len", self.input_len, 1)
        at_least("--output-len", self.output_len, 1)
        at_least("--batch-size", self.batch_size, 1)
        at_least("--num-iters-warmup", self.num_iters_warmup, 0)
        at_least("--num-iters", self.num_iters, 1)


@dataclass(frozen=True, kw_only=True)
class BenchLatencyConfig:
    """Everything `kvikk bench latency` can be told; the engine's seed is that of the prompts too."""

    latency: LatencyConfig = field(default_factory=LatencyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, kw_only=True)
class LatencyResult:
    """The measured runs.

    Args:
        seconds: of each.
        cached_tokens: of all prompts of a run, found in the prefix cache, at the most.
        repeated: share of the answers that were token by token those of the first run.
    """

    seconds: list[float]
    cached_tokens: int
    repeated: float

    @property
    def percentiles(self) -> dict[int, float]:
        """Seconds by rank."""
        return {rank: float(np.percentile(self.seconds, rank)) for rank in PERCENTILES}

    def lines(self) -> Iterator[str]:
        """The report: the lines of `vllm bench latency`, and then our own."""
        yield f"Avg latency: {np.mean(self.seconds):.6f} seconds"
        for rank, seconds in self.percentiles.items():
            yield f"{rank}% percentile latency: {seconds:.6f} seconds"
        yield f"Answers equal to those of the first run: {self.repeated:.1%}"
        yield f"Cached prompt tokens of a run: {self.cached_tokens}"

    def as_json(self, model: str) -> dict[str, Any]:
        """The result file, by vLLM's names."""
        return {
            "model_id": model,
            "avg_latency": float(np.mean(self.seconds)),
            "latencies": self.seconds,
            "percentiles": self.percentiles,
            "token_match_with_first_run": self.repeated,
            "cached_prompt_tokens": self.cached_tokens,
        }


def bench_latency(
    llm: LLM, config: LatencyConfig, *, seed: int = 0, clock: Callable[[], float] = time.perf_counter
) -> LatencyResult:
    """Run one batch of random prompts again and again, greedily.

    Raises:
        InvalidRequest: prompt and answer do not fit the engine.
    """
    prompts = PromptWriter(llm.get_tokenizer(), seed).token_ids(config.batch_size, config.input_len)
    params = SamplingParams(temperature=0.0, max_tokens=config.output_len, ignore_eos=True)

    def run() -> tuple[float, list[list[int]], int]:
        start = clock()
        outputs = llm.generate(prompts, params)
        seconds = clock() - start
        return seconds, [output.outputs[0].token_ids for output in outputs], sum(o.num_cached_tokens for o in outputs)

    for _ in tqdm(range(config.num_iters_warmup), desc="warm-up", disable=config.disable_tqdm):
        run()
    runs = [run() for _ in tqdm(range(config.num_iters), desc="runs", disable=config.disable_tqdm)]
    return LatencyResult(
        seconds=[seconds for seconds, _, _ in runs],
        cached_tokens=max(cached for _, _, cached in runs),
        repeated=_share_equal([tokens for _, tokens, _ in runs]),
    )


def _share_equal(runs: Sequence[list[list[int]]]) -> float:
    first = runs[0]
    equal = [mine == theirs for tokens in runs for mine, theirs in zip(tokens, first, strict=True)]
    return sum(equal) / len(equal)

"""`kvikk bench reclaim`: what eviction gives back of a fixed KV memory, and how many more requests that serves.

Every mix of requests is served three ways in one run, all requests queued at once: with the whole cache, and for each
policy and budget with tokens dropped. Beside what is held, the pages that a *naive* eviction of the same tokens would
hold are counted: those of each KV head with a token that is kept, as an engine has that drops tokens and moves none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from tqdm import tqdm

from kvikk.bench.datasets import at_least, names_in
from kvikk.bench.device import header, synchronize
from kvikk.bench.random_engine import dtype_of, random_engine, shape_name
from kvikk.compress import Budget, KVCacheParams
from kvikk.compress.flags import KVCacheConfig
from kvikk.engine import Engine, EngineConfig, SamplingParams
from kvikk.engine.kv import Choice, Compressor
from kvikk.engine.request import Row
from kvikk.errors import ConfigError, InvalidRequest
from kvikk.memory import Held
from kvikk.types import Position

ResultRow = dict[str, Any]
CHAT_MEDIANS: Final = (220, 180)
"""Tokens of a prompt and of an answer in ShareGPT's first turns, of which half are shorter."""
CHAT_SPREAD: Final = 1.0
"""Of their logarithms: the longest tenth has 3.6 times the median and more."""
MIXES: Final = ("chat", "documents")


@dataclass(frozen=True, kw_only=True)
class ReclaimConfig:
    """What is served; `--model` names a shape here: llama-3.1-8b, qwen3-32b or smollm2, with random weights.

    Args:
        requests: of each mix.
        mixes: chat (lengths as in ShareGPT), documents (long prompts, short answers), or both, separated by commas.
        policies: names of policies, separated by commas; `kvikk policies` lists them.
        budgets: what each keeps, separated by commas.
        allocator: of these budgets.
        trigger: of these policies.
        longest: tokens of the longest prompt; documents have a quarter of it at the least.
        output_len: tokens of the longest answer.
        json: file to write the result to.
        disable_tqdm: show no progress bar.
    """

    requests: int = 64
    mixes: str = "chat,documents"
    policies: str = "random,streaming,snapkv"
    budgets: str = "70%,50%,30%"
    allocator: str = "uniform"
    trigger: str = "prefill"
    longest: int = 4096
    output_len: int = 256
    json: str | None = None
    disable_tqdm: bool = False

    def __post_init__(self) -> None:
        for flag, value in (
            ("--requests", self.requests),
            ("--longest", self.longest),
            ("--output-len", self.output_len),
        ):
            at_least(flag, value, 1)
        names_in(self.mixes, "--mixes", MIXES)
        self.methods()

    def methods(self) -> list[dict[str, Any]]:
        """Every policy with every budget, as a request asks for it.

        Raises:
            ConfigError: one that cannot be.
        """
        every = [
            {"policy": policy, "budget": budget, "allocator": self.allocator, "trigger": self.trigger}
            for policy in names_in(self.policies, "--policies")
            for budget in names_in(self.budgets, "--budgets")
        ]
        for method in every:
            try:
                KVCacheParams.from_dict(method)
            except InvalidRequest as error:
                raise ConfigError(f"--policies, --budgets, --allocator or --trigger: {error}") from None
        return every


@dataclass(frozen=True, kw_only=True)
class BenchReclaimConfig:
    """Everything `kvikk bench reclaim` can be told; the engine's seed is that of the requests too."""

    reclaim: ReclaimConfig = field(default_factory=ReclaimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, slots=True)
class Job:
    """A request of a mix."""

    prompt: list[int]
    output_tokens: int


class PageCounter:
    """A compressor that counts the pages that would hold a token if nothing were moved.

    Args:
        compressor: does the work.
        page_size: slots of a page.
    """

    def __init__(self, compressor: Compressor, page_size: int) -> None:
        self._compressor = compressor
        self._page_size = page_size
        self.naive: dict[Row, int] = {}
        """Of each row at its last trigger, over all lanes."""

    def choose(self, row: Row, held: Held, kept_from: Position) -> Choice:
        """See `Compressor.choose`."""
        choice = self._compressor.choose(row, held, kept_from)
        pages = torch.where(choice.keep, held.positions // self._page_size, -1)
        marks = torch.zeros((len(pages), row.front // self._page_size + 2), dtype=torch.bool, device=pages.device)
        marks.scatter_(1, pages.long() + 1, torch.ones_like(choice.keep))
        self.naive[row] = int(marks[:, 1:].sum())
        return choice

    def check(self, params: KVCacheParams) -> None:
        """See `Compressor.check`."""
        self._compressor.check(params)

    def keeps_everything(self, row: Row) -> bool:
        """See `Compressor.keeps_everything`."""
        return self._compressor.keeps_everything(row)

    def next_trigger(self, row: Row) -> tuple[int | None, range]:
        """See `Compressor.next_trigger`."""
        return self._compressor.next_trigger(row)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What came of a mix, served one way.

    Args:
        seconds: from the first step to the last.
        output_tokens: in all.
        running: rows in each step in which a request was waiting.
        latencies_s: of each request, from the start.
        peak_blocks: held at one time, at the most.
        preemptions: of rows.
        pages: (full, naive, held) of all requests that were compacted, at their last triggers.
        evicted_share: of the tokens of these requests.
    """

    seconds: float
    output_tokens: int
    running: list[int]
    latencies_s: list[float]
    peak_blocks: int
    preemptions: int
    pages: tuple[int, int, int]
    evicted_share: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.seconds

    @property
    def concurrency(self) -> float:
        """Rows that ran side by side while others waited for room: the median over steps."""
        return float(np.median(self.running)) if self.running else float("nan")

    @property
    def p95_s(self) -> float:
        """Of the requests' latencies."""
        return float(np.percentile(self.latencies_s, 95))


def jobs(mix: str, config: ReclaimConfig, vocabulary: int, seed: int) -> list[Job]:
    """The requests of a mix: random tokens, since what a policy drops of them frees as much as of a text."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(config.requests):
        if mix == "chat":
            prompt, output = (int(median * np.exp(rng.normal() * CHAT_SPREAD)) for median in CHAT_MEDIANS)
        else:
            prompt = int(rng.integers(config.longest // 4, config.longest + 1))
            output = int(rng.integers(max(1, config.output_len // 4), config.output_len + 1))
        length, tokens = min(max(prompt, 16), config.longest), min(max(output, 4), config.output_len)
        made.append(Job(rng.integers(0, vocabulary, length).tolist(), tokens))
    return made


def serve(
    engine: Engine,
    mix: list[Job],
    kv_cache: dict[str, Any] | None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    show: str | None = None,
) -> Served:
    """Queue all requests and step until all have ended.

    Args:
        engine: without work, and without a cached prefix of the requests.
        mix: the requests.
        kv_cache: how they are compressed; None: not at all.
        clock: seconds.
        show: name of the progress bar; None: no bar.
    """
    assert engine.kv.compressor is not None
    counter = PageCounter(engine.kv.compressor, engine.kv.page_size)
    engine.kv.compressor, compressor = counter, engine.kv.compressor
    requests = [
        engine.add(
            job.prompt,
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=job.output_tokens, kv_cache=kv_cache),
        )
        for job in mix
    ]
    preemptions, running, latencies, peak, tokens = engine.scheduler.preemptions, [], [], 0, 0
    start = clock()
    with tqdm(total=len(requests), desc=show, disable=show is None) as bar:
        while engine.has_work:
            outputs = engine.step()
            if engine.scheduler.waiting:
                running.append(len(engine.scheduler.running))
            peak = max(peak, engine.pool.held)
            tokens += sum(out.token is not None for out in outputs)
            ended = sum(out.finish_reason is not None for out in outputs)
            latencies += [clock() - start] * ended
            bar.update(ended)
    engine.kv.compressor = compressor
    compacted = [request for request in requests if request.kv_usage is not None and request.kv_usage.compactions]
    usages = [request.kv_usage for request in compacted if request.kv_usage is not None]
    full = sum(-(-usage.tokens // engine.kv.page_size) for usage in usages) * engine.kv.store.lanes
    naive = sum(counter.naive[request.rows[0]] for request in compacted)
    held = full - sum(usage.frames_freed for usage in usages)
    logical = sum(usage.tokens for usage in usages)
    return Served(
        seconds=clock() - start,
        output_tokens=tokens,
        running=running,
        latencies_s=latencies,
        peak_blocks=peak,
        preemptions=engine.scheduler.preemptions - preemptions,
        pages=(full, naive, held),
        evicted_share=1 - sum(usage.kept_tokens for usage in usages) / logical if logical else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class ReclaimResult:
    """What was measured: a header, and a row for each mix, policy and budget."""

    header: dict[str, Any]
    rows: list[ResultRow]

    def lines(self) -> Iterator[str]:
        """The table."""
        yield (
            f"{'mix':<10}{'policy':<20}{'budget':>8}{'evicted':>9}{'pages held':>12}{'naive':>7}"
            f"{'rows at once':>14}{'tokens/s':>10}{'of full':>9}{'p95 of full':>13}"
        )
        for row in self.rows:
            yield (
                f"{row['mix']:<10}{row['policy']:<20}{row['budget']:>8}{row['share']:>9.1%}"
                f"{row['held_of_full']:>12.1%}{row['naive_of_full']:>7.0%}"
                f"{row['max_concurrency']:>14.0f}{row['tokens_per_s']:>10,.0f}{row['throughput_ratio']:>9.2f}"
                f"{row['p95_ratio']:>13.2f}"
            )


def bench_reclaim(config: BenchReclaimConfig, *, clock: Callable[[], float] = time.perf_counter) -> ReclaimResult:
    """Build an engine on random weights and serve every mix every way.

    Raises:
        ConfigError: no such shape, or a request that the engine cannot serve.
    """
    reclaim, device = config.reclaim, config.engine.model.torch_device()
    if config.engine.kv_cache != KVCacheConfig():
        raise ConfigError("kvikk bench reclaim sets the policies itself: use --policies and --budgets")
    name = shape_name(config.engine)
    engine, capacity = random_engine(config.engine)
    if reclaim.longest + reclaim.output_len > engine.limits.max_model_len:
        raise ConfigError(
            f"--longest {reclaim.longest} and --output-len {reclaim.output_len} do not fit the engine, which holds "
            f"{engine.limits.max_model_len:,} tokens a request: give less, or raise --kv-memory"
        )
    rows = []
    for mix in names_in(reclaim.mixes, "--mixes"):
        requests = jobs(mix, reclaim, engine.limits.vocabulary, config.engine.seed)
        serve(engine, requests[: max(1, len(requests) // 8)], None)  # meets what is compiled at first use
        baseline: Served | None = None
        for method in [None, *reclaim.methods()]:
            engine.prefix.reset()
            label = "full" if method is None else f"{method['policy']} {method['budget']}"
            synchronize(device)
            served = serve(
                engine, requests, method, clock=clock, show=None if reclaim.disable_tqdm else f"{mix}, {label}"
            )
            engine.check()
            baseline = baseline or served
            rows.append(_row(name, device.type, mix, method, served, baseline, capacity.blocks))
    head = header(device) | {
        "dtype": str(dtype_of(config.engine)).removeprefix("torch."), "requests": reclaim.requests,
        "longest": reclaim.longest, "output_len": reclaim.output_len, "kv_bytes": capacity.size_bytes,
        "block_size": config.engine.memory.block_size, "max_num_seqs": config.engine.scheduler.max_num_seqs,
    }  # fmt: skip
    return ReclaimResult(header=head, rows=rows)


def _row(
    model: str, device: str, mix: str, method: dict[str, Any] | None, served: Served, full: Served, blocks: int
) -> ResultRow:
    method = method or {"policy": "full", "budget": str(Budget(1, "share")), "allocator": "uniform", "trigger": "-"}
    whole, naive, held = served.pages
    return {
        "model": model, "device": device, "mix": mix, **method,
        "share": served.evicted_share, "pages_full": whole, "pages_naive": naive, "pages_held": held,
        "naive_of_full": naive / whole if whole else 1.0, "held_of_full": held / whole if whole else 1.0,
        "max_concurrency": served.concurrency, "full_concurrency": full.concurrency,
        "tokens_per_s": served.tokens_per_s, "throughput_ratio": served.tokens_per_s / full.tokens_per_s,
        "p95_s": served.p95_s, "p95_ratio": served.p95_s / full.p95_s,
        "peak_blocks": served.peak_blocks, "blocks": blocks, "preemptions": served.preemptions,
    }  # fmt: skip

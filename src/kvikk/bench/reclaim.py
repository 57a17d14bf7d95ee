"""`kvikk bench reclaim`: what eviction gives back of a fixed KV memory, and how many more requests that serves.

Every mix of requests is served in several ways in one run, all requests queued at once, in KV memory of the same bytes
that holds only some of them: with the whole cache, for each policy and budget with tokens dropped, and with the whole
cache in smaller numbers. Beside what is held, the pages that a *naive* eviction of the same tokens would hold are
counted: those of each KV head with a token that is kept, as an engine has that drops tokens and moves none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from kvikk.bench.datasets import at_least, names_in
from kvikk.bench.device import header, synchronize
from kvikk.bench.random_engine import load_random
from kvikk.bench.reclaim_mix import MIXES, Job, jobs, lengths_of, random_prompts, real_prompts
from kvikk.bench.reclaim_serving import Served, serve
from kvikk.compress import Budget, KVCacheParams
from kvikk.compress.flags import KVCacheConfig
from kvikk.engine import Capacity, EngineConfig, build_engine
from kvikk.engine.build import load
from kvikk.engine.compressor import watch_window
from kvikk.errors import ConfigError, InvalidRequest
from kvikk.llm.text import encode
from kvikk.memory import QUANTISED, check_device, format_bytes
from kvikk.memory.sizing import KVDtype
from kvikk.models import LoadedModel

ResultRow = dict[str, Any]
RANDOM: Final = "random"
"""In the place of a source of texts: random tokens, for a model of random weights."""
FULL: Final = {"policy": "full"}


@dataclass(frozen=True, kw_only=True)
class ReclaimConfig:
    """What is served. KV memory should hold a quarter of the requests or fewer, and 16 at the least.

    Args:
        requests: of each mix.
        texts: what stands in prompts: code (Python's library), prose (Python's manual) or a folder of text files, for
            the model that `--model` names; or random tokens, and `--model` is a shape with random weights:
            llama-3.1-8b, qwen3-32b or smollm2.
        mixes: chat (lengths as in ShareGPT), documents (long prompts, short answers), or both, separated by commas.
        policies: names of policies, separated by commas; `kvikk policies` lists them.
        budgets: what each keeps, separated by commas.
        allocator: of these budgets.
        trigger: of these policies.
        kv_dtypes: what K and V are stored as, separated by commas: the policies are served with the first of these, the
            whole cache with each, in as many bytes.
        longest: tokens of the longest prompt; documents have a quarter of it at the least.
        output_len: tokens of the longest answer.
        json: file to write the result to.
        disable_tqdm: show no progress bar.
    """

    requests: int = 64
    texts: str = RANDOM
    mixes: str = "chat,documents"
    policies: str = "random,streaming,snapkv"
    budgets: str = "70%,50%,30%"
    allocator: str = "uniform"
    trigger: str = "prefill"
    kv_dtypes: str = "auto"
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
        self.formats  # noqa: B018 - refuses a name that is none

    @property
    def formats(self) -> list[KVDtype]:
        """What K and V are stored as, one engine each."""
        known: dict[str, KVDtype] = {"auto": "auto", **{name: name for name in QUANTISED}}
        return [known[name] for name in names_in(self.kv_dtypes, "--kv-dtypes", list(known))]

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


@dataclass(frozen=True, kw_only=True)
class ReclaimResult:
    """What was measured: a header, and a row for each mix, policy and budget."""

    header: dict[str, Any]
    rows: list[ResultRow]

    def lines(self) -> Iterator[str]:
        """The table."""
        yield (
            f"{'mix':<10}{'policy':<20}{'budget':>8}{'KV':>6}{'evicted':>9}{'pages held':>12}{'naive':>7}"
            f"{'rows at once':>14}{'tokens/s':>10}{'of full':>9}{'p95 of full':>13}{'peak blocks':>13}{'of one':>8}"
        )
        for row in self.rows:
            yield (
                f"{row['mix']:<10}{row['policy']:<20}{row['budget']:>8}{row['kv_dtype']:>6}{row['share']:>9.1%}"
                f"{row['held_of_full']:>12.1%}{row['naive_of_full']:>7.0%}"
                f"{row['max_concurrency']:>14.0f}{row['tokens_per_s']:>10,.0f}{row['throughput_ratio']:>9.2f}"
                f"{row['p95_ratio']:>13.2f}{row['peak_blocks']:>13,}{row['request_peak_blocks']:>8,}"
            )


def bench_reclaim(config: BenchReclaimConfig, *, clock: Callable[[], float] = time.perf_counter) -> ReclaimResult:
    """Load the model, and serve every mix every way.

    Raises:
        ConfigError: no such model, or requests that the engine cannot serve, or has room for all at once.
        ModelError: the model cannot be loaded.
    """
    reclaim, engine, device = config.reclaim, config.engine, config.engine.model.torch_device()
    if engine.kv_cache != KVCacheConfig():
        raise ConfigError("kvikk bench reclaim sets the policies itself: use --policies and --budgets")
    if engine.memory.kv_dtype != "auto":
        raise ConfigError(f"--kv-dtype {engine.memory.kv_dtype}: kvikk bench reclaim takes --kv-dtypes, with commas")
    if engine.scheduler.max_num_seqs < reclaim.requests:
        raise ConfigError(
            f"--max-num-seqs {engine.scheduler.max_num_seqs} is below --requests {reclaim.requests}: seats, and not "
            "memory, could bound how many run; raise it"
        )
    for kv_dtype in reclaim.formats:
        check_device(replace(engine.memory, kv_dtype=kv_dtype), device)
    loaded = load_random(engine) if reclaim.texts == RANDOM else load(engine)
    mixes = {mix: _jobs(mix, config, loaded) for mix in names_in(reclaim.mixes, "--mixes")}
    run = _Run(config, loaded, mixes, device, clock)
    for kv_dtype in reclaim.formats:
        run.serve_all(kv_dtype)
    assert run.capacity is not None
    head = header(device) | {
        "dtype": str(loaded.model.spec.dtype).removeprefix("torch."), "requests": reclaim.requests,
        "longest": reclaim.longest, "output_len": reclaim.output_len, "kv_bytes": run.capacity.size_bytes,
        "block_size": engine.memory.block_size, "max_num_seqs": engine.scheduler.max_num_seqs,
    }  # fmt: skip
    return ReclaimResult(header=head, rows=sorted(run.rows, key=lambda row: list(mixes).index(row["mix"])))


def _jobs(mix: str, config: BenchReclaimConfig, loaded: LoadedModel) -> list[Job]:
    """The requests of a mix, of random tokens or of real text."""
    reclaim, seed = config.reclaim, config.engine.seed
    lengths = lengths_of(mix, reclaim.requests, longest=reclaim.longest, output_len=reclaim.output_len, seed=seed)
    if reclaim.texts == RANDOM:
        return jobs(lengths, random_prompts(loaded.model.spec.vocabulary, seed))
    return jobs(
        lengths, real_prompts(reclaim.texts, lambda text: encode(loaded.tokenizer, text, add_special_tokens=False))
    )


class _Run:
    """All ways of serving some mixes, one engine after the other.

    Args:
        config: what is served.
        loaded: the model, of all engines.
        mixes: the requests, by name.
        device: of the model.
        clock: seconds.
    """

    def __init__(
        self,
        config: BenchReclaimConfig,
        loaded: LoadedModel,
        mixes: dict[str, list[Job]],
        device: torch.device,
        clock: Callable[[], float],
    ) -> None:
        self.rows: list[ResultRow] = []
        self.capacity: Capacity | None = None
        """Of the first engine; the others have as many bytes."""
        self._config = config
        self._loaded = loaded
        self._mixes = mixes
        self._device = device
        self._clock = clock
        self._baselines: dict[str, Served] = {}

    def serve_all(self, kv_dtype: KVDtype) -> None:
        """Serve every mix from an engine with this format: the first one with all policies, the others with none."""
        reclaim = self._config.reclaim
        methods = reclaim.methods() if self.capacity is None else []
        engine, capacity = build_engine(self._loaded, self._engine_config(kv_dtype, methods))
        if self.capacity is None:
            self.capacity = capacity
            self._check_sizes(capacity)
        for mix, requests in self._mixes.items():
            for method in [FULL, *methods]:
                label = " ".join((mix, *method.values(), kv_dtype))
                serve(engine, requests[: max(1, len(requests) // 8)], method)  # meets what is compiled at first use
                engine.prefix.reset()
                synchronize(self._device)
                served = serve(
                    engine, requests, method, clock=self._clock, show=None if reclaim.disable_tqdm else label
                )
                engine.check()
                engine.prefix.reset()
                self._note(mix, method, kv_dtype, served, capacity)
        del engine
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # so that the next one finds the memory free

    def _engine_config(self, kv_dtype: KVDtype, methods: list[dict[str, Any]]) -> EngineConfig:
        """As given, in this format, in as many bytes as the first engine, and captured for what will be asked for."""
        config = self._config.engine
        memory = replace(config.memory, kv_dtype=kv_dtype)
        if self.capacity is not None:
            blocks = self.capacity.blocks + 1  # the null block is paid for
            size = blocks * self.capacity.geometry.block_bytes
            memory = replace(memory, kv_memory=str(size), gpu_memory_utilization=None)
        config = replace(config, memory=memory)
        if not methods:
            return config
        most = max(methods, key=lambda method: watch_window(KVCacheParams.from_dict(method)))
        return replace(config, kv_cache=KVCacheConfig(**{f"kv_{name}": value for name, value in most.items()}))

    def _check_sizes(self, capacity: Capacity) -> None:
        """Refuse what cannot be served, and what would measure nothing.

        Raises:
            ConfigError: a request is too long, or all of a mix fit in memory at once.
        """
        reclaim, geometry = self._config.reclaim, capacity.geometry
        if reclaim.longest + reclaim.output_len > capacity.max_model_len:
            raise ConfigError(
                f"--longest {reclaim.longest} and --output-len {reclaim.output_len} do not fit the engine, which holds "
                f"{capacity.max_model_len:,} tokens a request: give less, or raise --kv-memory or --max-model-len"
            )
        for mix, requests in self._mixes.items():
            blocks = sum(job.blocks(geometry.page_size) for job in requests)
            if blocks <= capacity.blocks:
                least = geometry.blocks_for(reclaim.longest + reclaim.output_len)
                some = format_bytes((max(blocks // 4, least) + 1) * geometry.block_bytes)
                raise ConfigError(
                    f"the KV memory of {format_bytes(capacity.size_bytes)} holds all {len(requests)} requests of "
                    f"{mix} at once, so that dropping tokens lets no more of them in: --kv-memory "
                    f"{some.replace(' ', '')} holds a quarter of them, or raise --requests"
                )

    def _note(self, mix: str, method: dict[str, Any], kv_dtype: str, served: Served, capacity: Capacity) -> None:
        full = self._baselines.setdefault(mix, served)
        if method is FULL:
            method = {"policy": "full", "budget": str(Budget(1, "share")), "allocator": "uniform", "trigger": "-"}
        whole, naive, held = served.pages
        self.rows.append(
            {
                "model": self._loaded.model.spec.name, "device": self._device.type, "mix": mix,
                "text": self._config.reclaim.texts, **method, "kv_dtype": kv_dtype,
                "share": served.evicted_share, "pages_full": whole, "pages_naive": naive, "pages_held": held,
                "naive_of_full": naive / whole if whole else 1.0, "held_of_full": held / whole if whole else 1.0,
                "max_concurrency": served.concurrency, "full_concurrency": full.concurrency,
                "concurrency_ratio": served.concurrency / full.concurrency, "waiting_share": served.waiting_share,
                "tokens_per_s": served.tokens_per_s, "throughput_ratio": served.tokens_per_s / full.tokens_per_s,
                "p95_s": served.p95_s, "p95_ratio": served.p95_s / full.p95_s,
                "peak_blocks": served.peak_blocks, "request_peak_blocks": served.request_peak_blocks,
                "blocks": capacity.blocks, "preemptions": served.preemptions,
            }
        )  # fmt: skip

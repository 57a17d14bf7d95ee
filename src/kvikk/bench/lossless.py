"""`kvikk bench lossless`: what drafting on a small cache gains, how much is accepted, and whether the text is the same.

Each set of prompts is decoded in one engine with the whole cache alone, and then losslessly with every policy and
budget. Where all rows fit, prompts are computed beforehand and found in the prefix cache, so what is timed is decoding,
from where all rows decode to where the first one ends. Where they are more than the memory holds they queue, and all is
timed, from the first prompt to the last token. Either side runs twice, and the second time counts: the first one meets
what is compiled or captured at first use.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from kvikk.attention import AttentionBackend
from kvikk.bench.datasets import at_least, names_in
from kvikk.bench.device import header
from kvikk.bench.lossless_model import best_tokens_per_s
from kvikk.bench.lossless_result import (
    NGRAM,
    NOT_COMPARED,
    LosslessResult,
    ResultRow,
    count_identical,
    figures,
    gaps_of_partings,
    identity,
)
from kvikk.bench.lossless_run import Run, run
from kvikk.bench.match import token_ids
from kvikk.bench.random_engine import load_random
from kvikk.bench.replay import Lot, replaying
from kvikk.bench.step import checked_step, parse_points
from kvikk.bench.texts import pieces
from kvikk.compress import KVCacheParams
from kvikk.compress.flags import KVCacheConfig
from kvikk.engine import Capacity, Engine, EngineConfig, SamplingParams, build_engine, load_engine
from kvikk.engine.build import MakeRunner, fastest_runner
from kvikk.engine.step import Runner
from kvikk.errors import ConfigError, InvalidRequest
from kvikk.memory import KVStore
from kvikk.models import CausalLM, LoadedModel


@dataclass(frozen=True, kw_only=True)
class LosslessConfig:
    """What is decoded.

    Args:
        at: rows x tokens of a prompt, separated by commas.
        texts: where prompts are cut from: code, prose, chat, json, or a folder of text files; several, separated by
            commas, take turns.
        policies: names of policies, separated by commas; `ngram` looks drafts up instead.
        budgets: what each policy keeps, separated by commas.
        output_len: tokens of an answer.
        draft_length: tokens to draft in a round; as many as pay when not given.
        whole_run: let rows queue that the memory does not hold, and time all, prompts too. So it is with
            --kv-host-memory in any case.
        replay: probabilities that a drafted token is right, separated by commas: a simulation. --model names a shape
            then, with random weights and prompts, and how many drafts agree is drawn; speed alone is measured.
        controls: also compare the plain texts with those of the whole cache in two halves of the rows, and with those
            that each policy gives alone: whether the comparison could have told a difference.
        json: file to write the result to.
    """

    at: str = "64x7680"
    texts: str = "code"
    policies: str = "snapkv"
    budgets: str = "25%"
    output_len: int = 256
    draft_length: int | None = None
    whole_run: bool = False
    replay: str | None = None
    controls: bool = False
    json: str | None = None

    def __post_init__(self) -> None:
        at_least("--output-len", self.output_len, 2)
        _, _, methods = self.points, self.acceptances, self.methods()
        if self.replay is not None and any("drafter" in method for method in methods):
            raise ConfigError("--replay has random prompts, in which nothing can be looked up: leave ngram out")
        if self.replay is not None and self.controls:
            raise ConfigError("--replay compares no texts: leave --controls out")

    @property
    def points(self) -> list[tuple[int, int]]:
        """`at`, as (rows, tokens)."""
        return parse_points(self.at)

    @property
    def acceptances(self) -> list[float | None]:
        """`replay`, one by one; one None where nothing is drawn.

        Raises:
            ConfigError: one that is no probability.
        """
        if self.replay is None:
            return [None]
        try:
            found = [float(text) for text in self.replay.split(",")]
        except ValueError:
            found = []
        if not found or not all(0 <= each <= 1 for each in found):
            raise ConfigError(f"--replay {self.replay!r} must be probabilities from 0 to 1, separated by commas")
        return [*found]

    def methods(self) -> list[dict[str, Any]]:
        """Every policy with every budget, as a request asks for it.

        Raises:
            ConfigError: one that cannot be.
        """
        every: list[dict[str, Any]] = []
        for policy in names_in(self.policies, "--policies"):
            if policy == NGRAM:
                every.append({"drafter": NGRAM})
            else:
                every += [{"policy": policy, "budget": budget} for budget in names_in(self.budgets, "--budgets")]
        for method in every:
            method |= {"lossless": True, "draft_tokens": self.draft_length}
            try:
                KVCacheParams.from_dict(method)
            except InvalidRequest as error:
                raise ConfigError(f"--policies, --budgets or --draft-length: {error}") from None
        return every


@dataclass(frozen=True, kw_only=True)
class BenchLosslessConfig:
    """Everything `kvikk bench lossless` can be told."""

    lossless: LosslessConfig = field(default_factory=LosslessConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    @property
    def is_whole_run(self) -> bool:
        """Whether rows queue, and all is timed."""
        return self.lossless.whole_run or self.engine.memory.kv_host_memory is not None


def bench_lossless(config: BenchLosslessConfig) -> LosslessResult:
    """Load the model and measure every set of prompts with every way to draft.

    Raises:
        ConfigError: an option that cannot be honoured, or prompts that do not fit.
        ModelError: the model cannot be loaded.
        NotMeasured: a request failed, or the rows did not all decode at one time although they are to.
    """
    lossless, device = config.lossless, config.engine.model.torch_device()
    if config.engine.kv_cache != KVCacheConfig():
        raise ConfigError("kvikk bench lossless sets the policies itself: use --policies and --budgets")
    lot = Lot(config.engine.seed)
    loaded, engine, capacity = _engine(config, lot)
    rows: list[ResultRow] = []
    for count, context in lossless.points:
        if context + lossless.output_len > engine.limits.max_model_len:
            raise ConfigError(
                f"--at {count}x{context} with --output-len {lossless.output_len} does not fit sequences of "
                f"{engine.limits.max_model_len:,} tokens: give shorter ones"
            )
        prompts = _prompts(config, loaded, count, context)
        if not config.is_whole_run:
            _compute(engine, prompts)
        plain = _measured(engine, prompts, config, None)
        halved = _control_in_halves(engine, prompts, plain, config) if lossless.controls else {}
        for method in lossless.methods():
            for acceptance in lossless.acceptances:
                lot.acceptance = acceptance or 0.0
                engine.scheduler.rounds.forget()  # what is learnt is of this method alone
                drafted = _measured(engine, prompts, config, method)
                best = best_tokens_per_s(
                    drafted, engine, blocks=context // engine.kv.page_size, looks_up="drafter" in method
                )
                rows.append(
                    _where(config, engine, capacity, loaded, drafted)
                    | {"rows": count, "context": context, "replayed": acceptance}
                    | figures(method, plain, drafted)
                    | {"predicted": None if best is None else best / plain.decode_tokens_per_s}
                    | (identity(engine, prompts, plain, drafted) if acceptance is None else NOT_COMPARED)
                    | halved
                    | (_control_of_policy(engine, prompts, plain, config, method) if lossless.controls else {})
                )
    head = header(device) | {
        "texts": "random tokens" if lossless.replay else lossless.texts, "output_len": lossless.output_len,
        "numerics": config.engine.numerics, "kv_dtype": config.engine.memory.kv_dtype,
        "draft_length": lossless.draft_length, "whole_run": config.is_whole_run,
        "simulation": lossless.replay is not None,
    }  # fmt: skip
    return LosslessResult(header=head, rows=rows)


def _engine(config: BenchLosslessConfig, lot: Lot) -> tuple[LoadedModel, Engine, Capacity]:
    make_runner = _like_a_lossless_server(config.lossless)
    if config.lossless.replay is None:
        return load_engine(config.engine, make_runner)
    loaded = load_random(config.engine)
    return loaded, *build_engine(loaded, config.engine, replaying(lot, make_runner))


def _like_a_lossless_server(lossless: LosslessConfig) -> MakeRunner:
    """Makes the runner of a server with --lossless and the first policy.

    On a GPU it has captured what drafting takes before the first request comes.
    """
    policies = [policy for policy in names_in(lossless.policies, "--policies") if policy != NGRAM]
    asked = KVCacheConfig(lossless=True)
    if policies:
        budget = names_in(lossless.budgets, "--budgets")[0]
        asked = KVCacheConfig(kv_policy=policies[0], kv_budget=budget, lossless=True)

    def make(
        model: CausalLM, store: KVStore, backend: AttentionBackend, config: EngineConfig, capacity: Capacity
    ) -> Runner:
        return fastest_runner(model, store, backend, replace(config, kv_cache=asked), capacity)

    return make


def _prompts(config: BenchLosslessConfig, loaded: LoadedModel, count: int, context: int) -> list[array[int]]:
    if config.lossless.replay is None:
        prompts = pieces(config.lossless.texts, [context] * count, partial(token_ids, loaded.tokenizer))
    else:
        rng = np.random.default_rng(config.engine.seed)
        prompts = rng.integers(0, loaded.model.spec.vocabulary, (count, context)).tolist()
    return [array("i", prompt) for prompt in prompts]


def _compute(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Have the prefix cache know the prompts."""
    for prompt in prompts:
        engine.add(prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1))
    while engine.has_work:
        checked_step(engine)


def _measured(
    engine: Engine, prompts: Sequence[Sequence[int]], config: BenchLosslessConfig, method: dict[str, Any] | None
) -> Run:
    """The second of two runs. Where they are counted whole both begin with nothing cached."""
    device = config.engine.model.torch_device()
    for _ in range(2):
        if config.is_whole_run:
            engine.prefix.reset()
        measured = run(engine, prompts, config.lossless.output_len, method, device=device, is_whole=config.is_whole_run)
    engine.check()
    return measured


def _texts(
    engine: Engine, prompts: list[array[int]], config: BenchLosslessConfig, method: dict[str, Any] | None
) -> list[list[int]]:
    device = config.engine.model.torch_device()
    return run(engine, prompts, config.lossless.output_len, method, device=device, is_whole=True).texts


def _control_in_halves(engine: Engine, prompts: list[array[int]], plain: Run, config: BenchLosslessConfig) -> ResultRow:
    """How many texts are the same where the whole cache decodes them in two smaller batches."""
    half = len(prompts) // 2
    parts = [part for part in (prompts[:half], prompts[half:]) if part]
    texts = [text for part in parts for text in _texts(engine, part, config, None)]
    gaps = gaps_of_partings(engine, prompts, plain.texts, texts)
    return {"halved_identical": count_identical(plain.texts, texts), "halved_largest_gap_nats": max(gaps, default=None)}


def _control_of_policy(
    engine: Engine, prompts: list[array[int]], plain: Run, config: BenchLosslessConfig, method: dict[str, Any]
) -> ResultRow:
    """How many texts are the same where the policy drops tokens for good; null where drafts are looked up."""
    if "policy" not in method:
        return {"lossy_identical": None}
    lossy = {name: method[name] for name in ("policy", "budget")}
    return {"lossy_identical": count_identical(plain.texts, _texts(engine, prompts, config, lossy))}


def _where(
    config: BenchLosslessConfig, engine: Engine, capacity: Capacity, loaded: LoadedModel, drafted: Run
) -> ResultRow:
    rests = engine.kv.rests
    return {
        "model": config.engine.model.model or loaded.model.spec.name,
        "device": config.engine.model.torch_device().type, "kv_memory_bytes": capacity.size_bytes,
        "kv_host_memory_bytes": 0 if rests is None else rests.total_bytes,
        "kv_host_use": None if rests is None else config.engine.memory.kv_host_use,
        "full_kv_in": "host" if drafted.partings else "device",
    }  # fmt: skip

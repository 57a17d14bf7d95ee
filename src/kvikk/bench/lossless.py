"""`kvikk bench lossless`: what drafting on a small cache gains, how much is accepted, and whether the text is the same.

Each set of prompts is decoded in one engine with the whole cache alone, and then losslessly with every policy and
budget. Prompts are computed beforehand and found in the prefix cache, so what is timed is decoding, from where all rows
decode to where the first one ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from kvikk.bench.datasets import at_least, names_in
from kvikk.bench.device import header, synchronize
from kvikk.bench.match import token_ids
from kvikk.bench.step import NotMeasured, checked_step, parse_points
from kvikk.bench.texts import pieces
from kvikk.compress import KVCacheParams
from kvikk.compress.flags import KVCacheConfig
from kvikk.engine import Engine, EngineConfig, KVCacheUsage, SamplingParams, load_engine
from kvikk.errors import ConfigError, InvalidRequest

ResultRow = dict[str, Any]
NEAR_TIE_NATS: Final = 0.5
"""Two tokens whose log-probabilities are nearer than this can change places by rounding alone, in bf16."""
NGRAM: Final = "ngram"
"""Among the policies: drafts that are looked up."""


@dataclass(frozen=True, kw_only=True)
class LosslessConfig:
    """What is decoded.

    Args:
        at: rows x tokens of a prompt, separated by commas.
        texts: where prompts are cut from: code, prose, or a folder of text files.
        policies: names of policies, separated by commas; `ngram` looks drafts up instead.
        budgets: what each policy keeps, separated by commas.
        output_len: tokens of an answer.
        draft_length: tokens to draft in a round; as many as pay when not given.
        json: file to write the result to.
    """

    at: str = "64x7680"
    texts: str = "code"
    policies: str = "snapkv"
    budgets: str = "25%"
    output_len: int = 256
    draft_length: int | None = None
    json: str | None = None

    def __post_init__(self) -> None:
        at_least("--output-len", self.output_len, 2)
        _ = self.points, self.methods()

    @property
    def points(self) -> list[tuple[int, int]]:
        """`at`, as (rows, tokens)."""
        return parse_points(self.at)

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


@dataclass(frozen=True, kw_only=True)
class LosslessResult:
    """What was measured: a header, and a row for each set of prompts and each way to draft."""

    header: dict[str, Any]
    rows: list[ResultRow]

    def lines(self) -> Iterator[str]:
        """The table."""
        yield (
            f"{'rows':>5}{'context':>9}  {'drafts by':<28}{'tokens/s':>10}{'of plain':>9}{'predicted':>10}"
            f"{'same text':>11}{'near-ties':>10}{'drafted':>9}{'accepted':>9}{'a round':>8}"
        )
        for row in self.rows:
            yield (
                f"{row['rows']:>5}{row['context']:>9}  {row['policy'] + ' ' + row['budget']:<28}"
                f"{row['lossless_tokens_per_s']:>10,.0f}{row['speedup']:>9.2f}{row['predicted'] or float('nan'):>10.2f}"
                f"{row['identical']:>6}/{row['prompts']:<4}{row['near_ties']:>10}{row['drafted']:>9,}{row['accepted']:>9,}"
                f"{row['accepted_per_round']:>8.2f}"
            )


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """Texts, and how fast they were written.

    Args:
        texts: token ids of each request.
        tokens_per_s: of all together, while all decode.
        gaps_ms: between the moments in which a request gains tokens.
        usage: what came of compressing and drafting, by request.
    """

    texts: list[list[int]]
    tokens_per_s: float
    gaps_ms: list[float]
    usage: list[KVCacheUsage | None]


def decode(
    engine: Engine,
    prompts: list[list[int]],
    tokens: int,
    kv_cache: dict[str, Any] | None,
    *,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> Decoded:
    """Answer all prompts greedily, at once.

    Args:
        engine: without work; each prompt is in its prefix cache.
        prompts: token ids.
        tokens: of each answer.
        kv_cache: how they are compressed.
        device: of the engine.
        clock: seconds.

    Raises:
        NotMeasured: a request failed, or they did not all decode at one time.
    """
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, kv_cache=kv_cache)
    requests = [engine.add(prompt, params) for prompt in prompts]
    texts: dict[str, list[int]] = {request.id: [] for request in requests}
    last: dict[str, float] = {}
    gaps: list[float] = []
    begun: tuple[float, int] | None = None
    ended: tuple[float, int] | None = None
    written = 0
    while engine.has_work:
        outputs = checked_step(engine)
        now = clock()
        if ended is None and any(out.finish_reason is not None for out in outputs):
            ended = (now, written)
        for out in outputs:
            assert out.token is not None
            texts[out.request.id].append(out.token.token_id)
        written += len(outputs)
        for id_ in {out.request.id for out in outputs}:
            if begun is not None and ended is None:
                gaps.append((now - last[id_]) * 1e3)
            last[id_] = now
        if begun is None and all(len(text) > 1 for text in texts.values()):
            synchronize(device)
            begun = (clock(), written)
    if begun is None or ended is None or ended[0] <= begun[0]:
        raise NotMeasured(
            f"{len(prompts)} rows never decoded all at one time: give fewer, more --kv-memory, or a longer --output-len"
        )
    rate = (ended[1] - begun[1]) / (ended[0] - begun[0])
    return Decoded(
        texts=list(texts.values()), tokens_per_s=rate, gaps_ms=gaps, usage=[request.kv_usage for request in requests]
    )


def bench_lossless(config: BenchLosslessConfig) -> LosslessResult:
    """Load the model and measure every set of prompts with every way to draft.

    Raises:
        ConfigError: an option that cannot be honoured, or prompts that do not fit.
        ModelError: the model cannot be loaded.
        NotMeasured: the rows did not all decode at one time.
    """
    lossless, device = config.lossless, config.engine.model.torch_device()
    if config.engine.kv_cache != KVCacheConfig():
        raise ConfigError("kvikk bench lossless sets the policies itself: use --policies and --budgets")
    loaded, engine, capacity = load_engine(config.engine)
    rows: list[ResultRow] = []
    for count, context in lossless.points:
        if context + lossless.output_len > engine.limits.max_model_len:
            raise ConfigError(
                f"--at {count}x{context} with --output-len {lossless.output_len} does not fit sequences of "
                f"{engine.limits.max_model_len:,} tokens: give shorter ones"
            )
        prompts = list(pieces(lossless.texts, [context] * count, partial(token_ids, loaded.tokenizer)))
        for prompt in prompts:
            engine.add(prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1))
        while engine.has_work:
            checked_step(engine)
        # Twice each: the first time meets what is compiled or captured at first use.
        _, plain = (decode(engine, prompts, lossless.output_len, None, device=device) for _ in range(2))
        for method in lossless.methods():
            _, drafted = (decode(engine, prompts, lossless.output_len, method, device=device) for _ in range(2))
            engine.check()
            gaps = gaps_of_partings(engine, prompts, plain.texts, drafted.texts)
            rows.append(
                {
                    "model": config.engine.model.model or loaded.model.spec.name, "device": device.type, "rows": count,
                    "context": context, "kv_memory_bytes": capacity.size_bytes, "full_kv_in": "device",
                    **_row(method, plain, drafted),
                    "predicted": engine.scheduler.rounds.promised_gain,
                    "near_ties": sum(gap <= NEAR_TIE_NATS for gap in gaps), "largest_gap_nats": max(gaps, default=None),
                }
            )  # fmt: skip
    head = header(device) | {
        "texts": lossless.texts, "output_len": lossless.output_len, "numerics": config.engine.numerics,
        "kv_dtype": config.engine.memory.kv_dtype, "draft_length": lossless.draft_length,
    }  # fmt: skip
    return LosslessResult(header=head, rows=rows)


def gaps_of_partings(
    engine: Engine, prompts: list[list[int]], plain: list[list[int]], drafted: list[list[int]]
) -> list[float]:
    """Where a text parts from the plain one: by how much its likeliest token leads the next one there, in nats."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1, logprobs=2)
    for prompt, ours, theirs in zip(prompts, plain, drafted, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if at is not None:
            engine.add(prompt + ours[:at], params)
    gaps = []
    while engine.has_work:
        for out in checked_step(engine):
            assert out.token is not None
            assert out.token.logprobs is not None
            first, second = sorted((entry.logprob for entry in out.token.logprobs), reverse=True)[:2]
            gaps.append(first - second)
    return gaps


def _row(method: dict[str, Any], plain: Decoded, drafted: Decoded) -> ResultRow:
    usage = [each for each in drafted.usage if each is not None]
    rounds, accepted = sum(each.rounds for each in usage), sum(each.accepted for each in usage)
    return {
        "policy": method.get("policy", NGRAM), "budget": method.get("budget", "-"),
        "plain_tokens_per_s": plain.tokens_per_s, "lossless_tokens_per_s": drafted.tokens_per_s,
        "speedup": drafted.tokens_per_s / plain.tokens_per_s,
        "prompts": len(plain.texts),
        "identical": sum(a == b for a, b in zip(plain.texts, drafted.texts, strict=True)),
        "rounds": rounds, "drafted": sum(each.drafted for each in usage), "accepted": accepted,
        "accepted_per_round": accepted / rounds if rounds else 0.0,
        "plain_gap_p99_ms": _p99(plain.gaps_ms), "gap_p99_ms": _p99(drafted.gaps_ms),
    }  # fmt: skip


def _p99(values: list[float]) -> float | None:
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else None

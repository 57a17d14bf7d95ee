"""`kvikk bench serve`: a load on a server of OpenAI's API, and its figures."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
from tqdm import tqdm

from kvikk.bench import report, tokenizer
from kvikk.bench.answer import Answer, Usage
from kvikk.bench.client import ask
from kvikk.bench.datasets import DatasetConfig, Request, fingerprint, make_requests, warm_up_requests
from kvikk.bench.match import TextMatch
from kvikk.bench.metrics import Goodput, Summary, summarise
from kvikk.bench.monitor import ClientLoad, watched
from kvikk.bench.results import Reference, ReportConfig, details, figures, match_figures, plain_rate, write
from kvikk.bench.server_metrics import cache_hits
from kvikk.bench.target import RequestConfig, ServerUnreachable, Target, TargetConfig, request_headers, served_models
from kvikk.bench.traffic import TrafficConfig, due_times, run_load
from kvikk.heap import frozen_heap

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
SHOWN_ERRORS = 10


@dataclass(frozen=True, kw_only=True)
class BenchServeConfig:
    """Everything `kvikk bench serve` can be told besides `--goodput` and `--header`.

    Args:
        seed: of prompts and of the times at which they are sent.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    traffic: TrafficConfig = field(default_factory=TrafficConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    seed: int = 0

    @property
    def ignores_eos(self) -> bool:
        """Whether answers shall have the length asked for."""
        return self.dataset.is_made_up if self.request.ignore_eos is None else self.request.ignore_eos


@dataclass(frozen=True, kw_only=True)
class ServeResult:
    """A load that has been sent.

    Args:
        config: what it was.
        model: the name that requests carried.
        tokenizer: where the tokenizer is from.
        requests: in order.
        answers: one for each, tokens counted.
        summary: the figures.
        client: how busy this process was.
        counted_hits: prompt tokens found cached meanwhile, by the server's counters.
        match: with the texts of a former run.
    """

    config: BenchServeConfig
    model: str
    tokenizer: str
    requests: list[Request]
    answers: list[Answer]
    summary: Summary
    client: ClientLoad
    counted_hits: float | None = None
    match: TextMatch | None = None

    @property
    def other_lengths(self) -> int | None:
        """Answers that are not as long as asked for, where every one should be; None where they may end earlier."""
        if not self.config.ignores_eos:
            return None
        pairs = zip(self.requests, self.answers, strict=True)
        return sum(a.error is None and a.output_tokens != r.output_tokens for r, a in pairs)

    def lines(self) -> list[str]:
        """The report."""
        lines = list(report.load_lines(self.summary, self.config.traffic))
        for metric in self.config.report.metrics:
            lines += report.metric_lines(metric, self.summary.distributions[metric])
        lines += report.cache_lines(self.summary, self.counted_hits)
        lines += report.measurement_lines(self.summary, self.client, self.other_lengths)
        if self.match is not None:
            lines += report.match_lines(self.match)
        return [*lines, report.last_line()]

    def warnings(self) -> list[str]:
        """What went wrong, each with how often."""
        errors = Counter(answer.error for answer in self.answers if answer.error is not None)
        found = [f"{count} failed: {error}" for error, count in errors.most_common(SHOWN_ERRORS)]
        if len(errors) > SHOWN_ERRORS:
            found.append(f"and {len(errors) - SHOWN_ERRORS} other errors")
        itl = self.summary.distributions["itl"]
        slow = self.client.warning(None if itl is None else itl.median)
        return [*found, slow] if slow else found

    def as_json(self, now: datetime) -> dict[str, Any]:
        """The result file."""
        config = self.config
        result = {
            "date": now.strftime("%Y%m%d-%H%M%S"),
            "backend": config.target.backend,
            "model_id": self.model,
            "tokenizer_id": self.tokenizer,
            "dataset_name": config.dataset.dataset_name,
            "num_prompts": config.dataset.num_prompts,
            "seed": config.seed,
            "temperature": config.request.temperature,
            "ignore_eos": config.ignores_eos,
            "request_rate": plain_rate(config.traffic.request_rate),
            "burstiness": plain_rate(config.traffic.burstiness),
            "max_concurrency": config.traffic.max_concurrency,
            **figures(self.summary, config.report.metrics),
            "cached_input_tokens": self.summary.cached_tokens,
            "counted_cache_hits": self.counted_hits,
            "tokens_counted_by_client": self.summary.client_counted,
            "chunks": self.summary.chunks,
            "answers_of_other_length": self.other_lengths,
            "client_cpu_share": self.client.cpu_share,
            "client_lag_p99_ms": self.client.lag_p99_ms,
            **match_figures(self.match),
            "prompts_fingerprint": fingerprint(self.requests),
        }
        return result | (details(self.answers) if config.report.save_detailed else {})

    def save(self, now: datetime) -> Path:
        """Write the result file; returns where.

        Raises:
            ConfigError: it cannot be written.
        """
        config = self.config
        rate, model = plain_rate(config.traffic.request_rate), self.model.rstrip("/").rpartition("/")[2]
        name = f"{config.target.backend}-{rate}qps-{model}-{now:%Y%m%d-%H%M%S}.json"
        path = Path(config.report.result_dir or ".") / (config.report.result_filename or name)
        write(path, self.as_json(now))
        return path


def bench_serve(
    config: BenchServeConfig, *, goodput: Goodput | None = None, headers: Mapping[str, str] | None = None
) -> ServeResult:
    """Send the load and wait for its end.

    Args:
        config: what to send where.
        goodput: objectives, if there are any.
        headers: for each request, besides those that the key makes.

    Raises:
        ServerUnreachable: nobody answers at the address, or it is not known which model to ask for.
        ConfigError: the prompts cannot be made, or the reference is of other prompts.
        ModelError: no tokenizer can be read.
    """
    return asyncio.run(_bench_serve(config, goodput, headers or {}))


async def _bench_serve(config: BenchServeConfig, goodput: Goodput | None, headers: Mapping[str, str]) -> ServeResult:
    target = config.target
    sent_headers = request_headers(target.api_key or os.environ.get("OPENAI_API_KEY"), headers)
    reference = None if config.report.compare is None else Reference.read(Path(config.report.compare))
    async with _session(target) as session:
        listed = await served_models(session, target.root, sent_headers)
        model, tokenizer_name = _names(target, listed)
        words = tokenizer.read(tokenizer_name)
        requests = make_requests(config.dataset, words, config.seed)
        if reference is not None:
            reference.check(fingerprint(requests))
        goal = Target(
            url=target.root + target.path,
            is_chat=target.backend == "openai-chat",
            model=model,
            headers=sent_headers,
            fields=replace(config.request, ignore_eos=config.ignores_eos).fields() | target.extra_fields(),
            allow_missing_done=target.allow_missing_done,
        )
        warm_ups = warm_up_requests(config.dataset, requests, words, config.seed)
        await _warm_up(session, goal, warm_ups, config.traffic)
        hits_before = await cache_hits(session, target.root, sent_headers)
        async with watched(time.perf_counter, time.process_time) as client:
            start_s = time.perf_counter()
            answers = await _load(session, goal, requests, config.traffic, config.seed)
            duration_s = time.perf_counter() - start_s
        hits_after = await cache_hits(session, target.root, sent_headers)
    answers = [_counted(answer, request, words) for answer, request in zip(answers, requests, strict=True)]
    texts = [answer.text if answer.error is None else None for answer in answers]
    return ServeResult(
        config=config,
        model=model,
        tokenizer=tokenizer_name,
        requests=requests,
        answers=answers,
        summary=summarise(answers, duration_s, config.report.percentiles, goodput),
        client=client,
        counted_hits=None if hits_before is None or hits_after is None else hits_after - hits_before,
        match=None if reference is None else reference.match(texts, words),
    )


def _session(target: TargetConfig) -> aiohttp.ClientSession:
    """Connections without limit: `--max-concurrency` is the only one."""
    timeout = aiohttp.ClientTimeout(total=target.client_timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


def _names(target: TargetConfig, listed: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The model's name for requests, and where its tokenizer is from."""
    if target.model is None and not listed:
        raise ServerUnreachable(f"{target.root}/v1/models lists no model: name one with --model")
    model = target.served_model_name or target.model or str(listed[0]["id"])
    found = next((entry for entry in listed if entry["id"] == model), None)
    named = target.model if found is None or target.served_model_name else tokenizer.name_for(found)
    return model, target.tokenizer or named or model


async def _warm_up(
    session: aiohttp.ClientSession, target: Target, requests: Sequence[Request], traffic: TrafficConfig
) -> None:
    if not requests:
        return
    log.info("warming up with %d requests", len(requests))
    at_once = replace(traffic, request_rate=math.inf, disable_tqdm=True)
    for answer in await _load(session, target, requests, at_once, seed=0):
        if answer.error is not None:
            log.warning("a warm-up request failed: %s", answer.error)


async def _load(
    session: aiohttp.ClientSession, target: Target, requests: Sequence[Request], traffic: TrafficConfig, seed: int
) -> list[Answer]:
    with tqdm(total=len(requests), unit="request", disable=traffic.disable_tqdm) as bar, frozen_heap():

        async def one(index: int, due_s: float) -> Answer:
            answer = await ask(session, target, requests[index], due_s=due_s, clock=time.perf_counter)
            bar.update()
            return answer

        due_s = due_times(traffic, len(requests), seed)
        return await run_load(one, due_s, traffic.max_concurrency, time.perf_counter)


def _counted(answer: Answer, request: Request, words: Any) -> Answer:
    """The answer with its tokens counted, by the tokenizer where the server has not."""
    if answer.usage is not None:
        return answer
    tokens = len(words(answer.text, add_special_tokens=False, verbose=False).input_ids)
    return replace(answer, usage=Usage(input_tokens=request.prompt_tokens, output_tokens=tokens, is_servers=False))

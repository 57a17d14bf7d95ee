"""`kvikk bench throughput`: many requests handed over at once, and how long they take in all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvikk.bench.datasets import DatasetConfig, Request, fingerprint, make_requests, warm_up_requests
from kvikk.bench.match import TextMatch
from kvikk.bench.results import Reference, match_figures
from kvikk.engine import EngineConfig, SamplingParams
from kvikk.llm import LLM, RequestOutput


@dataclass(frozen=True, kw_only=True)
class ThroughputConfig:
    """What is shown and kept.

    Args:
        output_json: file to write the result to, texts included.
        compare: a former result of the same requests, whose texts are compared with.
        disable_tqdm: show no progress bar.
    """

    output_json: str | None = None
    compare: str | None = None
    disable_tqdm: bool = False


@dataclass(frozen=True, kw_only=True)
class BenchThroughputConfig:
    """Everything `kvikk bench throughput` can be told; the engine's seed is that of the prompts too."""

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, kw_only=True)
class ThroughputResult:
    """What was asked and answered.

    Args:
        seconds: from handing over the first prompt to the last token.
        requests: in order.
        outputs: one for each.
        match: with the texts of a former run.
    """

    seconds: float
    requests: list[Request]
    outputs: list[RequestOutput]
    match: TextMatch | None = None

    def tokens(self, kind: str) -> int:
        """All tokens of a kind that `RequestOutput.usage` counts."""
        return sum(output.usage[kind] for output in self.outputs)

    @property
    def errors(self) -> list[str]:
        """Why each request failed, empty for those that did not."""
        return [output.outputs[0].error or "" for output in self.outputs]

    def lines(self) -> Iterator[str]:
        """The report: the lines of `vllm bench throughput`, and then our own."""
        total, generated = self.tokens("total_tokens"), self.tokens("completion_tokens")
        requests, tokens, outputs = (count / self.seconds for count in (len(self.outputs), total, generated))
        yield f"Throughput: {requests:.2f} requests/s, {tokens:.2f} total tokens/s, {outputs:.2f} output tokens/s"
        yield f"Total num prompt tokens:  {self.tokens('prompt_tokens')}"
        yield f"Total num output tokens:  {generated}"
        yield f"Cached prompt tokens:     {self.tokens('cached_tokens')}"
        failed = sum(error != "" for error in self.errors)
        if failed:
            yield f"Failed requests:          {failed}"
        if self.match is not None:
            yield f"Identical texts:          {self.match.identical} of {self.match.compared}"
            share = self.match.token_match
            yield f"Token match:              {'-' if share is None else format(share, '.2%')}"

    def as_json(self) -> dict[str, Any]:
        """The result file, by vLLM's names, with the texts."""
        total = self.tokens("total_tokens")
        return {
            "elapsed_time": self.seconds,
            "num_requests": len(self.outputs),
            "total_num_tokens": total,
            "requests_per_second": len(self.outputs) / self.seconds,
            "tokens_per_second": total / self.seconds,
            "output_tokens_per_second": self.tokens("completion_tokens") / self.seconds,
            "cached_prompt_tokens": self.tokens("cached_tokens"),
            **match_figures(self.match),
            "prompts_fingerprint": fingerprint(self.requests),
            "generated_texts": [output.outputs[0].text for output in self.outputs],
            "errors": self.errors,
        }


def bench_throughput(
    llm: LLM,
    config: BenchThroughputConfig,
    *,
    reference: Reference | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ThroughputResult:
    """Hand over all requests of a dataset at once, greedy, each answer of the length asked for.

    Args:
        llm: the engine.
        config: what to ask.
        reference: texts to compare with.
        clock: monotonic seconds.

    Raises:
        InvalidRequest: a prompt and its answer do not fit the engine.
        ConfigError: the prompts cannot be made, or the reference is of other prompts.
    """
    tokenizer, seed = llm.get_tokenizer(), config.engine.seed
    requests = make_requests(config.dataset, tokenizer, seed)
    if reference is not None:
        reference.check(fingerprint(requests))
    warm_ups = warm_up_requests(config.dataset, requests, tokenizer, seed)
    if warm_ups:
        _generate(llm, warm_ups, show=False)
    start = clock()
    outputs = _generate(llm, requests, show=not config.throughput.disable_tqdm)
    seconds = clock() - start
    texts = [output.outputs[0].text if output.outputs[0].error is None else None for output in outputs]
    match = None if reference is None else reference.match(texts, tokenizer)
    return ThroughputResult(seconds=seconds, requests=requests, outputs=outputs, match=match)


def _generate(llm: LLM, requests: list[Request], *, show: bool) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True) for request in requests
    ]
    return llm.generate([request.prompt for request in requests], params, use_tqdm=show)

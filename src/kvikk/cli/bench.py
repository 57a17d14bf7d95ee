"""`kvikk bench`: speed. `latency`, `throughput` and `serve` have vLLM's names for flags and figures."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from kvikk.bench.attention import AttentionBenchConfig, bench_attention
from kvikk.bench.churn import BenchChurnConfig, bench_churn
from kvikk.bench.explain import explain
from kvikk.bench.latency import BenchLatencyConfig, bench_latency
from kvikk.bench.lossless import BenchLosslessConfig, bench_lossless
from kvikk.bench.metrics import Goodput
from kvikk.bench.reclaim import BenchReclaimConfig, bench_reclaim
from kvikk.bench.results import Reference, write, write_rows
from kvikk.bench.serve import BenchServeConfig, bench_serve
from kvikk.bench.step import BenchStepConfig, bench_step
from kvikk.bench.target import parse_headers
from kvikk.bench.throughput import BenchThroughputConfig, bench_throughput
from kvikk.cli.arguments import add_config_arguments, add_logging_argument, resolve
from kvikk.configuration import build, given, options_of
from kvikk.engine import EngineConfig
from kvikk.llm import LLM

log = logging.getLogger(__name__)

STEP_PROMPT_TOKENS = 8192
"""Tokens of a step while `bench step` computes its prompts, which are not measured."""

BENCHMARKS = {
    "latency": "how long one batch takes, in this process",
    "throughput": "how many requests and tokens a second, in this process",
    "serve": "a load on a server of OpenAI's API, this or any other",
    "attention": "decode attention alone on a GPU, beside FlashInfer",
    "step": "a whole decode step on random weights, beside reading weights and KV once",
    "churn": "short requests in bursts, and how even the steps stay",
    "lossless": "drafting on a small cache: what it gains, what is accepted, and whether the text is the same",
    "reclaim": "what dropping tokens gives back of a fixed KV memory, and how many more requests that serves",
}


class _Rows(Protocol):
    """A result of flat rows."""

    @property
    def header(self) -> dict[str, Any]: ...

    @property
    def rows(self) -> list[dict[str, Any]]: ...

    def lines(self) -> Iterator[str]: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be typed after the command."""
    subparsers = parser.add_subparsers(dest="benchmark", required=True, metavar="benchmark")
    parsers = {
        name: subparsers.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        for name, purpose in BENCHMARKS.items()
    }
    add_config_arguments(parsers["latency"], BenchLatencyConfig)
    add_config_arguments(parsers["throughput"], BenchThroughputConfig)
    add_config_arguments(parsers["attention"], AttentionBenchConfig)
    add_config_arguments(parsers["step"], BenchStepConfig)
    add_config_arguments(parsers["churn"], BenchChurnConfig)
    add_config_arguments(parsers["lossless"], BenchLosslessConfig)
    add_config_arguments(parsers["reclaim"], BenchReclaimConfig)
    serve = parsers["serve"]
    lists = serve.add_argument_group("lists", "flags that take several values")
    lists.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="what a good request keeps to: ttft, tpot, e2el"
    )
    lists.add_argument(
        "--header", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="headers of each request"
    )
    add_config_arguments(serve, BenchServeConfig)
    for each in parsers.values():
        add_logging_argument(each)


def run(parsed: argparse.Namespace) -> int:
    """Run the command."""
    runs = {
        "latency": _latency,
        "throughput": _throughput,
        "serve": _serve,
        "attention": _attention,
        "step": _step,
        "churn": _churn,
        "lossless": _lossless,
        "reclaim": _reclaim,
    }
    return runs[parsed.benchmark](parsed)


def _serve(parsed: argparse.Namespace) -> int:
    config = build(BenchServeConfig, given(resolve(parsed, BenchServeConfig)))
    goodput = Goodput.parse(parsed.goodput) if parsed.goodput else None
    result = bench_serve(config, goodput=goodput, headers=parse_headers(parsed.header))
    _show(result.lines())
    for warning in result.warnings():
        log.warning("%s", warning)
    if config.report.save_result:
        log.info("wrote %s", result.save(datetime.now()))
    return int(result.summary.completed == 0)


def _latency(parsed: argparse.Namespace) -> int:
    options = given(resolve(parsed, BenchLatencyConfig))
    options.setdefault("enable_prefix_caching", False)  # it would leave nothing to compute after the first run
    config = build(BenchLatencyConfig, options)
    llm = _engine(options)
    result = bench_latency(llm, config.latency, seed=config.engine.seed)
    _show(result.lines())
    if config.latency.output_json is not None:
        write(Path(config.latency.output_json), result.as_json(llm.loaded.model.spec.name))
    return 0


def _throughput(parsed: argparse.Namespace) -> int:
    options = given(resolve(parsed, BenchThroughputConfig))
    config = build(BenchThroughputConfig, options)
    compare = config.throughput.compare
    reference = None if compare is None else Reference.read(Path(compare))
    result = bench_throughput(_engine(options), config, reference=reference)
    _show(result.lines())
    if config.throughput.output_json is not None:
        write(Path(config.throughput.output_json), result.as_json())
    return int(any(result.errors))


def _attention(parsed: argparse.Namespace) -> int:
    config = build(AttentionBenchConfig, given(resolve(parsed, AttentionBenchConfig)))
    if config.explain:
        _show(explain(config))
        return 0
    result = bench_attention(config)
    _show_rows(result, config.json)
    return int(any(row["failure"] is not None and not row["is_refused"] for row in result.rows))


def _step(parsed: argparse.Namespace) -> int:
    options = given(resolve(parsed, BenchStepConfig))
    config = build(BenchStepConfig, options)
    rows = max(rows for rows, _ in config.step.points)
    options.setdefault("max_num_seqs", rows)
    options.setdefault("max_num_batched_tokens", max(rows, STEP_PROMPT_TOKENS))
    result = bench_step(build(BenchStepConfig, options))
    _show_rows(result, config.step.json)
    return 0


def _churn(parsed: argparse.Namespace) -> int:
    config = build(BenchChurnConfig, given(resolve(parsed, BenchChurnConfig)))
    result = bench_churn(config)
    _show_rows(result, config.churn.json)
    return 0


def _lossless(parsed: argparse.Namespace) -> int:
    options = given(resolve(parsed, BenchLosslessConfig))
    config = build(BenchLosslessConfig, options)
    options.setdefault("max_num_seqs", max(rows for rows, _ in config.lossless.points))
    result = bench_lossless(build(BenchLosslessConfig, options))
    _show_rows(result, config.lossless.json)
    return int(config.engine.numerics == "exact" and not result.is_same_text)


def _reclaim(parsed: argparse.Namespace) -> int:
    config = build(BenchReclaimConfig, given(resolve(parsed, BenchReclaimConfig)))
    result = bench_reclaim(config)
    _show_rows(result, config.reclaim.json)
    return 0


def _engine(options: Mapping[str, Any]) -> LLM:
    """The engine that a benchmark's options describe."""
    names = options_of(EngineConfig)
    return LLM(**{name: value for name, value in options.items() if name in names})


def _show_rows(result: _Rows, path: str | None) -> None:
    """Print the table, and write header and rows where a file was named."""
    _show(result.lines())
    if path is not None:
        write_rows(Path(path), result.header, result.rows)


def _show(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)

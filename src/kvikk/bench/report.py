"""The report of `kvikk bench serve`: the lines of `vllm bench serve`, in its order, and then our own."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvikk.bench.match import TextMatch
from kvikk.bench.metrics import METRICS, Distribution, Summary
from kvikk.bench.monitor import ClientLoad
from kvikk.bench.traffic import TrafficConfig

WIDTH, NAME_WIDTH = 50, 40


def load_lines(summary: Summary, traffic: TrafficConfig) -> Iterator[str]:
    """Counts and throughputs."""
    yield _heading(" Serving Benchmark Result ", "=")
    yield _line("Successful requests:", summary.completed)
    yield _line("Failed requests:", summary.failed)
    if traffic.max_concurrency is not None:
        yield _line("Maximum request concurrency:", traffic.max_concurrency)
    if not math.isinf(traffic.request_rate):
        yield _line("Request rate configured (RPS):", traffic.request_rate)
    yield _line("Benchmark duration (s):", summary.duration_s)
    yield _line("Total input tokens:", summary.input_tokens)
    yield _line("Total generated tokens:", summary.output_tokens)
    yield _line("Request throughput (req/s):", summary.request_throughput)
    if summary.request_goodput is not None:
        yield _line("Request goodput (req/s):", summary.request_goodput)
    yield _line("Output token throughput (tok/s):", summary.output_throughput)
    yield _line("Peak output token throughput (tok/s):", summary.peak_output_tokens_per_s)
    yield _line("Peak concurrent requests:", summary.peak_concurrency)
    yield _line("Total token throughput (tok/s):", summary.total_throughput)


def metric_lines(metric: str, spread: Distribution | None) -> Iterator[str]:
    """One metric's mean, median and percentiles."""
    name, heading = METRICS[metric]
    yield _heading(heading, "-")
    if spread is None:
        yield "nothing to measure"
        return
    yield _line(f"Mean {name} (ms):", spread.mean)
    yield _line(f"Median {name} (ms):", spread.median)
    for rank, value in spread.percentiles.items():
        yield _line(f"P{rank:g} {name} (ms):", value)


def cache_lines(summary: Summary, counted_hits: float | None) -> Iterator[str]:
    """Prompt tokens that the server found cached: by its usage, else by its counters; nothing where it says neither."""
    cached = counted_hits if summary.cached_tokens is None else summary.cached_tokens
    if cached is None:
        return
    yield _heading("Prompt Cache", "-")
    yield _line("Cached prompt tokens:", int(cached))
    yield _line("Cached share of input tokens (%):", 100 * cached / max(summary.input_tokens, 1))
    yield _line("Counted by:", "the server's counters" if summary.cached_tokens is None else "usage of each answer")


def match_lines(match: TextMatch) -> Iterator[str]:
    """How far the texts are those of the reference."""
    yield _heading("Text Match", "-")
    yield _line("Identical texts:", f"{match.identical} of {match.compared}")
    yield _line("Token match (%):", "-" if match.token_match is None else 100 * match.token_match)


def measurement_lines(summary: Summary, client: ClientLoad, other_lengths: int | None) -> Iterator[str]:
    """What one should know to trust the figures."""
    yield _heading("Measurement", "-")
    counted = summary.completed - summary.client_counted
    yield _line("Requests counted by the server:", f"{counted} of {summary.completed}")
    yield _line("Tokens per chunk:", summary.output_tokens / max(summary.chunks, 1))
    if other_lengths is not None:
        yield _line("Answers not of the length asked for:", other_lengths)
    yield _line("Client CPU, of one core (%):", 100 * client.cpu_share)
    yield _line("P99 client lag (ms):", client.lag_p99_ms)


def last_line() -> str:
    """The end of the report."""
    return "=" * WIDTH


def _heading(text: str, fill: str) -> str:
    return f"{text:{fill}^{WIDTH}}"


def _line(name: str, value: float | str) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<{NAME_WIDTH}} {shown}"

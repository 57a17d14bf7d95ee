"""Figures of a load, computed from recorded times alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from kvikk.bench.answer import Answer
from kvikk.errors import ConfigError

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
"""What can be asked for: its name in the report, and the heading there."""
OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What a good request keeps to, in milliseconds; None where anything is good enough."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Goodput:
        """From texts of the form `METRIC:MS`.

        Raises:
            ConfigError: an unknown metric, one that comes twice, or a time that is none.
        """
        limits: dict[str, float] = {}
        for text in texts:
            name, colon, number = text.partition(":")
            if not colon:
                raise ConfigError(f"--goodput {text!r} is not of the form METRIC:MS, as in ttft:200")
            if name not in OBJECTIVES:
                raise ConfigError(f"--goodput {text!r}: {name!r} is no objective, choose from {', '.join(OBJECTIVES)}")
            if name in limits:
                raise ConfigError(f"--goodput names {name} twice: keep one")
            try:
                limits[name] = float(number)
            except ValueError:
                limits[name] = -1.0
            if not 0 <= limits[name] < float("inf"):
                raise ConfigError(f"--goodput {text!r}: {number!r} is no number of milliseconds")
        return cls(**limits)

    def is_met_by(self, answer: Answer) -> bool:
        """Whether a request that succeeded was fast enough; without a second token it has no TPOT to miss."""
        took = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.e2el_s}
        limits = {name: getattr(self, name) for name in OBJECTIVES}
        return all(took[name] * 1000 <= limit for name, limit in limits.items() if limit is not None)


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How one metric is spread, in milliseconds; percentiles by their rank, linearly interpolated."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a load.

    Args:
        completed: requests that came to their end.
        failed: requests that did not; nothing else here counts them.
        duration_s: from the first request's turn to the end of the last.
        input_tokens: of prompts.
        output_tokens: of answers.
        cached_tokens: of prompts, as the server's usage says; None where it never does.
        good: requests that kept to the objectives, None without any.
        peak_output_tokens_per_s: of the busiest second.
        peak_concurrency: requests underway at once at most.
        chunks: that carried text.
        client_counted: requests whose tokens the server did not count.
        distributions: by metric, None where nothing could be measured.
    """

    completed: int
    failed: int
    duration_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    good: int | None
    peak_output_tokens_per_s: float
    peak_concurrency: int
    chunks: int
    client_counted: int
    distributions: dict[str, Distribution | None]

    @property
    def request_throughput(self) -> float:
        """Requests a second."""
        return self.completed / self.duration_s

    @property
    def request_goodput(self) -> float | None:
        """Good requests a second."""
        return None if self.good is None else self.good / self.duration_s

    @property
    def output_throughput(self) -> float:
        """Tokens of answers a second."""
        return self.output_tokens / self.duration_s

    @property
    def total_throughput(self) -> float:
        """Tokens of prompts and answers a second."""
        return (self.input_tokens + self.output_tokens) / self.duration_s


def summarise(
    answers: Sequence[Answer], duration_s: float, percentiles: Sequence[float], goodput: Goodput | None = None
) -> Summary:
    """The figures of answers whose tokens are counted.

    Args:
        answers: of every request, failed ones too.
        duration_s: of the whole load.
        percentiles: ranks from 0 to 100.
        goodput: objectives, if there are any.
    """
    done = [answer for answer in answers if answer.error is None]
    usages = [answer.usage for answer in done if answer.usage is not None]
    cached = [usage.cached_tokens for usage in usages if usage.cached_tokens is not None]
    samples = {
        "ttft": [answer.ttft_s for answer in done],
        "tpot": [answer.tpot_s for answer in done if answer.tpot_s is not None],
        "itl": [gap for answer in done for gap in answer.itls_s],
        "e2el": [answer.e2el_s for answer in done],
    }
    return Summary(
        completed=len(done),
        failed=len(answers) - len(done),
        duration_s=duration_s,
        input_tokens=sum(usage.input_tokens for usage in usages),
        output_tokens=sum(usage.output_tokens for usage in usages),
        cached_tokens=sum(cached) if cached else None,
        good=None if goodput is None else sum(map(goodput.is_met_by, done)),
        peak_output_tokens_per_s=_peak_tokens(done),
        peak_concurrency=_peak_concurrency(answers),
        chunks=sum(len(answer.arrivals_s) for answer in done),
        client_counted=sum(not usage.is_servers for usage in usages),
        distributions={name: _distribution(values, percentiles) for name, values in samples.items()},
    )


def _distribution(seconds: Sequence[float], percentiles: Sequence[float]) -> Distribution | None:
    if not seconds:
        return None
    values = np.array(seconds) * 1000
    return Distribution(
        mean=float(values.mean()),
        median=float(np.median(values)),
        std=float(values.std()),
        percentiles={rank: float(np.percentile(values, rank)) for rank in percentiles},
    )


def _peak_tokens(answers: Sequence[Answer]) -> float:
    """Tokens of the busiest of the seconds counted from the first request on.

    A chunk may hold several tokens: each is taken for its share of the answer's.
    """
    if not answers:
        return 0.0
    start = min(answer.sent_s for answer in answers)
    per_second: defaultdict[int, float] = defaultdict(float)
    for answer in answers:
        for arrival in answer.arrivals_s:
            per_second[int(arrival - start)] += answer.output_tokens / len(answer.arrivals_s)
    return max(per_second.values())


def _peak_concurrency(answers: Sequence[Answer]) -> int:
    """Requests underway at once at most; one that ends as another begins does not overlap it."""
    changes = sorted([(answer.sent_s, 1) for answer in answers] + [(answer.done_s, -1) for answer in answers])
    return max(accumulate(change for _, change in changes), default=0)

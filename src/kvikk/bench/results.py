"""Results as files, under the names that `vllm bench` gives its figures, and files as references."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvikk.bench.answer import Answer
from kvikk.bench.match import TextMatch, match_texts
from kvikk.bench.metrics import METRICS, Summary
from kvikk.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What is shown and kept.

    Args:
        percentile_metrics: metrics that are shown, separated by commas, of ttft, tpot, itl and e2el.
        metric_percentiles: percentiles of each, separated by commas.
        save_result: write a JSON file of the figures.
        save_detailed: with the times, texts and errors of each request.
        result_dir: folder of the file; the current one when not given.
        result_filename: its name; made from backend, rate, model and time when not given.
        compare: a former detailed result of the same requests, whose texts are compared with.
    """

    percentile_metrics: str = "ttft,tpot,itl"
    metric_percentiles: str = "99"
    save_result: bool = False
    save_detailed: bool = False
    result_dir: str | None = None
    result_filename: str | None = None
    compare: str | None = None

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(f"--percentile-metrics {name!r} is no metric: choose from {', '.join(METRICS)}")
        if any(not 0 <= rank <= 100 for rank in self.percentiles):
            raise ConfigError(f"--metric-percentiles {self.metric_percentiles} must lie between 0 and 100")
        if not self.save_result:
            unused = {
                "--save-detailed": self.save_detailed,
                "--result-dir": self.result_dir,
                "--result-filename": self.result_filename,
            }
            for flag, value in unused.items():
                if value:
                    raise ConfigError(f"{flag} is about the file that --save-result writes: add --save-result")

    @property
    def metrics(self) -> tuple[str, ...]:
        """`percentile_metrics`, one by one."""
        return tuple(name.strip() for name in self.percentile_metrics.split(","))

    @property
    def percentiles(self) -> tuple[float, ...]:
        """`metric_percentiles`, one by one."""
        try:
            return tuple(float(text) for text in self.metric_percentiles.split(","))
        except ValueError:
            raise ConfigError(
                f"--metric-percentiles {self.metric_percentiles!r} must be numbers separated by commas"
            ) from None


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The texts of a former run.

    Args:
        path: its file.
        fingerprint: of its requests.
        texts: one for each request, None for those that failed.
    """

    path: Path
    fingerprint: str
    texts: list[str | None]

    @classmethod
    def read(cls, path: Path) -> Reference:
        """From a detailed result.

        Raises:
            ConfigError: the file cannot be read, or holds no texts.
        """
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--compare {path} cannot be read as JSON: {error}") from None
        try:
            pairs = zip(result["generated_texts"], result["errors"], strict=True)
            texts = [None if error else str(text) for text, error in pairs]
            return cls(path=path, fingerprint=result["prompts_fingerprint"], texts=texts)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"--compare {path} is no detailed result: make it with --save-result --save-detailed, or with "
                "--output-json of throughput"
            ) from None

    def match(self, texts: Sequence[str | None], tokenizer: Any) -> TextMatch:
        """How far texts are these."""
        return match_texts(texts, self.texts, tokenizer)

    def check(self, fingerprint: str) -> None:
        """Refuse to be compared with answers to other questions.

        Raises:
            ConfigError: the requests differ.
        """
        if fingerprint != self.fingerprint:
            raise ConfigError(
                f"--compare {self.path} asked other prompts or lengths: use its dataset flags, --num-prompts, --seed "
                "and tokenizer"
            )


def figures(summary: Summary, metrics: Sequence[str]) -> dict[str, Any]:
    """The figures of a load by vLLM's names; milliseconds where the name says so, null where nothing was measured."""
    found: dict[str, Any] = {
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.request_goodput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_throughput,
        "max_output_tokens_per_s": summary.peak_output_tokens_per_s,
        "max_concurrent_requests": summary.peak_concurrency,
    }
    for metric in metrics:
        spread = summary.distributions[metric]
        for name in ("mean", "median", "std"):
            found[f"{name}_{metric}_ms"] = None if spread is None else getattr(spread, name)
        for rank, value in ({} if spread is None else spread.percentiles).items():
            found[f"p{rank:g}_{metric}_ms"] = value
    return found


def details(answers: Sequence[Answer]) -> dict[str, Any]:
    """What each request did, by vLLM's names; times in seconds."""
    has_text = [answer.arrivals_s != () for answer in answers]
    return {
        "input_lens": [0 if answer.usage is None else answer.usage.input_tokens for answer in answers],
        "output_lens": [answer.output_tokens for answer in answers],
        "ttfts": [answer.ttft_s if has else 0.0 for answer, has in zip(answers, has_text, strict=True)],
        "itls": [answer.itls_s for answer in answers],
        "latencies": [answer.e2el_s for answer in answers],
        "start_times": [answer.sent_s for answer in answers],
        "queue_times": [answer.sent_s - answer.due_s for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }


def match_figures(match: TextMatch | None) -> dict[str, Any]:
    """How far the texts are those of the reference; nothing without one."""
    if match is None:
        return {}
    return {
        "token_match": match.token_match,
        "identical_texts": match.identical,
        "compared_texts": match.compared,
    }


def plain_rate(rate: float) -> float | str:
    """A rate as JSON has it, which knows no infinity."""
    return "inf" if math.isinf(rate) else rate


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result.

    Raises:
        ConfigError: the file cannot be written.
    """
    _write_text(path, json.dumps(result) + "\n")


def write_rows(path: Path, header: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a header and flat rows, a row to a line.

    Raises:
        ConfigError: the file cannot be written.
    """
    lines = ",\n".join("    " + json.dumps(row) for row in rows)
    head = json.dumps(header, indent=2).replace("\n", "\n  ")
    _write_text(path, f'{{\n  "header": {head},\n  "rows": [\n{lines}\n  ]\n}}\n')


def _write_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the result cannot be written to {path}: {error}") from None

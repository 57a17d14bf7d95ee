"""The server's metrics: the engine's as of its latest step, the front's as they are observed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from kvikk.server.messages import HostKV, Ready, Stats
from kvikk.server.metrics.instruments import Instruments
from kvikk.server.metrics.kinds import MODEL, EngineCounter, EngineCounterBy, EngineInfo, EngineValue
from kvikk.server.metrics.recent import RecentStats
from kvikk.server.metrics.table import TABLE
from kvikk.server.metrics.timeline import Timeline

OPENMETRICS = "application/openmetrics-text"


class Metrics(Collector):
    """Everything in `table.TABLE`, in a registry of its own; for the one thread that runs the server's event loop.

    Args:
        ready: what the engine said when it began.
        model_name: the label of all series.
        clock: seconds, only growing; dates what the engine reports.

    Attributes:
        recent: the engine's last minute.
    """

    def __init__(self, ready: Ready, *, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.recent = RecentStats(clock())
        self._stats = Stats(
            total_blocks=ready.blocks, free_blocks=ready.blocks, host=HostKV(total_bytes=ready.host_bytes)
        )
        self._ready = ready
        self._model_name = model_name
        self._clock = clock
        self._registry = CollectorRegistry()
        self._instruments = Instruments(self._registry, model_name=model_name, max_model_len=ready.max_model_len)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def observe_stats(self, stats: Stats) -> None:
        """The engine is like this now: after each step, and whenever its memory changed between two."""
        steps = stats.steps - self._stats.steps
        if steps > 0:
            tokens = (stats.computed_tokens - self._stats.computed_tokens) / steps
            for _ in range(steps):
                self._instruments.step_tokens.observe(tokens)
        self._stats = stats
        self.recent.note(self._clock(), stats)

    def begin(self, now_s: float, *, prompt_tokens: int, texts: int = 1) -> Timeline:
        """A request has arrived: tell the timeline what becomes of it."""
        return Timeline(self._instruments, now_s, prompt_tokens, texts)

    def reject(self, reason: str) -> None:
        """A request was not admitted; the reason is the error's `code`."""
        self._instruments.rejected(reason).inc()

    def answered(self, route: str, status: int) -> None:
        """An HTTP request was answered. `route` is the template, never the path that the client sent."""
        self._instruments.answered(route, status).inc()

    def exposition(self, accept: str | None = None) -> tuple[bytes, str]:
        """What `/metrics` answers to a request with this Accept header: the body and its content type."""
        types = {part.partition(";")[0].strip().lower() for part in (accept or "").split(",")}
        if OPENMETRICS not in types:
            return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
        # Our names are valid in every scheme. The library's default makes `kvikk_` of `kvikk:`, in samples only.
        body: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
            self._registry, escaping=openmetrics.ALLOWUTF8
        )
        return body, openmetrics.CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The engine's series; the registry calls this when someone asks."""
        for metric in TABLE:
            if isinstance(metric, EngineInfo):
                labels = {name: str(value(self._ready)) for name, value in metric.labels.items()}
                info = GaugeMetricFamily(metric.full_name, metric.help, labels=[MODEL, *labels])
                info.add_metric([self._model_name, *labels.values()], 1)
                yield info
            elif isinstance(metric, EngineCounterBy):
                counts = metric.counts(self._stats)
                counter = CounterMetricFamily(metric.full_name, metric.help, labels=[MODEL, metric.label])
                for value in metric.values:
                    counter.add_metric([self._model_name, value], counts.get(value, 0))
                yield counter
            elif isinstance(metric, EngineValue):
                kind = CounterMetricFamily if isinstance(metric, EngineCounter) else GaugeMetricFamily
                family = kind(metric.full_name, metric.help, labels=[MODEL])
                family.add_metric([self._model_name], metric.value(self._stats))
                yield family

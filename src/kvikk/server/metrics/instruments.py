"""What the front counts and observes itself."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvikk.engine import FinishReason
from kvikk.server.metrics.kinds import MODEL, FrontCounter, FrontHistogram
from kvikk.server.metrics.table import TABLE, AbortCause


class Instruments:
    """The front's counters and histograms, each bound to its labels here, so that a token costs one observation.

    Args:
        registry: where they are registered.
        model_name: the label of all series.
        max_model_len: bounds the buckets of histograms of tokens.
    """

    def __init__(self, registry: CollectorRegistry, *, model_name: str, max_model_len: int) -> None:
        counters = {m.name: _counter(m, registry, model_name) for m in TABLE if isinstance(m, FrontCounter)}
        histograms = {
            m.name: _histogram(m, registry, model_name, max_model_len) for m in TABLE if isinstance(m, FrontHistogram)
        }
        self._model_name = model_name
        self._rejections = counters["admission_rejections"]
        self._http_requests = counters["http_requests"]
        self.prompt_tokens = counters["prompt_tokens"].labels(model_name)
        self.prompt_tokens_cached = counters["prompt_tokens_cached"].labels(model_name)
        self.finished = {str(reason): counters["request_success"].labels(model_name, reason) for reason in FinishReason}
        self.aborted = {cause: counters["request_aborts"].labels(model_name, cause) for cause in AbortCause}
        self.step_tokens = histograms["iteration_tokens_total"]
        self.request_prompt_tokens = histograms["request_prompt_tokens"]
        self.request_generation_tokens = histograms["request_generation_tokens"]
        self.time_to_first_token = histograms["time_to_first_token_seconds"]
        self.inter_token_latency = histograms["inter_token_latency_seconds"]
        self.time_per_output_token = histograms["request_time_per_output_token_seconds"]
        self.e2e_latency = histograms["e2e_request_latency_seconds"]
        self.queue_time = histograms["request_queue_time_seconds"]
        self.prefill_time = histograms["request_prefill_time_seconds"]
        self.decode_time = histograms["request_decode_time_seconds"]
        self.inference_time = histograms["request_inference_time_seconds"]

    def rejected(self, reason: str) -> Counter:
        """Requests that were not admitted for this reason."""
        return self._rejections.labels(self._model_name, reason)

    def answered(self, route: str, status: int) -> Counter:
        """HTTP requests that were answered so."""
        return self._http_requests.labels(self._model_name, route, status)


def _counter(metric: FrontCounter, registry: CollectorRegistry, model_name: str) -> Counter:
    counter = Counter(metric.full_name, metric.help, (MODEL, *metric.labels), registry=registry)
    for value in metric.values:
        counter.labels(model_name, value)
    return counter


def _histogram(metric: FrontHistogram, registry: CollectorRegistry, model_name: str, max_model_len: int) -> Histogram:
    bounds = metric.bounds_for(max_model_len)
    histogram = Histogram(metric.full_name, metric.help, (MODEL,), registry=registry, buckets=bounds)
    return histogram.labels(model_name)

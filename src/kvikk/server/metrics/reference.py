"""The documentation's page of metrics, made from the table.

python -m kvikk.server.metrics.reference > docs/reference/metrics.md
"""

from __future__ import annotations

from kvikk.server.metrics.kinds import FrontHistogram, Metric
from kvikk.server.metrics.table import TABLE

_INTRODUCTION = """\
<!-- Generated: change src/kvikk/server/metrics/table.py, then
     python -m kvikk.server.metrics.reference > docs/reference/metrics.md -->

# Metrics

`GET /metrics` gives them in Prometheus' text format, or in OpenMetrics when the Accept header asks for it. Every series
has the label `model_name`. Where the column *vLLM* says yes, vLLM has the name with `vllm:` for `kvikk:` and the same
meaning. Series that end in `_created` say when a counter or histogram was made.

What can be counted is a counter, and Prometheus divides: the hit rate of five minutes is

```promql
rate(kvikk:prefix_cache_hits_total[5m]) / rate(kvikk:prefix_cache_queries_total[5m])
```

A block of the KV memory is *held* (by running requests or pins), *cached* (no one holds it, and it can be found again)
or *free*. The three are gauges of their own, since a single figure of usage is taken for any of them.
"""

_SECTIONS = (("gauge", "Gauges"), ("counter", "Counters"), ("histogram", "Histograms"))

_END = """\
## Of the process

`process_resident_memory_bytes`, `process_cpu_seconds_total`, `process_open_fds` and the other `process_` series are
those of the front, as prometheus_client names them; the engine runs in a process of its own.
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [_INTRODUCTION]
    for kind, title in _SECTIONS:
        rows = [_row(metric) for metric in TABLE if metric.kind == kind]
        parts.append("\n".join([f"## {title}", "", "| name | vLLM | what it says |", "|---|---|---|", *rows, ""]))
    return "\n".join([*parts, _buckets(), _END])


def _row(metric: Metric) -> str:
    labels = f" Labels: {metric.label_help}." if metric.label_help else ""
    return f"| `{metric.shown_name}` | {'yes' if metric.is_vllm else ''} | {metric.help}{labels} |"


def _buckets() -> str:
    """The upper ends of the buckets, and which histograms have them."""
    names: dict[tuple[float, ...], list[str]] = {}
    for metric in TABLE:
        if isinstance(metric, FrontHistogram):
            names.setdefault(metric.bounds, []).append(f"`{metric.shown_name}`")
    parts = ["Their buckets end at", ""]
    for bounds, users in names.items():
        ends = ", ".join(f"{bound:g}" for bound in bounds) or "1, 2, 5, 10, 20, 50, and so on to the longest sequence"
        parts.append(f"- {ends}: {', '.join(users)}")
    return "\n".join([*parts, ""])


if __name__ == "__main__":
    print(page(), end="")

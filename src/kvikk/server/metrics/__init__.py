"""What Prometheus reads at `/metrics`.

- `exporter.Metrics`: one object for the server, with a registry of its own; read this first.
- `instruments.Instruments`: what the front counts and observes itself.
- `timeline.Timeline`: the times of one request, from arrival to the end of its last text.
- `recent.RecentStats`: the engine's counters of the last minute, for the operator's page.
- `table`: every metric, once; `kinds`: what the table says of each; `reference`: the page of the documentation.

Invariants: counters rather than rates; blocks held and blocks cached are two gauges; what is exported, documented and
asked for by the Grafana dashboard is one list of names.
"""

from kvikk.server.metrics.exporter import Metrics
from kvikk.server.metrics.recent import RecentStats
from kvikk.server.metrics.table import AbortCause
from kvikk.server.metrics.timeline import Timeline

__all__ = ["AbortCause", "Metrics", "RecentStats", "Timeline"]

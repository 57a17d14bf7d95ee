"""What the dashboard and the alerts ask Prometheus for exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvikk.server.metrics.kinds import MODEL, EngineCounterBy, EngineInfo, FrontCounter, FrontHistogram, Metric
from kvikk.server.metrics.table import TABLE

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana/kvikk.json").read_text(encoding="utf-8"))
ALERTS: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text(encoding="utf-8"))

QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
RULES = [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
VARIABLES = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
BRACKETS = {")": "(", "]": "[", "}": "{"}


def series_of(metric: Metric) -> set[str]:
    """The names of its series in Prometheus."""
    if isinstance(metric, FrontHistogram):
        return {metric.full_name + suffix for suffix in ("_bucket", "_sum", "_count")}
    return {metric.shown_name}


def labels_of(metric: Metric) -> set[str]:
    own = set(metric.labels) if isinstance(metric, FrontCounter | EngineInfo) else set()
    if isinstance(metric, EngineCounterBy):
        own = {metric.label}
    return {MODEL, "instance", "job", *own} | ({"le"} if isinstance(metric, FrontHistogram) else set())


LABELS = {series: labels_of(metric) for metric in TABLE for series in series_of(metric)} | {"up": {"instance", "job"}}


@pytest.mark.parametrize("query", [*QUERIES, *RULES, *VARIABLES])
def test_a_query_asks_for_series_and_labels_that_exist(query: str) -> None:
    names = set(re.findall(r"kvikk:\w+|\bup\b", query))
    assert names, "the query asks for nothing of ours"
    assert names <= set(LABELS)
    known = set.intersection(*(LABELS[name] for name in names))
    matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)
    grouped = [label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")]
    assert {*matched, *grouped} <= known


@pytest.mark.parametrize("query", [*QUERIES, *RULES, *VARIABLES])
def test_a_query_is_balanced(query: str) -> None:
    outside_of_strings = re.sub(r'"(?:[^"\\]|\\.)*"', "", query)
    assert '"' not in outside_of_strings
    opened: list[str] = []
    for sign in outside_of_strings:
        if sign in BRACKETS.values():
            opened.append(sign)
        elif sign in BRACKETS:
            assert opened.pop() == BRACKETS[sign]
    assert opened == []


@pytest.mark.parametrize("query", [*QUERIES, *RULES])
def test_what_only_grows_is_asked_for_as_a_rate(query: str) -> None:
    growing = {s for m in TABLE if m.kind != "gauge" for s in series_of(m)}
    for name in growing & set(re.findall(r"kvikk:\w+", query)):
        assert re.search(rf"(?:rate|increase)\({name}\b", query), f"{name} is a counter"


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: f"{panel['id']}-{panel['title']}")
def test_a_panel_says_what_it_shows_and_where_from(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    sources = {panel["datasource"]["uid"], *(target["datasource"]["uid"] for target in panel["targets"])}
    assert sources == {"${datasource}"}
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references)


def test_panels_do_not_overlap_and_keep_within_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies upon another panel"
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_variable_of_a_query_is_defined() -> None:
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = {name for query in [*QUERIES, *VARIABLES] for name in re.findall(r"\$(\w+)", query)}
    assert {name for name in used if not name.startswith("__")} <= defined
    assert {name for name in used if name.startswith("__")} <= {"__rate_interval", "__range"}


def test_the_scrape_configuration_finds_the_server_and_the_alerts() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    assert config["scrape_configs"][0]["metrics_path"] == "/metrics"
    assert config["scrape_configs"][0]["job_name"] == "kvikk"
    assert all((DEPLOY / "prometheus" / name).exists() for name in config["rule_files"])

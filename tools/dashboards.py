"""The Grafana dashboards: one to begin with, and one for each part of docs/metrics.md, with every metric on a panel.

A panel's unit follows from its metric (`tools.promql`), its description from the page. The overview is chosen by hand:
what somebody looks at first who has been called. The others are made from the page alone, so a new metric appears in
them by itself: a counter as its rate, a histogram as quantiles, a summary as its mean.

Entry: `dashboards`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tools.promql import BYTES, COUNT, RATIO, SECONDS, Catalogue, MetricDoc, unit_of

SCHEMA_VERSION: Final = 39
"""Of Grafana 11; later ones read it, too."""
WIDTH: Final = 24
DATA: Final = {"type": "prometheus", "uid": "${datasource}"}
SELECTED: Final = 'job=~"$job", cluster=~"$cluster", instance=~"$instance"'
INTERVAL: Final = "$__rate_interval"
MAX_SERIES: Final = 15
"""Of metrics by topic or by client: the largest."""

UNITS: Final = {
    SECONDS: "s",
    BYTES: "bytes",
    RATIO: "percentunit",
    COUNT: "short",
    f"{SECONDS}/s": "percentunit",
    f"{BYTES}/s": "Bps",
    f"{COUNT}/s": "cps",
}
"""Grafana's names of units. Seconds of work per second are a share of the time."""

PAGES: Final = {
    "requests": ("Requests", ("Requests", "Topics", "Groups", "Metrics of clients")),
    "broker": ("Brokers", ("Broker",)),
    "storage": ("Storage", ("Replica sets", "Storage")),
    "background": ("Compaction", ("Log compaction", "Compaction")),
    "bucket": ("Bucket", ("Bucket: requests and bytes by purpose and topic", "Object store")),
}
"""File name, title, and the sections of docs/metrics.md on it."""
_MANY: Final = frozenset({"topic"})


@dataclass(frozen=True)
class Panel:
    """One panel: its queries are `(expression, legend)`."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str
    description: str = ""
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    red_above: float | None = None
    """For `stat` panels."""
    red_below: float | None = None


def dashboards(known: Catalogue) -> dict[str, dict[str, Any]]:
    """Return the dashboards by file name. Raises `KeyError` if the page lacks a section or metric."""
    sections: dict[str, list[MetricDoc]] = {}
    for row in known.rows.values():
        sections.setdefault(row.section, []).append(row)
    found = {"tidelog-overview.json": _dashboard("overview", "Overview", [("", _overview(known))])}
    for name, (title, parts) in PAGES.items():
        rows = [(part, [_panel(row) for row in sections[part]]) for part in parts]
        found[f"tidelog-{name}.json"] = _dashboard(name, title, rows)
    return found


# --- panels ------------------------------------------------------------------------------------------------------


def _panel(row: MetricDoc) -> Panel:
    """The panel that shows one metric of the page."""
    labels = sorted(row.labels if row.labels is not None else ("client_id", "metric"))
    legend = " ".join(["{{instance}}", *(f"{{{{{label}}}}}" for label in labels)])
    by = ", ".join(["instance", *labels])
    if row.kind == "histogram":
        quantiles = [(_quantile(share, row.name, by), f"p{round(share * 100)} {legend}") for share in (0.5, 0.99)]
        return Panel(_title(row), quantiles, UNITS[row.unit], _plain(row.meaning))
    if row.kind == "summary":
        sums, counts = (
            f"sum by ({by}) (rate({row.name}_{each}{{{SELECTED}}}[{INTERVAL}]))" for each in ("sum", "count")
        )
        return Panel(_title(row), [(_few(f"{sums} / {counts}", row), legend)], UNITS[row.unit], _plain(row.meaning))
    if row.kind == "counter":
        query = f"sum by ({by}) (rate({row.name}{{{SELECTED}}}[{INTERVAL}]))"
        return Panel(_title(row), [(_few(query, row), legend)], UNITS[f"{row.unit}/s"], _plain(row.meaning))
    return Panel(_title(row), [(_few(f"{row.name}{{{SELECTED}}}", row), legend)], UNITS[row.unit], _plain(row.meaning))


def _few(query: str, row: MetricDoc) -> str:
    return f"topk({MAX_SERIES}, {query})" if row.labels is None or row.labels & _MANY else query


def _quantile(share: float, name: str, by: str, more: str = "") -> str:
    return f"histogram_quantile({share:g}, sum by (le, {by}) (rate({name}_bucket{{{SELECTED}{more}}}[{INTERVAL}])))"


def _title(row: MetricDoc) -> str:
    words = row.name.removeprefix("tidelog_").removesuffix("_total")
    for unit in (SECONDS, BYTES):
        words = words.removesuffix(f"_{unit}")
    return words.replace("_", " ").capitalize()


def _plain(meaning: str) -> str:
    """A cell of the page without its markup."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", meaning).replace("`", "")


@dataclass(frozen=True)
class _Chosen:
    """Queries of metrics that the page has, for panels that are chosen by hand."""

    known: Catalogue

    def now(self, name: str) -> str:
        """Return a gauge as it is."""
        return f"{self.known.rows[name].name}{{{SELECTED}}}"

    def rate(self, name: str, by: str) -> str:
        """Return a counter's rate."""
        return f"sum by ({by}) (rate({self.known.rows[name].name}{{{SELECTED}}}[{INTERVAL}]))"

    def meaning(self, name: str) -> str:
        """Return what the page says of it."""
        return _plain(self.known.rows[name].meaning)

    def largest(self, title: str, name: str, red_above: float) -> Panel:
        """Return the panel of one number: a gauge's largest value."""
        return _stat(title, f"max({self.now(name)})", UNITS[unit_of(name)], self.meaning(name), red_above=red_above)

    def gauges(self, title: str, name: str, legend: str) -> Panel:
        """Return the panel of a gauge."""
        return Panel(title, [(self.now(name), legend)], UNITS[unit_of(name)], self.meaning(name))

    def rates(self, title: str, name: str, by: str, legend: str, *, stacked: bool = False) -> Panel:
        """Return the panel of a counter."""
        unit = UNITS[f"{unit_of(name)}/s"]
        return Panel(title, [(self.rate(name, by), legend)], unit, self.meaning(name), stacked=stacked)


def _overview(known: Catalogue) -> list[Panel]:
    """What to look at first: one row of numbers, then how clients fare, then what stands behind them."""
    of = _Chosen(known)
    down = 'count(up{job=~"$job", cluster=~"$cluster"} == 0) or vector(0)'
    firing = 'count(ALERTS{alertname=~"Tidelog.*", alertstate="firing"}) or vector(0)'
    versions = f"count(count by (version) ({of.now('tidelog_build_info')}))"
    produced, fetched = "tidelog_topic_produced_bytes_total", "tidelog_topic_fetched_bytes_total"
    latency, store = "tidelog_request_seconds", "tidelog_object_store_seconds"
    produce = [(_quantile(q, latency, "job", ', api="Produce"'), f"p{round(q * 100)}") for q in (0.5, 0.99)]
    traffic = [(of.rate(produced, "job"), "produced"), (of.rate(fetched, "job"), "fetched")]
    place = "cluster, topic, partition"
    end, committed = "tidelog_partition_high_watermark", "tidelog_group_committed_offset"
    behind = (
        f"sum by (cluster, group) (max by ({place}) ({of.now(end)})"
        f" - on ({place}) group_right () max by (group, {place}) ({of.now(committed)}))"
    )
    return [
        _stat("Brokers", f"max({of.now('tidelog_brokers')})", "short", of.meaning("tidelog_brokers"), red_below=1),
        _stat("Not answering", down, "short", "Brokers whose metrics cannot be scraped", red_above=1),
        of.largest("Partitions without a broker", "tidelog_partitions_leaderless", 1),
        of.largest("Oldest not in the bucket", "tidelog_storage_upload_pending_age_seconds", 120),
        _stat("Firing alerts", firing, "short", "Those of deploy/prometheus/alerts.yml", red_above=1),
        _stat("Versions", versions, "short", "More than 1 only during an upgrade", red_above=2),
        Panel("Bytes in and out", traffic, UNITS[f"{unit_of(produced)}/s"], "Of producers and to consumers"),
        Panel("Produce", produce, UNITS[unit_of(latency)], of.meaning(latency)),
        of.rates("Errors of partitions", "tidelog_partition_errors_total", "api, error", "{{api}} {{error}}"),
        of.gauges("Not uploaded", "tidelog_storage_log_cache_pending_bytes", "{{instance}}"),
        Panel(
            "Bucket",
            [(_quantile(0.99, store, "operation"), "p99 {{operation}}")],
            UNITS[unit_of(store)],
            of.meaning(store),
        ),
        of.rates("Requests to the bucket", "tidelog_bucket_requests_total", "purpose", "{{purpose}}", stacked=True),
        of.gauges("Replicas behind", "tidelog_replica_lag_bytes", "set {{replica_set}} on {{broker}}"),
        of.gauges("Operations without an answer", "tidelog_operation_silent_seconds", "{{instance}} {{operation}}"),
        of.gauges("Disk free", "tidelog_disk_free_bytes", "{{instance}}"),
        Panel(
            "Groups behind",
            [(f"topk({MAX_SERIES}, {behind})", "{{group}}")],
            UNITS[unit_of(end)],
            "Records that consumer groups have not committed yet",
        ),
    ]


def _stat(
    title: str,
    query: str,
    unit: str,
    description: str = "",
    *,
    red_above: float | None = None,
    red_below: float | None = None,
) -> Panel:
    return Panel(title, [(query, "")], unit, description, "stat", 4, 4, red_above=red_above, red_below=red_below)


# --- Grafana's JSON ----------------------------------------------------------------------------------------------


def _dashboard(name: str, title: str, rows: Iterable[tuple[str, Sequence[Panel]]]) -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for row, members in rows:
        if row:
            place = {"x": 0, "y": top, "w": WIDTH, "h": 1}
            panels.append({"type": "row", "title": row, "collapsed": False, "gridPos": place, "panels": []})
            top += 1
        left = height = 0
        for panel in members:
            if left + panel.width > WIDTH:
                left, top, height = 0, top + height, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            panels.append(_panel_json(panel, place))
            left, height = left + panel.width, max(height, panel.height)
        top += height
    for number, one in enumerate(panels, 1):
        one["id"] = number
    return {
        "uid": f"tidelog-{name}",
        "title": f"Tidelog / {title}",
        "tags": ["tidelog"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "title": "Tidelog",
                "type": "dashboards",
                "tags": ["tidelog"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    ]
    selected = ""
    for label in ("job", "cluster", "instance"):
        query = f"label_values(tidelog_build_info{{{selected}}}, {label})"
        found.append(
            {
                "name": label,
                "label": label.capitalize(),
                "type": "query",
                "datasource": DATA,
                "query": {"query": query, "refId": label},
                "definition": query,
                "refresh": 2,
                "sort": 1,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
        )
        selected += f'{", " if selected else ""}{label}=~"${label}"'
    return found


def _panel_json(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    options: dict[str, Any]
    if panel.kind == "stat":
        defaults["thresholds"] = {"mode": "absolute", "steps": _steps(panel)}
        options = {"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
    else:
        stacking = "normal" if panel.stacked else "none"
        fill = 30 if panel.stacked else 5
        defaults["custom"] = {
            "axisSoftMin": 0,
            "fillOpacity": fill,
            "showPoints": "never",
            "stacking": {"mode": stacking, "group": "A"},
        }
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATA,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": DATA, "expr": query, "legendFormat": legend}
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


def _steps(panel: Panel) -> list[dict[str, Any]]:
    if panel.red_below is not None:
        return [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    return [{"color": "green", "value": None}, {"color": "red", "value": panel.red_above}]

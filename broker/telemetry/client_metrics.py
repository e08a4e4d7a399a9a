"""The metrics that clients push (KIP-714), kept for Prometheus: the last value of each series, for a time.

A payload is a `MetricsData` of OpenTelemetry's protocol. Its gauges and sums that do not only grow become
`tidelog_client_metric_value`, sums that only grow `tidelog_client_metric_total`, histograms (without their buckets)
`tidelog_client_metric_observed`; the metric's name and the client are labels, and so are the attributes of the resource
and of the data point. Clients are asked for cumulative values, so a push that is lost loses nothing; a delta is added
to what is known.

Bounds: series in all and for each client, data points of a push, labels of a series and their characters. What is over
a bound, or of another kind, is dropped and counted. A series that is not pushed again expires.

Invariant: whatever a client sends, memory is bounded by the number of series, and nothing is raised but
`InvalidTelemetry`.

Sans-I/O: `now` is monotonic seconds. Entry: `ClientMetrics`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from tidelog.runtime.errors import InvalidInput

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric as OtlpMetric
    from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

MAX_SERIES: Final = 2_000
"""Default for the series of all clients, some 1 KB each. A scrape takes up to 40 µs of the event loop for each."""
MAX_CLIENT_SERIES: Final = 1_000
"""Series of one client: it cannot take the place of the others."""
MAX_POINTS: Final = 3_000
"""Data points, metrics, scopes and resources read of one push: each takes up to 30 µs of the event loop."""
MAX_LABELS: Final = 24
MAX_LABEL_CHARS: Final = 200
TERMINATED_KEPT_S: Final = 60.0
"""A client's last values outlive it for as long as scrapes are usually apart."""
EXPIRE_EVERY_S: Final = 1.0
"""While there is no room, expired series are looked for so often; else at each scrape."""
DROP_REASONS: Final = ("client_series", "series", "points", "not_requested", "kind")
RESERVED_LABELS: Final = frozenset(
    ("metric", "client_id", "client_instance_id", "client_software_name", "client_software_version", "quantile", "le")
)
"""Attributes with these names get the prefix `attribute_`."""
_DELTA = 1
"""AGGREGATION_TEMPORALITY_DELTA"""
_NO_VALUE = 1
"""Flag of a data point without a value."""
_NOT_OF_LABELS = re.compile(r"[^a-zA-Z0-9_]")


class InvalidTelemetry(InvalidInput):
    """A payload is no `MetricsData`. Kafka: INVALID_RECORD (87)."""

    kafka_code = 87


@dataclass(frozen=True, slots=True)
class ClientLabels:
    """Who pushed."""

    client_instance_id: str
    client_id: str
    client_software_name: str
    client_software_version: str


class _Key(NamedTuple):
    kind: str
    """"value", "total" or "observed"."""
    metric: str
    attributes: tuple[tuple[str, str], ...]


class _Point(NamedTuple):
    key: _Key
    number: float
    """The value, or the sum of a histogram."""
    observations: int
    is_delta: bool


class _Series:
    __slots__ = ("count", "expires_at", "number")

    def __init__(self) -> None:
        self.number = 0.0
        self.count = 0
        self.expires_at = 0.0


class ClientMetrics:
    """See the module."""

    def __init__(self, max_series: int = MAX_SERIES, max_client_series: int = MAX_CLIENT_SERIES) -> None:
        self._max_series = max_series
        self._max_client_series = max_client_series
        self._clients: dict[ClientLabels, dict[_Key, _Series]] = {}
        self._series = 0
        self._expired_at = -math.inf
        self._dropped = dict.fromkeys(DROP_REASONS, 0)

    def take(
        self, client: ClientLabels, payload: bytes, wants: Callable[[str], bool], now: float, kept_s: float
    ) -> None:
        """Take one push; its series are kept for `kept_s`. `wants`: whether a metric was asked for.

        Raises `InvalidTelemetry`.
        """
        data = _decode(payload)
        known = self._clients.get(client, {})
        for number, point in enumerate(self._points(data, wants)):
            if number >= MAX_POINTS:
                self._dropped["points"] += 1
                break
            if point is None:
                continue
            series = known.get(point.key) or self._new(known, point.key, now)
            if series is None:
                continue
            series.number = series.number + point.number if point.is_delta else point.number
            series.count = series.count + point.observations if point.is_delta else point.observations
            series.expires_at = now + kept_s
        if known:
            self._clients[client] = known

    def terminated(self, client: ClientLabels, now: float) -> None:
        """Let a client that has ended expire soon."""
        for series in self._clients.get(client, {}).values():
            series.expires_at = min(series.expires_at, now + TERMINATED_KEPT_S)

    def families(self, now: float) -> Iterable[Metric]:
        """Return what is known, as Prometheus families."""
        self._expire(now)
        families = {
            "value": GaugeMetricFamily("tidelog_client_metric_value", "Gauges pushed by clients (KIP-714)"),
            "total": CounterMetricFamily("tidelog_client_metric", "Sums pushed by clients (KIP-714)"),
            "observed": SummaryMetricFamily("tidelog_client_metric_observed", "Histograms pushed by clients (KIP-714)"),
        }
        for client, known in self._clients.items():
            for key, series in known.items():
                _add(families[key.kind], client, key, series)
        yield from families.values()
        yield GaugeMetricFamily("tidelog_client_metric_series", "Series pushed by clients", value=self._series)
        dropped = CounterMetricFamily(
            "tidelog_client_metric_dropped", "Data points of clients that were dropped", labels=["reason"]
        )
        for reason, count in self._dropped.items():
            dropped.add_metric([reason], count)
        yield dropped

    # --- series --------------------------------------------------------------------------------------------------

    def _new(self, known: dict[_Key, _Series], key: _Key, now: float) -> _Series | None:
        if len(known) >= self._max_client_series:
            self._dropped["client_series"] += 1
            return None
        if self._series >= self._max_series and now >= self._expired_at + EXPIRE_EVERY_S:
            self._expire(now)
        if self._series >= self._max_series:
            self._dropped["series"] += 1
            return None
        self._series += 1
        series = known[key] = _Series()
        return series

    def _expire(self, now: float) -> None:
        self._expired_at = now
        for client, known in list(self._clients.items()):
            gone = [key for key, series in known.items() if series.expires_at <= now]
            self._series -= len(gone)
            for key in gone:
                del known[key]
            if not known:
                del self._clients[client]

    # --- OpenTelemetry's data ------------------------------------------------------------------------------------

    def _points(self, data: MetricsData, wants: Callable[[str], bool]) -> Iterator[_Point | None]:
        """Yield the points, and None for each other element that took time to look at."""
        for resource in data.resource_metrics:
            yield None
            common = _labels(resource.resource.attributes)
            for scope in resource.scope_metrics:
                yield None
                for metric in scope.metrics:
                    yield None
                    if wants(metric.name):
                        yield from self._points_of(metric, common)
                    else:
                        self._dropped["not_requested"] += 1

    def _points_of(self, metric: OtlpMetric, common: Mapping[str, str]) -> Iterator[_Point | None]:
        name, kind = metric.name[:MAX_LABEL_CHARS], metric.WhichOneof("data")
        if kind == "gauge":
            yield from _numbers(metric.gauge.data_points, "value", name, common, is_delta=False)
        elif kind == "sum":
            is_delta = metric.sum.aggregation_temporality == _DELTA
            form = "total" if metric.sum.is_monotonic else "value"
            yield from _numbers(metric.sum.data_points, form, name, common, is_delta=is_delta)
        elif kind == "histogram":
            is_delta = metric.histogram.aggregation_temporality == _DELTA
            for point in metric.histogram.data_points:
                key = _Key("observed", name, _key({**common, **_labels(point.attributes)}))
                yield None if point.flags & _NO_VALUE else _Point(key, point.sum, point.count, is_delta)
        else:
            self._dropped["kind"] += 1


def _decode(payload: bytes) -> MetricsData:
    # Imported at the first push: the generated classes take 0.15 s, and most brokers are never pushed to.
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData

    try:
        data: MetricsData = MetricsData.FromString(payload)
    except DecodeError as error:
        raise InvalidTelemetry(f"the metrics of a client do not parse: {error}") from error
    return data


def _numbers(
    points: Iterable[Any], form: str, name: str, common: Mapping[str, str], *, is_delta: bool
) -> Iterator[_Point | None]:
    for point in points:
        which = point.WhichOneof("value")
        number = float(point.as_int if which == "as_int" else point.as_double)
        if which is None or point.flags & _NO_VALUE or math.isnan(number):
            yield None
            continue
        yield _Point(_Key(form, name, _key({**common, **_labels(point.attributes)})), number, 0, is_delta)


def _key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(labels.items())[:MAX_LABELS])


def _labels(attributes: Iterable[KeyValue]) -> dict[str, str]:
    found: dict[str, str] = {}
    for attribute in islice(attributes, MAX_LABELS):
        kind = attribute.value.WhichOneof("value")
        if kind not in ("string_value", "bool_value", "int_value", "double_value"):
            continue
        found[_label_name(attribute.key[:MAX_LABEL_CHARS])] = str(getattr(attribute.value, kind))[:MAX_LABEL_CHARS]
    return found


@functools.lru_cache(maxsize=256)
def _label_name(key: str) -> str:
    name = _NOT_OF_LABELS.sub("_", key)
    if name in RESERVED_LABELS or name.startswith("__") or not name[:1].isalpha():
        return f"attribute_{name.lstrip('_')}"
    return name


def _add(family: Metric, client: ClientLabels, key: _Key, series: _Series) -> None:
    labels = {
        **dict(key.attributes),
        "metric": key.metric,
        "client_instance_id": client.client_instance_id,
        "client_id": client.client_id,
        "client_software_name": client.client_software_name,
        "client_software_version": client.client_software_version,
    }
    if key.kind == "observed":
        family.add_sample(f"{family.name}_count", labels, series.count)
        family.add_sample(f"{family.name}_sum", labels, series.number)
    else:
        family.add_sample(f"{family.name}_total" if key.kind == "total" else family.name, labels, series.number)

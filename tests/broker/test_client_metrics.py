"""What clients push of their metrics: which series come out for Prometheus, and the bounds of it all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, MetricsData
from prometheus_client.core import Metric

from tests.support.examples import examples
from tidelog.broker.telemetry.client_metrics import (
    MAX_LABEL_CHARS,
    MAX_LABELS,
    MAX_POINTS,
    TERMINATED_KEPT_S,
    ClientLabels,
    ClientMetrics,
    InvalidTelemetry,
)

CLIENT = ClientLabels("id-1", "app", "java", "4.1.0")
OTHER = ClientLabels("id-2", "app", "java", "4.1.0")
CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
DELTA = AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA


class Payload:
    """A push that is being put together."""

    def __init__(self) -> None:
        self.data = MetricsData()
        self.resource = self.data.resource_metrics.add()
        self.metrics = self.resource.scope_metrics.add().metrics

    def attribute(self, key: str, value: str) -> Payload:
        self.resource.resource.attributes.add(key=key).value.string_value = value
        return self

    def number(
        self, kind: str, name: str, value: float, *, temporality: Any = CUMULATIVE, **attributes: str
    ) -> Payload:
        metric = self.metrics.add(name=name)
        if kind != "gauge":
            metric.sum.is_monotonic = kind == "total"
            metric.sum.aggregation_temporality = temporality
        point = (metric.gauge if kind == "gauge" else metric.sum).data_points.add()
        if isinstance(value, int):
            point.as_int = value
        else:
            point.as_double = value
        for key, text in attributes.items():
            point.attributes.add(key=key).value.string_value = text
        return self

    def histogram(self, name: str, count: int, total: float, temporality: Any = CUMULATIVE) -> Payload:
        metric = self.metrics.add(name=name)
        metric.histogram.aggregation_temporality = temporality
        metric.histogram.data_points.add(count=count, sum=total)
        return self

    @property
    def encoded(self) -> bytes:
        return bytes(self.data.SerializeToString())


def take(metrics: ClientMetrics, payload: Payload | bytes, now: float = 0.0, client: ClientLabels = CLIENT) -> None:
    encoded = payload if isinstance(payload, bytes) else payload.encoded
    metrics.take(client, encoded, lambda name: not name.startswith("no."), now, 30.0)


def samples(metrics: ClientMetrics, now: float = 0.0) -> dict[tuple[str, str], float]:
    """Values by sample and metric."""
    found: Iterable[Metric] = metrics.families(now)
    return {
        (one.name, one.labels.get("metric", one.labels.get("reason", ""))): one.value
        for family in found
        for one in family.samples
    }


def test_each_kind_has_its_family() -> None:
    metrics = ClientMetrics()
    payload = Payload().number("gauge", "a.gauge", 1.5).number("total", "a.total", 7).number("level", "a.level", -2)
    take(metrics, payload.histogram("a.seconds", 3, 0.75))
    found = samples(metrics)
    assert found["tidelog_client_metric_value", "a.gauge"] == 1.5
    assert found["tidelog_client_metric_total", "a.total"] == 7
    assert found["tidelog_client_metric_value", "a.level"] == -2
    assert found["tidelog_client_metric_observed_count", "a.seconds"] == 3
    assert found["tidelog_client_metric_observed_sum", "a.seconds"] == 0.75
    assert found["tidelog_client_metric_series", ""] == 4


def test_labels_are_the_client_and_the_attributes_of_resource_and_point() -> None:
    metrics = ClientMetrics()
    payload = Payload().attribute("client_rack", "r1").attribute("metric", "mine").attribute("1.x", "y")
    take(metrics, payload.number("gauge", "g", 1, topic="t" * 1_000))
    (sample,) = [one for family in metrics.families(0) for one in family.samples if one.labels.get("metric") == "g"]
    assert sample.labels == {
        "metric": "g",
        "client_instance_id": "id-1",
        "client_id": "app",
        "client_software_name": "java",
        "client_software_version": "4.1.0",
        "client_rack": "r1",
        "attribute_metric": "mine",
        "attribute_1_x": "y",
        "topic": "t" * MAX_LABEL_CHARS,
    }


def test_cumulative_values_replace_and_deltas_add() -> None:
    metrics = ClientMetrics()
    for value in (5, 8):
        payload = Payload().number("total", "c", value).number("total", "d", value, temporality=DELTA)
        take(metrics, payload.histogram("h", value, 0.5, DELTA))
    found = samples(metrics)
    assert found["tidelog_client_metric_total", "c"] == 8
    assert found["tidelog_client_metric_total", "d"] == 13
    assert found["tidelog_client_metric_observed_count", "h"] == 13
    assert found["tidelog_client_metric_observed_sum", "h"] == 1.0


def test_what_was_not_asked_for_has_no_value_or_is_of_another_kind_is_left_out() -> None:
    metrics = ClientMetrics()
    payload = Payload().number("gauge", "no.g", 1).number("gauge", "nan", math.nan).number("gauge", "g", 1)
    payload.metrics.add(name="summary").summary.data_points.add(count=1)
    take(metrics, payload)
    found = samples(metrics)
    assert [name for of, name in found if of == "tidelog_client_metric_value"] == ["g"]
    assert found["tidelog_client_metric_dropped_total", "not_requested"] == 1
    assert found["tidelog_client_metric_dropped_total", "kind"] == 1


def test_a_series_expires_that_is_not_pushed_again_and_that_of_an_ended_client_after_a_minute() -> None:
    metrics = ClientMetrics()
    take(metrics, Payload().number("gauge", "a", 1).number("gauge", "b", 1), 0)
    take(metrics, Payload().number("gauge", "a", 2), 20)
    assert samples(metrics, 29)["tidelog_client_metric_series", ""] == 2
    found = samples(metrics, 30)
    assert found["tidelog_client_metric_series", ""] == 1
    assert found["tidelog_client_metric_value", "a"] == 2
    assert samples(metrics, 50)["tidelog_client_metric_series", ""] == 0
    metrics.take(CLIENT, Payload().number("gauge", "a", 3).encoded, lambda _: True, 100, 900)
    metrics.terminated(CLIENT, 100)
    assert samples(metrics, 100 + TERMINATED_KEPT_S - 1)["tidelog_client_metric_value", "a"] == 3
    assert samples(metrics, 100 + TERMINATED_KEPT_S)["tidelog_client_metric_series", ""] == 0


def test_series_are_bounded_for_each_client_and_in_all_until_some_expire() -> None:
    metrics = ClientMetrics(max_series=5, max_client_series=3)
    payload = Payload()
    for number in range(4):
        payload.number("gauge", f"g{number}", number)
    take(metrics, payload, 0)
    take(metrics, payload, 10, OTHER)
    found = samples(metrics, 10)
    assert found["tidelog_client_metric_series", ""] == 5
    assert found["tidelog_client_metric_dropped_total", "client_series"] == 1
    assert found["tidelog_client_metric_dropped_total", "series"] == 2
    take(metrics, payload, 31, OTHER)  # nobody has scraped since, but the first client's have expired
    found = samples(metrics, 31)
    assert found["tidelog_client_metric_series", ""] == 3
    assert found["tidelog_client_metric_dropped_total", "client_series"] == 2


def test_what_is_read_of_a_push_is_bounded() -> None:
    metrics = ClientMetrics(max_series=MAX_POINTS * 2, max_client_series=MAX_POINTS * 2)
    payload = Payload()
    points = payload.metrics.add(name="g").gauge.data_points
    for number in range(MAX_POINTS + 100):
        points.add(as_int=number).attributes.add(key="n").value.int_value = number
    take(metrics, payload)
    found = samples(metrics)
    assert MAX_POINTS - 10 < found["tidelog_client_metric_series", ""] < MAX_POINTS
    assert found["tidelog_client_metric_dropped_total", "points"] == 1
    few = ClientMetrics()
    take(few, Payload().number("gauge", "g", 1, **{f"a{number}": "x" for number in range(100)}))
    (sample,) = [one for family in few.families(0) for one in family.samples if one.labels.get("metric") == "g"]
    assert len(sample.labels) == MAX_LABELS + 5
    take(few, bytes(MetricsData(resource_metrics=[{}] * 100_000).SerializeToString()))  # type: ignore[list-item]
    assert samples(few)["tidelog_client_metric_dropped_total", "points"] == 1


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4))
def test_any_bytes_are_taken_or_refused(garbage: bytes, changes: list[tuple[int, int]]) -> None:
    payload = Payload().attribute("k", "v").number("gauge", "g", 1.5, topic="t").number("total", "t", 3)
    whole = bytearray(payload.histogram("h", 1, 2.0).encoded)
    for at, byte in changes:
        whole[at % len(whole)] = byte
    metrics = ClientMetrics()
    for each in (garbage, bytes(whole)):
        try:
            take(metrics, each)
        except InvalidTelemetry:
            continue
    assert len(samples(metrics)) >= 1


def test_garbage_is_refused() -> None:
    with pytest.raises(InvalidTelemetry):
        take(ClientMetrics(), b"\xff\xff\xff")

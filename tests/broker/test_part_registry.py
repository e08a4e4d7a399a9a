"""What the parts of a broker tell of themselves, and that no part replaces what another one told."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric

from tidelog.broker.telemetry.metrics import Metrics
from tidelog.broker.telemetry.registry import PartRegistry


def gauge(value: int) -> Iterable[Metric]:
    yield GaugeMetricFamily("a_gauge", "Text", value=value)


def test_a_name_is_taken_once_for_each_kind_of_report() -> None:
    parts = PartRegistry()
    parts.add_figures("storage", lambda: 1, gauge)
    parts.add_problems("storage", list)
    parts.add_section("storage", dict)
    with pytest.raises(ValueError, match="'storage' is registered already"):
        parts.add_figures("storage", lambda: 2, gauge)
    with pytest.raises(ValueError, match="'storage' is registered already"):
        parts.add_problems("storage", list)
    with pytest.raises(ValueError, match="'storage' is registered already"):
        parts.add_section("storage", dict)
    assert [metric.samples[0].value for metric in parts.figures()] == [1]


def test_reports_are_asked_for_each_time_in_the_order_of_registration() -> None:
    parts = PartRegistry()
    found = ["it is full"]
    parts.add_problems("disk", lambda: found)
    parts.add_problems("bucket", lambda: ["it is away"])
    parts.add_section("wal", lambda: {"end_offset": len(found)})
    parts.add_section("bucket", lambda: {"healthy": False})
    assert parts.problems() == ["it is full", "it is away"]
    found.clear()
    assert parts.problems() == ["it is away"]
    assert parts.sections() == {"wal": {"end_offset": 0}, "bucket": {"healthy": False}}
    assert parts.section("wal") == {"end_offset": 0}


def test_a_part_that_registers_later_is_in_the_next_scrape() -> None:
    parts = PartRegistry()
    metrics = Metrics(parts, process=False)
    assert b"a_gauge" not in metrics.render()[0]
    parts.add_figures("late", lambda: 3, gauge)
    assert b"a_gauge 3.0" in metrics.render()[0]

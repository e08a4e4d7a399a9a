"""Expressions in PromQL: what they are written as, and what cannot be built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.promql import BYTES, RATIO, SECONDS, Amount, Catalogue, Nonsense, Query, Span, unit_of

PAGE = """
## Requests

| name | type | labels | meaning |
|---|---|---|---|
| `tidelog_request_seconds` | histogram | `api` | Time |
| `tidelog_errors_total` | counter | `api` (`Produce`, `Fetch`), `error` | Errors |
| `tidelog_held_bytes` | gauge | | Held |
| `tidelog_bound_bytes` | gauge | | Its bound |
| `tidelog_age_seconds` | gauge | `set` | Age |

## Others

| `tidelog_pushed` | summary | see above | Anything |
"""
FIVE = Span(300)


@pytest.fixture
def known(tmp_path: Path) -> Catalogue:
    page = tmp_path / "metrics.md"
    page.write_text(PAGE, encoding="utf-8")
    return Catalogue.read(page)


def test_the_page_tells_types_labels_units_and_sections(known: Catalogue) -> None:
    rows = known.rows
    assert rows["tidelog_errors_total"].kind == "counter"
    assert rows["tidelog_errors_total"].labels == frozenset({"api", "error"})
    assert (rows["tidelog_pushed"].section, rows["tidelog_pushed"].labels) == ("Others", None)
    assert [rows[name].unit for name in ("tidelog_held_bytes", "tidelog_age_seconds")] == [BYTES, SECONDS]
    assert unit_of("tidelog_wait_seconds_total") == SECONDS and unit_of("tidelog_dirty_ratio") == RATIO


def test_a_page_without_metrics_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "metrics.md"
    page.write_text("# Metrics\n", encoding="utf-8")
    with pytest.raises(Nonsense, match="lists 0 metrics"):
        Catalogue.read(page)


def test_expressions_are_written_as_prometheus_reads_them(known: Catalogue) -> None:
    errors, held, bound = known.series("tidelog_errors_total", api="~a|b"), *map(known.series, HELD)
    assert errors.rate(FIVE).text() == 'rate(tidelog_errors_total{api=~"a|b"}[5m])'
    assert (held / bound > Amount(0.8, RATIO)).text() == "(tidelog_held_bytes / tidelog_bound_bytes) > 0.8"
    assert (held - bound).total("sum", "job").text() == "sum by (job) (tidelog_held_bytes - tidelog_bound_bytes)"
    assert held.unless(bound, "job", "x").text() == "tidelog_held_bytes unless on (job, x) tidelog_bound_bytes"
    joined = held.less_each(bound, "job", "x")
    assert joined.text() == "tidelog_held_bytes - on (job, x) group_right () tidelog_bound_bytes"
    assert joined.slope(FIVE).text() == f"deriv(({joined.text()})[5m:])"
    assert joined.slope(FIVE).unit == f"{joined.unit}/s"
    assert held.time().text() == "timestamp(tidelog_held_bytes)"
    quantile = known.quantile(0.99, "tidelog_request_seconds", FIVE, ["job"], api="Produce")
    wanted = 'sum by (le, job) (rate(tidelog_request_seconds_bucket{api="Produce"}[5m]))'
    assert quantile.text() == f"histogram_quantile(0.99, {wanted})"
    assert quantile.metrics == {"tidelog_request_seconds"} and quantile.unit == SECONDS
    begun = "tidelog_errors_total unless tidelog_errors_total offset 5m"
    assert known.series("tidelog_errors_total").grown(FIVE).text() == (
        f"({begun}) or increase(tidelog_errors_total[5m])"
    )


HELD = ("tidelog_held_bytes", "tidelog_bound_bytes")


def test_what_passes_can_pass_faster(known: Catalogue) -> None:
    age = known.series("tidelog_age_seconds")
    assert (age > Amount(120, SECONDS, is_span=True)).text(20) == "tidelog_age_seconds > 6"
    assert (age > Amount(120, SECONDS)).text(20) == "tidelog_age_seconds > 120"
    assert known.series("tidelog_errors_total").rate(FIVE).text(40) == "rate(tidelog_errors_total[7s500ms])"
    assert [Span(each).text() for each in (0, 90, 3600, 129_600)] == ["0s", "1m30s", "1h", "1d12h"]


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda known: known.series("tidelog_nothing"), "no metric tidelog_nothing"),
        (lambda known: known.series("tidelog_held_bytes", api="x"), "has no label api"),
        (lambda known: known.series("tidelog_request_seconds"), "is a histogram"),
        (lambda known: known.quantile(0.5, "tidelog_held_bytes", FIVE, []), "has no quantiles"),
        (lambda known: known.series("tidelog_errors_total") > Amount(1), "is a counter"),
        (lambda known: known.series("tidelog_errors_total").total("sum"), "is a counter"),
        (lambda known: known.series("tidelog_held_bytes").rate(FIVE), "which is no counter"),
        (lambda known: known.series("tidelog_errors_total").slope(FIVE), "is a counter"),
        (
            lambda known: known.series("tidelog_held_bytes").less_each(known.series("tidelog_age_seconds"), "job"),
            "in seconds",
        ),
        (lambda known: known.series("tidelog_held_bytes") > Amount(1, SECONDS), "compared with seconds"),
        (lambda known: known.series("tidelog_held_bytes") - known.series("tidelog_age_seconds"), "in seconds"),
    ],
)
def test_what_makes_no_sense_cannot_be_built(known: Catalogue, build: Callable[[Catalogue], Query], why: str) -> None:
    with pytest.raises(Nonsense, match=why):
        build(known)


def test_a_series_of_unknown_labels_takes_any(known: Catalogue) -> None:
    with pytest.raises(Nonsense, match="is a summary"):
        known.series("tidelog_pushed", whatever="x")

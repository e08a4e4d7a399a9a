"""Rules and dashboards: the committed files are what the generator makes, of metrics that exist, with the right units.

Prometheus' own checks of them, and the faults that make each alert fire, are in `tests/e2e/test_alerts.py`.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.alerts import Alert, alerts
from tools.dashboards import UNITS, dashboards
from tools.monitoring import JOB, ROOT, files, main, rules, table, with_table
from tools.passages import anchors
from tools.promql import COUNT, PROCESS_METRICS, RATIO, SECONDS, Catalogue, unit_of

DEPLOY = ROOT / "deploy"
KNOWN = Catalogue.read(ROOT / "docs" / "metrics.md")
ALERTS = [alert for group in alerts(KNOWN, JOB).values() for alert in group]
DASHBOARDS = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in (DEPLOY / "grafana").glob("*.json")}
_NAME = re.compile(r"\btidelog_[a-z_]+")

each_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
each_dashboard = pytest.mark.parametrize("name", sorted(DASHBOARDS))


def family(name: str) -> str:
    """The row of the page that a series belongs to."""
    for suffix in ("", "_bucket", "_count", "_sum"):
        if name.removesuffix(suffix) in KNOWN.rows:
            return name.removesuffix(suffix)
    raise AssertionError(f"{name} is not in docs/metrics.md")


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_the_committed_files_are_what_the_generator_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out
    made = {name for name in files(JOB, "docs/operations.md") if name.startswith("grafana/")}
    assert {f"grafana/{name}" for name in DASHBOARDS} == made


def test_a_file_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--to", str(tmp_path)]) == 0
    (tmp_path / "prometheus" / "alerts.yml").write_text("groups: []\n")
    capsys.readouterr()
    assert main(["--check", "--to", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [f"{tmp_path / 'prometheus' / 'alerts.yml'}: differs"]
    shutil.rmtree(tmp_path / "grafana")
    assert main(["--to", str(tmp_path)]) == 0 and main(["--check", "--to", str(tmp_path)]) == 0


def test_a_dashboard_that_is_no_longer_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--to", str(tmp_path)]) == 0
    left_over, of_others = tmp_path / "grafana" / "tidelog-gone.json", tmp_path / "grafana" / "mine.json"
    left_over.write_text("{}\n")
    of_others.write_text("{}\n")
    capsys.readouterr()
    assert main(["--check", "--to", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [f"{left_over}: no longer made; delete it"]
    assert main(["--to", str(tmp_path)]) == 0 and left_over.exists(), "files that it did not write are not its own"
    assert capsys.readouterr().out.splitlines() == [f"{left_over}: no longer made; delete it"]
    left_over.unlink()
    assert main(["--check", "--to", str(tmp_path)]) == 0


def test_another_job_and_another_page_are_in_the_rules() -> None:
    made = yaml.safe_load(rules(alerts(KNOWN, "kafka"), "there.md"))
    found = [rule for group in made["groups"] for rule in group["rules"]]
    assert 'up{job="kafka"} == 0' in [rule["expr"] for rule in found]
    assert all(rule["annotations"]["runbook_url"].startswith("there.md#") for rule in found)


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no lines"):
        with_table("# Operations\n", table({}))


@each_alert
def test_an_alert_names_metrics_that_exist_and_a_section_with_the_cure(alert: Alert) -> None:
    named = {family(name) for name in _NAME.findall(alert.when.text())}
    assert alert.when.metrics - set(PROCESS_METRICS) == named
    assert alert.anchor in anchors(ROOT / "docs" / "operations.md")
    assert len(alert.description) > 80 and not alert.summary.endswith(".")


@each_alert
def test_the_texts_of_an_alert_name_only_labels_that_its_expression_has(alert: Alert) -> None:
    """Others are written as nothing, which is the worst moment to find out."""
    text = alert.when.text()
    has = {"job", "cluster", "instance"}
    by = re.match(r"(?:\()?(?:histogram_quantile\([\d.]+, )?(?:sum|max|min|count) by \(([^)]*)\)", text)
    if by is None:
        has |= {label for name in alert.when.metrics for label in (labels_of(name))}
    else:
        has = set(by[1].split(", "))
    used = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.description))
    assert used <= has, text


def labels_of(name: str) -> frozenset[str]:
    if name in PROCESS_METRICS:
        return frozenset()
    labels = KNOWN.rows[name].labels
    return labels if labels is not None else frozenset({"client_id"})


def test_thresholds_are_in_the_units_of_what_they_are_compared_with() -> None:
    """`tools.promql` refuses others; here the values are looked at that a wrong unit would make absurd."""
    units = {alert.name: alert.when.unit for alert in ALERTS}
    assert {units[name] for name in ("TidelogDiskNearlyFull", "TidelogProducersWillWait")} == {RATIO}
    assert {units[name] for name in ("TidelogProduceSlow", "TidelogUploadsStalled", "TidelogClocksDiffer")} == {SECONDS}
    for alert in ALERTS:
        if "$VALUE" in alert.summary:
            assert alert.when.unit in (COUNT, RATIO, SECONDS), alert.name


@each_dashboard
def test_panels_show_metrics_that_exist_with_their_units(name: str) -> None:
    for panel in panels(DASHBOARDS[name]):
        for target in panel["targets"]:
            query = target["expr"]
            names = {family(each) for each in _NAME.findall(query)}
            expected = expected_units(query, names)
            assert not names or panel["fieldConfig"]["defaults"]["unit"] in expected, (panel["title"], query)
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label == "instance" or any(label in labels_of(each) | {"metric"} for each in names), query


def expected_units(query: str, names: set[str]) -> set[str]:
    """By the names alone, without the generator's own knowledge."""
    found = set()
    for name in names:
        rated = "rate(" in query and "histogram_quantile" not in query and "_sum" not in query
        counted = query.startswith("count(")
        found.add(UNITS[COUNT] if counted else UNITS[unit_of(name) + ("/s" if rated else "")])
    return found


@each_dashboard
def test_a_dashboard_is_one_that_grafana_can_place(name: str) -> None:
    dashboard = DASHBOARDS[name]
    assert dashboard["uid"] == name.removesuffix(".json") and len(dashboard["uid"]) <= 40
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    variables = [each["name"] for each in dashboard["templating"]["list"]]
    assert variables == ["datasource", "job", "cluster", "instance"]


def test_every_metric_of_the_page_is_on_a_panel() -> None:
    queries = " ".join(
        target["expr"] for one in DASHBOARDS.values() for panel in panels(one) for target in panel["targets"]
    )
    shown = {family(name) for name in _NAME.findall(queries)}
    assert set(KNOWN.rows) - shown == set()


def test_a_new_metric_gets_a_panel_by_itself(tmp_path: Path) -> None:
    page = tmp_path / "metrics.md"
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    row = "| `tidelog_brand_new_bytes_total` | counter | `topic` | New |\n"
    page.write_text(
        text.replace("| `tidelog_topic_produced_bytes_total`", row + "| `tidelog_topic_produced_bytes_total`")
    )
    made = dashboards(Catalogue.read(page))
    (panel,) = (each for one in made.values() for each in panels(one) if each["title"] == "Brand new")
    assert panel["fieldConfig"]["defaults"]["unit"] == "Bps"
    assert "rate(tidelog_brand_new_bytes_total{" in panel["targets"][0]["expr"]

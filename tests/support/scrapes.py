"""What Prometheus would have of real brokers: their `/metrics`, scraped again and again, as series that promtool reads.

`Scrapes` is the server's half: at each tick it asks all targets, notes `up`, and marks the series of a target that does
not answer as stale. `Rules` is the other half: rules over these series, evaluated tick by tick by `promtool test
rules`, and what fires at a tick. No time passes faster than it does: it is the rules that ask for less of it
(`tools.monitoring.rules`, `faster`).

Entry: `Scrapes`, `Rules`.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster_process import tidelog_json
from tools.alerts import Alert
from tools.monitoring import JOB, rules

Labels = tuple[tuple[str, str], ...]
TICK_S = 0.5
STALE, MISSING = "stale", "_"
_SUFFIXES = ("", "_bucket", "_count", "_sum")


def targets(bootstrap: str) -> dict[str, str]:
    """The addresses of the metrics of a cluster's brokers, by instance."""
    status = tidelog_json(bootstrap, "status", ok=(0, 10))
    return {f"broker-{row['id']}": f"{row['admin_url']}/metrics" for row in status["nodes"]}


class Scrapes:
    """The series of some metrics; a context manager that scrapes while it is open."""

    def __init__(self, targets: Mapping[str, str], metrics: Collection[str], *, cluster: str = "c") -> None:
        """`metrics`: names of families; those of `targets` that are not asked for are dropped."""
        self._targets = dict(targets)
        self._kept = {name + suffix for name in metrics for suffix in _SUFFIXES}
        self._cluster = cluster
        self._series: dict[tuple[str, Labels], dict[int, str]] = {}
        self._last: dict[str, set[tuple[str, Labels]]] = {}
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrapes")
        self.ticks = 0
        """Ticks that are complete."""

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        tick = 0
        while not self._ended.wait(max(0.0, self._began + tick * TICK_S - time.monotonic())):
            found = {instance: _ask(url) for instance, url in self._targets.items()}
            with self._lock:
                for instance, text in found.items():
                    self._note(tick, instance, text)
                self.ticks = tick + 1
            tick = max(tick + 1, math.ceil((time.monotonic() - self._began) / TICK_S))

    def _note(self, tick: int, instance: str, text: str | None) -> None:
        own = (("job", JOB), ("instance", instance), ("cluster", self._cluster))
        now: set[tuple[str, Labels]] = set()
        self._series.setdefault(("up", own), {})[tick] = "0" if text is None else "1"
        for family in text_string_to_metric_families(text) if text is not None else ():
            for sample in family.samples:
                if sample.name in self._kept:
                    key = (sample.name, (*sorted(sample.labels.items()), *own))
                    now.add(key)
                    self._series.setdefault(key, {})[tick] = repr(float(sample.value))
        for key in self._last.get(instance, set()) - now:
            self._series[key][tick] = STALE
        self._last[instance] = now

    def series(self) -> list[dict[str, str]]:
        """The series up to the last tick that is complete, as a test of rules names them."""
        with self._lock:
            last = self.ticks - 1
            found = {key: dict(values) for key, values in self._series.items()}
        return [
            {
                "series": name + "{" + ", ".join(f"{label}={json.dumps(value)}" for label, value in labels) + "}",
                "values": " ".join(values.get(tick, MISSING) for tick in range(last + 1)),
            }
            for (name, labels), values in found.items()
        ]


def _ask(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            text: str = response.read().decode()
            return text
    except (OSError, HTTPException):
        return None


class Rules:
    """Some alerts, all their durations divided by `faster`, and what of them fires."""

    def __init__(self, promtool: Path, folder: Path, alerts: Sequence[Alert], faster: float) -> None:
        self._promtool = promtool
        self._folder = folder
        self.names = {alert.name for alert in alerts}
        self.metrics = {name for alert in alerts for name in alert.when.metrics}
        self._rules = folder / "alerts.yml"
        self._rules.write_text(rules({"all": list(alerts)}, "page.md", faster=faster), encoding="utf-8")

    def firing(self, scrapes: Scrapes, tick: int) -> set[str]:
        """Which of the alerts fire at a tick."""
        expression = 'group by (alertname) (ALERTS{alertstate="firing"})'
        wanted = {"expr": expression, "eval_time": _at(tick), "exp_samples": []}
        done = self._test(scrapes.series(), promql_expr_test=[wanted])
        if done.returncode == 0:
            return set()
        said = done.stdout + done.stderr
        found = set(re.findall(r'alertname="(\w+)"', said.partition("got:")[2]))
        assert found and found <= self.names, said
        return found

    def told(self, scrapes: Scrapes, name: str, tick: int) -> str:
        """What the alerts of a name, which fires, say at a tick: labels and texts as promtool prints them."""
        wanted = {"alertname": name, "eval_time": _at(tick), "exp_alerts": []}
        done = self._test(scrapes.series(), alert_rule_test=[wanted])
        assert done.returncode != 0, f"{name} does not fire"
        return done.stdout + done.stderr

    def _test(self, series: list[dict[str, str]], **tests: Any) -> subprocess.CompletedProcess[str]:
        interval = f"{round(TICK_S * 1000)}ms"
        group = {"interval": interval, "input_series": series, **tests}
        document = {"rule_files": [self._rules.name], "evaluation_interval": interval, "tests": [group]}
        file = self._folder / "test.yml"
        file.write_text(json.dumps(document), encoding="utf-8")  # which is YAML, and is written in no time
        return subprocess.run(
            [self._promtool, "test", "rules", file.name], cwd=self._folder, capture_output=True, text=True, check=False
        )


def _at(tick: int) -> str:
    return f"{round(tick * TICK_S * 1000)}ms"

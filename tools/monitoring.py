"""Make what watches Tidelog from docs/metrics.md and `tools.alerts`: rules for Prometheus, dashboards for Grafana, and
the table of the alerts in docs/operations.md.

    python -m tools.monitoring                    write deploy/prometheus, deploy/grafana and the table
    python -m tools.monitoring --check            only say which files differ, or are no longer made; exit code 1 if any
    python -m tools.monitoring --to DIR --job kafka --docs https://wiki/tidelog.md
                                                  for brokers that are scraped as another job, with links to your copy
                                                  of the page

Entry: `main`; `rules` for tests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tools.alerts import Alert, alerts, written
from tools.dashboards import dashboards
from tools.promql import Catalogue

ROOT: Final = Path(__file__).resolve().parents[1]
JOB: Final = "tidelog"
PAGE: Final = "docs/operations.md"
BEGIN, END = "<!-- made by python -m tools.monitoring: begin -->\n", "<!-- end -->\n"
HEAD: Final = "# Made by `python -m tools.monitoring` from docs/metrics.md and tools/alerts.py. Do not edit it here.\n"
WIDTH: Final = 110


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML tells no types
    """Writes long texts in folded lines."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = ">" if len(value) > WIDTH * 2 // 3 else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def rules(groups: dict[str, list[Alert]], docs: str, *, faster: float = 1.0) -> str:
    """Return a file of alerting rules. `faster` divides all durations, for tests that cannot wait."""
    document = {
        "groups": [
            {"name": name, "rules": [_rule(alert, docs, faster) for alert in members]}
            for name, members in groups.items()
        ]
    }
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)
    return HEAD + text


def _rule(alert: Alert, docs: str, faster: float) -> dict[str, Any]:
    summary, description = written(alert)
    hold = {"for": alert.hold.text(faster)} if alert.hold.seconds else {}
    return {
        "alert": alert.name,
        "expr": alert.when.text(faster),
        **hold,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": summary,
            "description": description,
            "runbook_url": f"{docs}#{alert.anchor}",
        },
    }


def table(groups: dict[str, list[Alert]]) -> str:
    """Return the table of docs/operations.md."""
    lines = ["| alert | severity | when | more |", "|---|---|---|---|"]
    for members in groups.values():
        for alert in members:
            hold = f", for {alert.hold.text()}" if alert.hold.seconds else ""
            when = alert.when.text().replace("|", "\\|")
            title = alert.anchor.replace("-", " ").capitalize()
            lines.append(f"| {alert.name} | {alert.severity} | `{when}`{hold} | [{title}](#{alert.anchor}) |")
    return "\n".join(lines) + "\n"


def with_table(page: str, made: str) -> str:
    """Return the page with this table between its marks. Raises `ValueError` if it has no marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no lines {BEGIN.strip()} and {END.strip()}")
    return before + begin + made + end + after


def files(job: str, docs: str) -> dict[str, str]:
    """Return the generated files by their path below `deploy`."""
    known = Catalogue.read(ROOT / "docs" / "metrics.md")
    found = {"prometheus/alerts.yml": rules(alerts(known, job), docs)}
    for name, dashboard in dashboards(known).items():
        found[f"grafana/{name}"] = json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"
    return found


def _write(made: Iterable[tuple[Path, str]], *, only_check: bool) -> list[Path]:
    """Write what differs; return it."""
    different = [(path, text) for path, text in made if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path, text in different if not only_check else ():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [path for path, _ in different]


def _left_over(target: Path, made: Iterable[tuple[Path, str]]) -> list[Path]:
    """Return the dashboards in the folder that are named as ours and no longer made; others are somebody else's."""
    return sorted(set((target / "grafana").glob("tidelog-*.json")) - {path for path, _ in made})


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or check them. A dashboard that is no longer made is named, and left to who deletes it."""
    parser = argparse.ArgumentParser(description="Rules, dashboards and the table of the alerts.")
    parser.add_argument("--check", action="store_true", help="only say what differs")
    parser.add_argument("--to", type=Path, help="write to this directory instead of deploy/, and no table")
    parser.add_argument("--job", default=JOB, help="the job that scrapes the brokers (default: %(default)s)")
    parser.add_argument("--docs", default=PAGE, help="where the page for operators is (default: %(default)s)")
    options = parser.parse_args(arguments)
    target = options.to or ROOT / "deploy"
    made = [(target / name, text) for name, text in files(options.job, options.docs).items()]
    if options.to is None:
        page = ROOT / PAGE
        known = Catalogue.read(ROOT / "docs" / "metrics.md")
        made.append((page, with_table(page.read_text(encoding="utf-8"), table(alerts(known, options.job)))))
    different = _write(made, only_check=options.check)
    for path in different:
        print(f"{path}: {'differs' if options.check else 'written'}")
    left_over = _left_over(target, made)
    for path in left_over:
        print(f"{path}: no longer made; delete it")
    return 1 if options.check and (different or left_over) else 0


if __name__ == "__main__":
    raise SystemExit(main())

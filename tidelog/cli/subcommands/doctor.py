"""`tidelog doctor`: looks at a configuration, this machine and a cluster, and says what is wrong and what cures it.

Exit code 10 if there is a problem. Warnings, and what could not be looked at, do not change it.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tidelog.cli import output
from tidelog.cli.options import config_options, format_option, secret_file_option

if TYPE_CHECKING:
    from tidelog.doctor.findings import DoctorFinding

SOMETHING_WRONG: Final = 10
"""Exit code."""
MAX_COLUMNS: Final = 110


@click.command()
@format_option
@click.option("--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="The node's data directory.")
@click.option(
    "--bootstrap",
    metavar="HOST:PORT",
    help="Any broker of the cluster [default: what the configuration says, else 127.0.0.1:9092].",
)
@click.option("--offline", is_flag=True, help="Look at this machine only, and ask no cluster.")
@click.option("--list", "lists", is_flag=True, help="Print all findings there are, what each means and its cure.")
@secret_file_option
@config_options
def doctor(
    config_file: Path | None,
    assignments: tuple[str, ...],
    style: str,
    data_dir: Path | None,
    bootstrap: str | None,
    offline: bool,
    lists: bool,
) -> None:
    """Say what is wrong with a node or a cluster, why it matters, and the cure."""
    if lists:
        from tidelog.doctor.advice import ADVICE

        rows = [{"check": name, **each._asdict()} for name, each in ADVICE.items()]
        output.emit(json.dumps(rows, indent=2) if style == "json" else "\n".join(map(_advice, rows)))
        return
    from tidelog.cli.examine import DoctorTarget, gather_facts
    from tidelog.doctor.findings import count
    from tidelog.doctor.judge import judge

    findings = judge(gather_facts(DoctorTarget(config_file, assignments, data_dir, bootstrap, offline)).facts)
    if style == "json":
        output.emit(json.dumps(document(findings), indent=2, ensure_ascii=False))
    else:
        output.emit(render(findings, _columns()))
    if count(findings)["problem"]:
        raise click.exceptions.Exit(SOMETHING_WRONG)


def document(findings: list[DoctorFinding]) -> dict[str, Any]:
    """Return the findings for programs."""
    import msgspec

    from tidelog.doctor.findings import count

    return {"counts": count(findings), "findings": [msgspec.to_builtins(each) for each in findings]}


def render(findings: list[DoctorFinding], columns: int) -> str:
    """Return the findings for people: what is wrong in full, the rest a line each."""
    from tidelog.doctor.findings import count

    blocks = [_block(each, columns) for each in findings if each.level != "ok"]
    well = [f"ok       {each.check}, {each.where}: {each.seen}" for each in findings if each.level == "ok"]
    counts = count(findings)
    last = f"{counts['problem']} problems, {counts['warning']} warnings, {counts['ok']} ok"
    if counts["unknown"]:
        last += f"; {counts['unknown']} not looked at"
    return "\n".join([*blocks, *(_wrapped(each, columns) for each in well), last])


def _block(finding: DoctorFinding, columns: int) -> str:
    lines = [f"{finding.level:<8} {finding.check}, {finding.where}: {finding.seen}"]
    lines += [f"         why:  {finding.why}", f"         cure: {finding.cure}"]
    return "\n".join(_wrapped(each, columns) for each in lines) + "\n"


def _wrapped(line: str, columns: int) -> str:
    return "\n".join(
        textwrap.wrap(line, columns, subsequent_indent=" " * 15, break_long_words=False, break_on_hyphens=False)
    )


def _advice(row: dict[str, Any]) -> str:
    return _wrapped(f"{row['check']} ({row['level']}): {row['why']} Cure: {row['cure']}", _columns())


def _columns() -> int:
    return min(MAX_COLUMNS, shutil.get_terminal_size().columns) if sys.stdout.isatty() else MAX_COLUMNS

"""`tidelog check HISTORY`: check a recorded history of clients' operations against the rules of docs/checkers.md.

Exit codes: 0 no findings, 1 findings; 3, 6, 7 if the file is missing, unreadable, or not a history.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidelog.cli import output
from tidelog.cli.options import DurationType, format_option
from tidelog.runtime.progress_bar import ProgressBar

if TYPE_CHECKING:
    from tidelog.simulation.checkers import CheckOptions
    from tidelog.simulation.checkers.history import History


@click.command()
@click.argument("history", type=click.Path(path_type=Path))
@click.option("--max-lag", type=DurationType(), help="An empty poll of this length is a finding [only shown].")
@click.option("--settle", type=DurationType(), help="Sends that begin this long after the faults end must succeed.")
@click.option(
    "--gaps-allowed", "gaps", multiple=True, metavar="TOPIC", help="Records may disappear from it; may repeat."
)
@format_option
def check(history: Path, max_lag: int | None, settle: int | None, gaps: tuple[str, ...], style: str) -> None:
    """Check a recorded history; prints the findings with the operations that prove them."""
    from tidelog.simulation.checkers import CheckOptions
    from tidelog.simulation.checkers.history import load

    options = CheckOptions(
        gaps_allowed=frozenset(gaps),
        max_lag_us=max_lag * 1000 if max_lag is not None else None,
        settle_us=settle * 1000 if settle is not None else None,
    )
    with ProgressBar("reading") as progress:
        loaded = load(history, progress.update)
    document = _document(loaded, options)
    output.show(style, lambda: document, _render)
    if document["findings"]:
        raise click.exceptions.Exit(1)


def _document(history: History, options: CheckOptions) -> dict[str, Any]:
    import msgspec

    from tidelog.simulation.checkers import check, lag_of

    with ProgressBar("checking", unit="partitions") as progress:
        findings = check(history, options, progress.update)
        progress.describe("looking for the worst lag")
        lag = lag_of(history)
    return {
        "about": history.about,
        "operations": len(history),
        "worst_lag_ms": lag.lag_us / 1000 if lag is not None else 0.0,
        "worst_lag": {**msgspec.to_builtins(lag), "text": lag.text()} if lag is not None else None,
        "findings": [{**msgspec.to_builtins(one), "text": one.text()} for one in findings],
    }


def _render(document: dict[str, Any]) -> str:
    findings = document["findings"]
    verdict = f"{len(findings)} finding{'' if len(findings) == 1 else 's'}" if findings else "nothing is wrong"
    lines = [one["text"] for one in findings]
    if document["worst_lag"] is not None:
        lines.append(f"worst lag: {document['worst_lag']['text']}")
    lines.append(f"{document['operations']} operations, worst lag {document['worst_lag_ms']:.1f} ms: {verdict}")
    return "\n".join(lines)

"""`tidelog check HISTORY`: holds what clients saw in a recorded run against every rule of docs/checkers.md.

Exit codes: 0 nothing is wrong, 1 there are findings; 3, 6, 7 when the file is missing, unreadable, or no history.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidelog import output
from tidelog.options import DurationType, format_option

if TYPE_CHECKING:
    from simulation.checkers import CheckOptions
    from simulation.history import History


@click.command()
@click.argument("history", type=click.Path(path_type=Path))
@click.option("--max-lag", type=DurationType(), help="A poll that finds nothing for so long is a finding [only shown].")
@click.option("--settle", type=DurationType(), help="Sends that begin so long after the healing must succeed.")
@click.option("--gaps-allowed", "gaps", multiple=True, metavar="TOPIC", help="Records may vanish from it; may repeat.")
@format_option
def check(history: Path, max_lag: int | None, settle: int | None, gaps: tuple[str, ...], style: str) -> None:
    """Check what clients saw in a run that was recorded; prints the findings with the operations that prove them."""
    from simulation.checkers import CheckOptions
    from simulation.history import load

    options = CheckOptions(
        gaps_allowed=frozenset(gaps),
        max_lag_us=max_lag * 1000 if max_lag is not None else None,
        settle_us=settle * 1000 if settle is not None else None,
    )
    loaded = load(history)
    document = _document(loaded, options)
    output.show(style, lambda: document, _render)
    if document["findings"]:
        raise click.exceptions.Exit(1)


def _document(history: History, options: CheckOptions) -> dict[str, Any]:
    import msgspec

    from simulation.checkers import check, lag_of

    findings, lag = check(history, options), lag_of(history)
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

"""`tidelog controller`: the quorum that keeps the metadata: who is in it, who leads, and changes of both.

Every sub-command asks a broker, which asks the controllers.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from tidelog import output
from tidelog.client import Cluster
from tidelog.commands.status import SOMETHING_WRONG
from tidelog.options import bootstrap_option, format_option, watch_option

Document = dict[str, Any]


@click.group()
def controller() -> None:
    """Show and change the quorum of controllers."""


@controller.command()
@format_option
@watch_option
@bootstrap_option
def status(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the controllers: who is active, how far behind the others are."""
    cluster = Cluster(bootstrap)
    document = output.show(style, lambda: cluster.get("/controllers"), _render, watch_s=watch_s)
    if document["problems"]:
        raise click.exceptions.Exit(SOMETHING_WRONG)


@controller.command()
@click.option("--to", "target", type=click.IntRange(min=0), metavar="ID", help="To this member; else to any.")
@bootstrap_option
def transfer(target: int | None, bootstrap: str) -> None:
    """Have the active controller hand over to another one."""
    cluster = Cluster(bootstrap)
    cluster.post("/controllers/transfer" + ("" if target is None else f"?to={target}"))
    click.echo("handed over" if target is None else f"handed over to controller {target}")


@controller.command()
@click.argument("member", metavar="ID@HOST:PORT")
@bootstrap_option
def add(member: str, bootstrap: str) -> None:
    """Add a controller. Its process must run already, with the quorum and itself in `controller.members`."""
    answer = Cluster(bootstrap).post(f"/controllers/add?member={quote(member, safe='')}")
    click.echo(f"added controller {answer['id']} at {answer['address']}")


@controller.command()
@click.argument("node_id", metavar="ID", type=click.IntRange(min=0))
@bootstrap_option
def remove(node_id: int, bootstrap: str) -> None:
    """Remove a controller. The active one hands over first. Stop its process afterwards."""
    Cluster(bootstrap).post(f"/controllers/remove?id={node_id}")
    click.echo(f"removed controller {node_id}")


def _render(document: Document) -> str:
    members = document["members"]
    lags = {peer["id"]: peer["lag"] for row in members if row["state"] == "active" for peer in row.get("peers") or ()}
    headers = ["ID", "ADDRESS", "STATE", "PID", "TERM", "LAST-INDEX", "APPLIED", "LAG", "JOURNAL"]
    rows = [
        [
            row["id"],
            row["address"],
            row["state"],
            row["pid"],
            row.get("term"),
            row.get("last_index"),
            row.get("applied_index"),
            0 if row["state"] == "active" else lags.get(row["id"]),
            output.size(row["journal_bytes"]) if row.get("journal_bytes") is not None else None,
        ]
        for row in members
    ]
    table = output.table(headers, rows, right=["ID", "PID", "TERM", "LAST-INDEX", "APPLIED", "LAG", "JOURNAL"])
    problems = document["problems"]
    if not problems:
        return f"{table}\n\nno problems"
    return f"{table}\n\nproblems:\n" + "\n".join(f"  - {problem}" for problem in problems)

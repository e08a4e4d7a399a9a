"""`tidelog controller`: show and change the quorum of controllers and the active controller.

Every subcommand sends its request to a broker, which forwards it to the controllers.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection
from tidelog.cli.options import admin_options, format_option, watch_option
from tidelog.cli.subcommands.status import SOMETHING_WRONG

Document = dict[str, Any]


@click.group()
def controller() -> None:
    """Show and change the quorum of controllers."""


@controller.command()
@format_option
@watch_option
@admin_options
def status(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the controllers: the active one, and the lag of the others."""
    cluster = ClusterConnection(bootstrap)
    document = output.show(style, lambda: cluster.get("/controllers"), _render, watch_s=watch_s)
    if document["problems"]:
        raise click.exceptions.Exit(SOMETHING_WRONG)


@controller.command()
@click.option("--to", "target", type=click.IntRange(min=0), metavar="ID", help="To this member; default: any.")
@admin_options
def transfer(target: int | None, bootstrap: str) -> None:
    """Transfer the active controller's role to another controller."""
    cluster = ClusterConnection(bootstrap)
    cluster.post("/controllers/transfer" + ("" if target is None else f"?to={target}"))
    click.echo("handed over" if target is None else f"handed over to controller {target}")


@controller.command()
@click.argument("member", metavar="ID@HOST:PORT")
@admin_options
def add(member: str, bootstrap: str) -> None:
    """Add a controller. Its process must be running, with the quorum and itself in `controller.members`."""
    answer = ClusterConnection(bootstrap).post(f"/controllers/add?member={quote(member, safe='')}")
    click.echo(f"added controller {answer['id']} at {answer['address']}")


@controller.command()
@click.argument("node_id", metavar="ID", type=click.IntRange(min=0))
@admin_options
def remove(node_id: int, bootstrap: str) -> None:
    """Remove a controller. The active one hands over first. Stop its process afterwards."""
    ClusterConnection(bootstrap).post(f"/controllers/remove?id={node_id}")
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

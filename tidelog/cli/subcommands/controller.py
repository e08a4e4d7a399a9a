"""`tidelog controller`: show and change the quorum of controllers, the active controller, and their settings.

Every subcommand sends its request to a broker, which forwards it to the controllers.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection
from tidelog.cli.completion import controller_ids, controller_settings
from tidelog.cli.options import admin_options, format_option, watch_option
from tidelog.cli.subcommands.status import SOMETHING_WRONG

Document = dict[str, Any]


@click.group()
def controller() -> None:
    """Show and change the quorum of controllers, and their settings."""


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
@click.option(
    "--to",
    "target",
    type=click.IntRange(min=0),
    metavar="ID",
    shell_complete=controller_ids,
    help="To this member; default: any.",
)
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
@click.argument("node_id", metavar="ID", type=click.IntRange(min=0), shell_complete=controller_ids)
@admin_options
def remove(node_id: int, bootstrap: str) -> None:
    """Remove a controller. The active one hands over first. Stop its process afterwards."""
    answer = ClusterConnection(bootstrap).post(f"/controllers/remove?id={node_id}")
    was_member = answer["status"] == "removed"
    click.echo(f"removed controller {node_id}" if was_member else f"controller {node_id} is no member of the quorum")


@controller.group()
def config() -> None:
    """Show and change settings of all controllers while they run."""


@config.command("list")
@click.option("--all", "everything", is_flag=True, help="Also those that only a restart changes.")
@format_option
@watch_option
@admin_options
def list_(everything: bool, style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the settings that are in force at the active controller, and where each comes from."""
    cluster = ClusterConnection(bootstrap)

    def rows() -> list[Document]:
        return [row for row in cluster.get("/controllers/config")["settings"] if everything or row["dynamic"]]

    output.show(style, rows, _render_settings, watch_s=watch_s)


@config.command("set")
@click.argument("key", metavar="KEY", shell_complete=controller_settings)
@click.argument("value", metavar="VALUE")
@admin_options
def set_(key: str, value: str, bootstrap: str) -> None:
    """Override a setting on all controllers: now, after their restarts, and whatever their configuration says."""
    told = ClusterConnection(bootstrap).post(f"/controllers/config?{urlencode({'key': key, 'value': value})}")
    click.echo(f"{key} = {told['value']} on all controllers" + ("" if told["changed"] else ", as before"))


@config.command()
@click.argument("key", metavar="KEY", shell_complete=controller_settings)
@admin_options
def unset(key: str, bootstrap: str) -> None:
    """Take an override back: what each controller is configured with counts again."""
    told = ClusterConnection(bootstrap).post(f"/controllers/config?{urlencode({'key': key})}")
    click.echo(f"{key} is as configured" + ("" if told["changed"] else ", as before"))


def _setting(value: Any) -> str:
    """Return a setting's value as it is given to `set` and written in files."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _render_settings(rows: list[Document]) -> str:
    headers = ["KEY", "VALUE", "SOURCE", "CONFIGURED", "CHANGES"]
    cells = [
        [
            row["key"],
            _setting(row["value"]),
            row["source"],
            _setting(row["configured"]),
            "now" if row["dynamic"] else "by a restart",
        ]
        for row in rows
    ]
    notes = [
        f"controller {node_id} has {row['key']} = {_setting(value)} in its configuration, another value than the"
        " active one"
        for row in rows
        for node_id, value in row["differs"].items()
    ]
    return "\n".join([output.table(headers, cells), *(["", *notes] if notes else [])])


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

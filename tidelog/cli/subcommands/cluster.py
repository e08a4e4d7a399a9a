"""`tidelog cluster`: the feature level and what every member supports, raise it; restart; rebuild, back up, restore.

Every other subcommand sends its request to a broker, which forwards it to the controllers.
"""

from __future__ import annotations

from typing import Any

import click

from tidelog.cli import output
from tidelog.cli.client import SECRET_FILE_CONFIG, ClusterConnection
from tidelog.cli.options import admin_options, bootstrap_option, format_option, given_secret_file, watch_option
from tidelog.cli.subcommands.cluster_backup import backup, restore
from tidelog.cli.subcommands.cluster_rebuild import rebuild
from tidelog.cli.subcommands.cluster_restart import restart
from tidelog.controller.model.levels import UnsupportedLevel
from tidelog.runtime.errors import NotFound

Document = dict[str, Any]


@click.group(invoke_without_command=True)
@click.pass_context
def cluster(context: click.Context) -> None:
    """Show the cluster's feature level, raise it after an upgrade, restart brokers, or rebuild a cluster."""
    if context.invoked_subcommand is None:
        with status.make_context("status", [], parent=context) as own:
            status.invoke(own)


cluster.add_command(rebuild)
cluster.add_command(backup)
cluster.add_command(restore)
cluster.add_command(restart)


@cluster.command()
@format_option
@watch_option
@bootstrap_option
def status(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the feature level, and the levels that every member supports."""
    connection = ClusterConnection(bootstrap)
    output.show(style, lambda: _ask(connection), _render_status, watch_s=watch_s)


@cluster.command()
@click.option("--dry-run", is_flag=True, help="Only show what would be done, and what prevents it.")
@click.option("--level", type=click.IntRange(min=0), metavar="N", help="Default: the highest that all members support.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@format_option
@admin_options
def upgrade(dry_run: bool, level: int | None, yes: bool, style: str, bootstrap: str) -> None:
    """Raise the feature level. Older versions cannot be started again afterwards."""
    connection = ClusterConnection(bootstrap)
    plan = _ask(connection, "" if level is None else f"?level={level}")
    is_nothing = level is None and plan["target"] == plan["level"]
    if dry_run or is_nothing:
        output.show(style, lambda: plan, _render_plan)
        if not dry_run and plan["newest"] > plan["level"]:
            raise UnsupportedLevel(
                f"the feature level stays {plan['level']}, because not every member supports {plan['newest']}",
                hint="upgrade, start or remove the others; then start the command again",
            )
        return
    if not yes:
        output.confirm(f"raise the feature level from {plan['level']} to {plan['target']}, which cannot be taken back")
    done = connection.post(f"/cluster/upgrade?level={plan['target']}")
    output.show(style, lambda: done, _render_done)


@cluster.command("admin-token")
@admin_options
def admin_token_(bootstrap: str) -> None:
    """Print the token of the cluster's secret: for the console, and for changes by the admin HTTP with curl."""
    connection = ClusterConnection(bootstrap)
    if given_secret_file() is None and not connection.broker_config(SECRET_FILE_CONFIG):
        raise NotFound("this cluster has no secret: nothing asks for a token", hint="leave it out")
    output.emit(connection.admin_token)


@cluster.command("read-token")
@admin_options
def read_token(bootstrap: str) -> None:
    """Print the token with which readers outside the cluster, such as Spark, find objects. It allows nothing else."""
    output.emit(ClusterConnection(bootstrap).read_token)


def _ask(connection: ClusterConnection, query: str = "") -> Document:
    """What is known of levels. Raises `NotFound` for a broker of before feature levels."""
    try:
        found: Document = connection.get(f"/cluster{query}")
    except NotFound as error:
        raise NotFound(
            "this broker runs a version before feature levels; the cluster is at level 0",
            hint="ask a broker that is upgraded (--bootstrap)",
        ) from error
    return found


def _members(document: Document) -> str:
    wanted = _wanted(document)
    rows = [
        [
            row["kind"],
            row["id"],
            str(row["oldest"]) if row["oldest"] == row["newest"] else f"{row['oldest']} to {row['newest']}",
            "yes" if row["oldest"] <= wanted <= row["newest"] else "no",
            row["problem"] or None,
        ]
        for row in document["members"]
    ]
    headers = ["MEMBER", "ID", "LEVELS", f"SUPPORTS-{wanted}", "PROBLEM"]
    return output.table(headers, rows, right=["ID"])


def _wanted(document: Document) -> int:
    """The level that is talked about: the target, or the newest one if not all members support that."""
    target: int = document["target"]
    return target if target != document["level"] else max(target, document["newest"])


def _render_status(document: Document) -> str:
    about = [("cluster", document["cluster_id"]), ("level", str(document["level"]))]
    if document["target"] > document["level"]:
        about.append(("possible", f"{document['target']}: `tidelog cluster upgrade`"))
    return f"{output.pairs(about)}\n\n{_members(document)}"


def _render_plan(document: Document) -> str:
    level, target = document["level"], document["target"]
    if target == level:
        newer = document["newest"] > level
        why = ", and not every member supports a higher one" if newer else ", the newest that is known"
        said = f"nothing to do: the feature level is {level}{why}"
    elif target < level:
        said = f"impossible: the feature level is {level} and is never lowered"
    elif document["unable"]:
        said = f"impossible: feature level {target} is not supported by {', '.join(document['unable'])}"
    else:
        said = f"would raise the feature level from {level} to {target}"
    return f"{_members(document)}\n\n{said}"


def _render_done(document: Document) -> str:
    return ("raised the feature level to " if document["raised"] else "the feature level is ") + str(document["level"])

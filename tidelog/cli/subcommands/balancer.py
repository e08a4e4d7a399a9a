"""`tidelog balancer`: show the load of the brokers, show planned moves, and run them.

The active controller plans and issues the moves; any broker forwards the request. In mode `on` the controller does so
without a request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection
from tidelog.cli.options import admin_options, format_option, watch_option
from tidelog.cli.placements import placements
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.progress_bar import ProgressBar

POLL_S = 0.2
Document = dict[str, Any]


@click.group()
def balancer() -> None:
    """Show how evenly brokers are loaded, and even it out."""


@balancer.command()
@format_option
@watch_option
@admin_options
def status(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the load of each broker, and the result of the balancer's last check."""
    cluster = ClusterConnection(bootstrap)
    output.show(style, lambda: cluster.get("/balancer"), _render_status, watch_s=watch_s)


@balancer.command()
@format_option
@admin_options
def plan(style: str, bootstrap: str) -> None:
    """Show the moves that would be made now, with reasons. Nothing is moved."""
    _show_plan(style, ClusterConnection(bootstrap).get("/balancer/plan"), "would move")


@balancer.command()
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@click.option("--no-wait", is_flag=True, help="Return when the moves have begun.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Seconds to wait."
)
@format_option
@admin_options
def run(dry_run: bool, no_wait: bool, timeout_s: float, style: str, bootstrap: str) -> None:
    """Plan and move now, in any mode; wait for completion. Exits 5 if partitions stay where they were."""
    cluster = ClusterConnection(bootstrap)
    if dry_run:
        _show_plan(style, cluster.get("/balancer/plan"), "would move")
        return
    started = time.monotonic()
    found = cluster.post("/balancer/run")
    if found["total"] and not no_wait:
        _wait(cluster, timeout_s)
        found["seconds"] = round(time.monotonic() - started, 3)
        found["not_moved"] = _not_moved(cluster, found["moves"])
        found["total"] -= len(found["not_moved"])
    _show_plan(style, found, "moving" if no_wait else "moved")
    if found.get("not_moved"):
        raise Unavailable(
            f"{len(found['not_moved'])} partitions stay where they were: the rest of the plan was dropped, or moves"
            " were cancelled",
            hint="run it again; a plan ends when a broker joins or leaves, and with its active controller",
        )


def _not_moved(cluster: ClusterConnection, moves: Sequence[Document]) -> list[Document]:
    """Return the moves of partitions that are where they were."""
    rows = placements(cluster.get, (move["topic"] for move in moves), but_deleted=True)
    at = {(row["topic"], row["partition"]): row["broker"] for row in rows}
    return [move for move in moves if at.get((move["topic"], move["partition"])) == move["from"]]


@balancer.command()
@click.argument("mode", required=False, type=click.Choice(["off", "advise", "on", "configured"]))
@admin_options
def mode(mode: str | None, bootstrap: str) -> None:
    """Show the mode, or set it for the running cluster. It persists over restarts until set to `configured`."""
    cluster = ClusterConnection(bootstrap)
    if mode is None:
        found = cluster.get("/balancer")
    else:
        found = cluster.post("/balancer/mode" + ("" if mode == "configured" else f"?set={mode}"))
    now, configured = found["mode"], found["configured_mode"]
    output.emit(now if now == configured else f"{now} (configured: {configured})")


def _wait(cluster: ClusterConnection, timeout_s: float) -> None:
    """Wait until no move is left to issue or in flight. Raises `Unavailable` after the time-out."""
    with ProgressBar("moving", unit="partitions") as progress:
        _wait_moved(cluster, timeout_s, progress)


def _wait_moved(cluster: ClusterConnection, timeout_s: float, progress: ProgressBar) -> None:
    deadline = time.monotonic() + timeout_s
    total = 0
    while True:
        now = cluster.get_patiently("/balancer", deadline)
        left = now["left"] + now["in_flight"]
        if not left:
            return
        total = max(total, left)
        progress.update(total - left, total)
        if time.monotonic() > deadline:
            raise Unavailable(
                f"{now['left']} moves to issue and {now['in_flight']} in flight after {timeout_s:g} s; they continue",
                hint="`tidelog partition list` shows the reason",
            )
        time.sleep(POLL_S)


def _show_plan(style: str, found: Document, verb: str) -> None:
    output.emit(json.dumps(found, indent=2) if style == "json" else _render_plan(found, verb))


def _render_plan(found: Document, verb: str) -> str:
    findings = "\n".join(f"  - {each}" for each in found["findings"])
    if not found["moves"]:
        return f"nothing to move\n{findings}"
    headers = ["TOPIC", "PARTITION", "FROM", "TO", "WHY"]
    rows = [
        [move["topic"], move["partition"], move["from"], move["to"], move["why"].partition(": ")[2]]
        for move in found["moves"]
    ]
    table = output.table(headers, rows, right=["PARTITION", "FROM", "TO"])
    more = f"\n… and {found['total'] - len(rows)} more" if found["total"] > len(rows) else ""
    took = f" in {found['seconds']:g} s" if "seconds" in found else ""
    return f"{table}{more}\n\n{verb} {found['total']} partitions{took}\n{findings}"


def _render_status(found: Document) -> str:
    headers = ["BROKER", "RACK", "TAKES", "PARTITIONS", "IN", "OUT", "REQUESTS", "CPU"]
    rows = [
        [
            row["id"],
            row["rack"],
            "yes" if row["takes"] else "no",
            row["partitions"],
            _rate(row["bytes_in"]),
            _rate(row["bytes_out"]),
            None if row["requests"] is None else f"{row['requests']:.0f}/s",
            None if row["cpu_percent"] is None else f"{row['cpu_percent']:.0f}%",
        ]
        for row in found["brokers"]
    ]
    table = output.table(headers, rows, right=["BROKER", "PARTITIONS", "IN", "OUT", "REQUESTS", "CPU"])
    lines = [
        f"mode {found['mode']}; planned: {found['planned']} moves, to be issued: {found['left']}, "
        f"going on: {found['in_flight']}, issued so far: {found['issued']}"
    ]
    lines += [f"  - {each}" for each in found["findings"]]
    return f"{table}\n\n" + "\n".join(lines)


def _rate(value: int | None) -> str | None:
    return None if value is None else f"{output.size(value)}/s"

"""`tidelog broker`: the brokers of a cluster, and taking them out of use without anybody noticing.

A drain is the cluster's: it goes on when this command is gone. What `drain` shows and waits for is only its progress.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from runtime.errors import InvalidInput, NotFound, TidelogError, Unavailable
from tidelog import output, up_control
from tidelog.client import Cluster, http_json
from tidelog.options import bootstrap_option, format_option, load_config, watch_option

POLL_S = 0.2
Row = dict[str, Any]
_broker_id = click.argument("broker_id", metavar="ID", type=click.IntRange(min=0))


@click.group()
def broker() -> None:
    """List, add, drain and remove brokers."""


@broker.command("list")
@format_option
@watch_option
@bootstrap_option
def list_(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the brokers: where they are, whether they live, and what they own."""
    cluster = Cluster(bootstrap)
    output.show(style, lambda: [_told(row) for row in _rows(cluster)], _render, watch_s=watch_s)


def _rows(cluster: Cluster) -> list[Row]:
    rows: list[Row] = cluster.get("/brokers")["brokers"]
    return rows


def _told(row: Row) -> Row:
    """A row with what only the broker itself knows: null of one that cannot be asked."""
    told: Row = {"roles": None, "led": None, "upload_bytes": None}
    if row["state"] != "dead" and row["admin_url"]:
        try:
            status = http_json(row["admin_url"], "/status")
        except TidelogError:
            status = None  # it is shown without these; `tidelog status` says what is wrong with it
        if status is not None:
            mine: Row = next((node for node in status["nodes"] if node["id"] == row["id"]), {})
            told = {
                "roles": mine.get("roles"),
                "led": status["partitions"].get("led"),
                "upload_bytes": status["upload"]["backlog_bytes"],
            }
    return {**row, **told}


def _render(rows: list[Row]) -> str:
    headers = ["ID", "ADDRESS", "RACK", "STATE", "ROLES", "PARTITIONS", "LED", "LEAVING", "COMING", "TO-UPLOAD"]
    cells = [
        [
            row["id"],
            row["address"],
            row["rack"],
            row["state"],
            ",".join(row["roles"]) if row["roles"] else None,
            row["partitions"],
            row["led"],
            row["leaving"],
            row["coming"],
            output.size(row["upload_bytes"]),
        ]
        for row in rows
    ]
    return output.table(headers, cells, right=["ID", "PARTITIONS", "LED", "LEAVING", "COMING", "TO-UPLOAD"])


@broker.command()
@_broker_id
@click.option("--cancel", is_flag=True, help="End the drain. What is on its way already goes on.")
@click.option("--dry-run", is_flag=True, help="Only say where the partitions would go.")
@click.option("--no-wait", is_flag=True, help="Return when the drain has begun.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Seconds to wait."
)
@format_option
@bootstrap_option
def drain(
    broker_id: int, cancel: bool, dry_run: bool, no_wait: bool, timeout_s: float, style: str, bootstrap: str
) -> None:
    """Move all partitions of a broker to the others, and place none on it."""
    cluster = Cluster(bootstrap)
    if dry_run:
        moves = cluster.get(f"/brokers/plan?id={broker_id}")["moves"]
        output.emit(json.dumps(moves, indent=2) if style == "json" else _render_plan(broker_id, moves))
        return
    cluster.post(f"/brokers/drain?id={broker_id}" + ("&cancel=true" if cancel else ""))
    if not cancel and not no_wait:
        wait_drained(cluster, broker_id, timeout_s)
    row = _find(cluster, broker_id)
    if style == "json":
        output.emit(json.dumps(row, indent=2))
    elif cancel:
        output.emit(f"broker {broker_id} takes partitions again")
    else:
        output.emit(f"broker {broker_id} is {row['state']}")


@broker.command()
@format_option
@watch_option
@bootstrap_option
def wanted(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show how many brokers the measured load needs, and why."""
    cluster = Cluster(bootstrap)
    output.show(style, lambda: cluster.get("/scale"), _render_wanted, watch_s=watch_s)


def _render_wanted(found: Row) -> str:
    headers = ["MEASURE", "UNIT", "TOTAL", "OF-ONE-BROKER", "USED", "NEEDS"]
    rows = [
        [name, row["unit"], row["total"], row["capacity_of_one"], f"{row['utilization_percent']}%", row["needs"]]
        for name, row in found["measures"].items()
    ]
    table = output.table(headers, rows, right=["TOTAL", "OF-ONE-BROKER", "USED", "NEEDS"])
    return f"brokers: {found['brokers']}, wanted: {found['wanted']}\n{found['reason']}\n\n{table}"


def _find(cluster: Cluster, broker_id: int) -> Row:
    for row in _rows(cluster):
        if row["id"] == broker_id:
            return row
    raise NotFound(f"there is no broker {broker_id}", hint="`tidelog broker list` shows them")


def wait_drained(cluster: Cluster, broker_id: int, timeout_s: float) -> None:
    """Until the broker owns nothing, saying how far it is. Raises `Unavailable` when it takes too long."""
    deadline = time.monotonic() + timeout_s
    total = _find(cluster, broker_id)["partitions"]
    told = total
    while True:
        row = _find(cluster, broker_id)
        left = row["partitions"] + row["coming"]
        if row["partitions"] != told:
            told = row["partitions"]
            click.echo(f"broker {broker_id}: {max(0, total - told)} of {total} partitions moved", err=True)
        if not left:
            return
        if row["drain"] == "none":
            raise Unavailable(f"the drain of broker {broker_id} was ended, with {left} partitions left on it")
        if time.monotonic() > deadline:
            raise Unavailable(
                f"broker {broker_id} still has {left} partitions after {timeout_s:g} s; the drain goes on",
                hint="`tidelog partition list` shows what holds them up",
            )
        time.sleep(POLL_S)


def _render_plan(broker_id: int, moves: list[Row]) -> str:
    if not moves:
        return f"broker {broker_id} has nothing that could be moved"
    rows = [[move["topic"], move["partition"], broker_id, move["to"]] for move in moves]
    table = output.table(["TOPIC", "PARTITION", "FROM", "TO"], rows, right=["PARTITION", "FROM", "TO"])
    counts = sorted(Counter(move["to"] for move in moves).items())
    return f"{table}\n\n" + ", ".join(f"{count} to broker {target}" for target, count in counts)


_data_dir = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Of the `tidelog up` that runs the brokers; else the broker says it.",
)


def _directory(data_dir: Path | None, cluster: Cluster) -> Path:
    """That of the `tidelog up` meant: as named or configured, else of the one that runs the broker at hand here."""
    directory = Path(load_config(None, (), node__data_dir=str(data_dir) if data_dir else None).config.node.data_dir)
    if data_dir is not None or up_control.listens(directory):
        return directory
    try:
        of_node = cluster.broker_config("node.data_dir")
    except TidelogError:
        return directory  # the command says what is wrong when it needs it
    return Path(of_node).parent if of_node and up_control.listens(Path(of_node).parent) else directory


@broker.command()
@_data_dir
@bootstrap_option
def add(data_dir: Path | None, bootstrap: str) -> None:
    """Have a running `tidelog up` start one more broker."""
    added = up_control.ask(_directory(data_dir, Cluster(bootstrap)), {"do": "add"})
    output.emit(f"added broker {added['id']} at {added['bootstrap']}")


@broker.command()
@_broker_id
@click.option("--force", is_flag=True, help="Even if its process runs: it is fenced, and should be stopped.")
@click.option(
    "--accept-loss",
    is_flag=True,
    help="It is dead for good: its partitions go on elsewhere without what only its WAL has.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and what would be lost.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Seconds to wait for others to recover a dead broker's partitions.",
)
@_data_dir
@format_option
@bootstrap_option
def remove(
    broker_id: int,
    force: bool,
    accept_loss: bool,
    dry_run: bool,
    timeout_s: float,
    data_dir: Path | None,
    style: str,
    bootstrap: str,
) -> None:
    """Forget a broker that is drained, or dead and without partitions, with all that it left.

    The partitions of a dead one are waited for while others recover them from the bucket. With its WAL on its own disk
    only it can bring them back; --accept-loss gives up what is not in the bucket. One that a `tidelog up` on this
    machine runs is stopped first, and its files are deleted.
    """
    cluster = Cluster(bootstrap)
    rows = {row["id"]: row for row in _rows(cluster)}
    row = rows.get(broker_id)
    directory = _directory(data_dir, cluster)
    runs_here = _runs_here(directory, row)
    if row is not None and row["state"] == "dead" and row["partitions"]:
        losses = cluster.get(f"/losses?id={broker_id}")
        if dry_run:
            output.emit(json.dumps(losses, indent=2) if style == "json" else _render_losses(losses))
            return
        if accept_loss and (force or not losses["recoverable"]):
            placed = cluster.post(f"/losses/accept?id={broker_id}" + ("&force=true" if force else ""))
            click.echo(
                f"{placed['partitions']} partitions of broker {broker_id} go on without what only its WAL had", err=True
            )
            row = {**row, "partitions": 0}
        elif losses["recoverable"]:
            row = _wait_recovered(cluster, broker_id, timeout_s)
    if row is not None:
        _check_removable(row, force or runs_here)
    if dry_run:
        output.emit(
            json.dumps(row, indent=2) if style == "json" else f"broker {broker_id} owns nothing: nothing is lost"
        )
        return
    if runs_here:
        up_control.ask(directory, {"do": "stop", "id": broker_id})
    others = [one for each, one in rows.items() if each != broker_id and one["state"] != "dead" and one["admin_url"]]
    if not others:
        raise Unavailable(f"no broker besides {broker_id} is alive to remove it from the metadata")
    answer = http_json(others[0]["admin_url"], f"/brokers/remove?id={broker_id}", method="POST")
    if runs_here:
        up_control.ask(directory, {"do": "forget", "id": broker_id})
    if style == "json":
        output.emit(json.dumps(answer, indent=2))
        return
    output.emit(f"removed broker {broker_id}")
    if answer["wal_objects_deleted"]:
        output.emit(f"deleted {answer['wal_objects_deleted']} objects of its WAL")


def _wait_recovered(cluster: Cluster, broker_id: int, timeout_s: float) -> Row:
    """Until others have taken over what a dead broker owned. Raises `Unavailable` when it takes too long."""
    deadline = time.monotonic() + timeout_s
    told = -1
    while True:
        row = _find(cluster, broker_id)
        if row["partitions"] != told:
            told = row["partitions"]
            click.echo(f"broker {broker_id}: {told} partitions are still to be recovered from the bucket", err=True)
        if not told or row["state"] != "dead":
            return row
        if time.monotonic() > deadline:
            raise Unavailable(
                f"{told} partitions of broker {broker_id} were not recovered within {timeout_s:g} s; it goes on",
                hint="`tidelog status` says who is at it and what fails; --accept-loss --force gives them up",
            )
        time.sleep(POLL_S)


def _render_losses(losses: Row) -> str:
    if losses["recoverable"]:
        return f"nothing would be lost: others recover the partitions of broker {losses['broker']} from the bucket"
    rows = [[one["topic"], one["partition"], one["end_offset"]] for one in losses["partitions"]]
    table = output.table(["TOPIC", "PARTITION", "GOES-ON-AT"], rows, right=["PARTITION", "GOES-ON-AT"])
    if losses["wal_bytes"] is None:
        lost = "how much that is, no controller has heard; it is what was written since its last uploads"
    else:
        when = output.moment(losses["told_ms"])
        lost = f"{losses['wal_bytes']:,} bytes of its WAL were not in the bucket when it was last heard of, {when}"
    return (
        f"{table}\n\nrecords of these partitions from these offsets on would be lost: {lost}\n"
        f"if its disk can be read, start the broker over it instead: then nothing is lost (wal.kind is {losses['wal']})"
    )


def _runs_here(directory: Path, row: Row | None) -> bool:
    """Whether the `tidelog up` over this directory runs that very broker."""
    if row is None:
        return False
    try:
        running = up_control.ask(directory, {"do": "list"})["brokers"]
    except Unavailable:
        return False
    return bool(running.get(str(row["id"])) == row["address"])


def _check_removable(row: Row, may_live: bool) -> None:
    """Before anything is stopped; the controller checks again. Raises `InvalidInput`."""
    name = f"broker {row['id']}"
    if row["partitions"] or row["coming"]:
        lost = ", and it is dead: what of them is not in the bucket yet is in its WAL alone"
        raise InvalidInput(
            f"{name} owns {row['partitions']} partitions, and {row['coming']} are moving to it"
            + (lost if row["state"] == "dead" else ""),
            hint=("start it, then " if row["state"] == "dead" else "")
            + f"`tidelog broker drain {row['id']}` moves them"
            + ("; if it is dead for good, --accept-loss, with --dry-run first" if row["state"] == "dead" else ""),
        )
    if row["state"] == "alive":
        raise InvalidInput(
            f"{name} is alive, and partitions may be placed on it any time",
            hint=f"`tidelog broker drain {row['id']}` first",
        )
    if row["state"] != "dead" and not may_live:
        raise InvalidInput(f"the process of {name} still runs", hint="stop it first, or fence it with --force")

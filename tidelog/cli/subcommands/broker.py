"""`tidelog broker`: list, add, drain and remove the brokers of a cluster.

The controllers carry out a drain: it continues without this command, which only shows and awaits the progress.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection
from tidelog.cli.completion import broker_ids
from tidelog.cli.many import BROKER_TIMEOUT_S, ask_at_once
from tidelog.cli.options import admin_options, format_option, load_config, watch_option
from tidelog.cli.subcommands.status import own_status
from tidelog.controller.model.records import BUCKET_WAL
from tidelog.process import up_control
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError, Unavailable
from tidelog.runtime.progress_bar import ProgressBar

POLL_S = 0.2
Row = dict[str, Any]
_broker_id = click.argument("broker_id", metavar="ID", type=click.IntRange(min=0), shell_complete=broker_ids)


@click.group()
def broker() -> None:
    """List, add, drain and remove brokers."""


@broker.command("list")
@format_option
@watch_option
@admin_options
def list_(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the brokers with their addresses, states and partitions."""
    cluster = ClusterConnection(bootstrap)
    output.show(style, lambda: _told(cluster), _render, watch_s=watch_s)


def _rows(cluster: ClusterConnection, deadline: float | None = None) -> list[Row]:
    """`deadline`: of a command that waits; the brokers are asked again while none answers."""
    path = "/brokers"
    found = cluster.get(path) if deadline is None else cluster.get_patiently(path, deadline)
    rows: list[Row] = found["brokers"]
    return rows


def _told(cluster: ClusterConnection) -> list[Row]:
    """Return the brokers with what only they themselves know; one that does not answer with the `problem`."""
    rows = _rows(cluster)
    cluster_id = cluster.cluster_id

    def ask(row: Row) -> Row:
        status = own_status(row, cluster_id)
        mine: Row = next((node for node in status["nodes"] if node["id"] == row["id"]), {})
        return {
            "roles": mine.get("roles"),
            "led": status["partitions"].get("led"),
            "upload_bytes": status["upload"]["backlog_bytes"],
            "problem": None,
        }

    asked = {row["id"]: partial(ask, row) for row in rows if row["state"] != "dead" and row["admin_url"]}
    answers = ask_at_once(asked)
    silent: Row = {"roles": None, "led": None, "upload_bytes": None, "problem": None}
    told = []
    for row in rows:
        answer = answers.get(row["id"], silent)
        told.append({**row, **(silent | {"problem": answer.message} if isinstance(answer, TidelogError) else answer)})
    return told


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
    table = output.table(headers, cells, right=["ID", "PARTITIONS", "LED", "LEAVING", "COMING", "TO-UPLOAD"])
    silent = [f"broker {row['id']} does not answer: {row['problem']}" for row in rows if row["problem"]]
    return "\n".join([table, *(["", *map(output.paragraph, silent)] if silent else [])])


@broker.command()
@_broker_id
@click.option("--cancel", is_flag=True, help="End the drain. Moves in flight continue.")
@click.option("--dry-run", is_flag=True, help="Only show the targets of the partitions.")
@click.option("--no-wait", is_flag=True, help="Return when the drain has begun.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Seconds to wait."
)
@format_option
@admin_options
def drain(
    broker_id: int, cancel: bool, dry_run: bool, no_wait: bool, timeout_s: float, style: str, bootstrap: str
) -> None:
    """Move all partitions of a broker to the others, and place none on it."""
    cluster = ClusterConnection(bootstrap)
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
@admin_options
def wanted(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show how many brokers the measured load needs, and why."""
    cluster = ClusterConnection(bootstrap)
    output.show(style, lambda: cluster.get("/scale"), _render_wanted, watch_s=watch_s)


def _render_wanted(found: Row) -> str:
    headers = ["MEASURE", "UNIT", "TOTAL", "OF-ONE-BROKER", "USED", "NEEDS"]
    rows = [
        [name, row["unit"], row["total"], row["capacity_of_one"], f"{row['utilization_percent']}%", row["needs"]]
        for name, row in found["measures"].items()
    ]
    table = output.table(headers, rows, right=["TOTAL", "OF-ONE-BROKER", "USED", "NEEDS"])
    return f"brokers: {found['brokers']}, wanted: {found['wanted']}\n{output.paragraph(found['reason'])}\n\n{table}"


def _find(cluster: ClusterConnection, broker_id: int, deadline: float | None = None) -> Row:
    for row in _rows(cluster, deadline):
        if row["id"] == broker_id:
            return row
    raise NotFound(f"there is no broker {broker_id}", hint="`tidelog broker list` shows them")


def wait_drained(cluster: ClusterConnection, broker_id: int, timeout_s: float) -> None:
    """Wait until the broker owns nothing, and has no replicas of other brokers' sets, reporting progress.

    Raises `Unavailable` after the time-out.
    """
    total = _find(cluster, broker_id)["partitions"]
    with ProgressBar(f"draining broker {broker_id}", total, "partitions") as progress:
        _wait_drained(cluster, broker_id, timeout_s, total, progress)


def _wait_drained(
    cluster: ClusterConnection, broker_id: int, timeout_s: float, total: int, progress: ProgressBar
) -> None:
    deadline = time.monotonic() + timeout_s
    told = total
    while True:
        row = _find(cluster, broker_id, deadline)
        left = row["partitions"] + row["coming"]
        replicas = row.get("replicas", 0)  # a version before replica sets of several tells none
        progress.update(max(0, total - row["partitions"]))
        if row["partitions"] != told:
            told = row["partitions"]
            if not progress.is_live:
                output.warn(f"broker {broker_id}: {max(0, total - told)} of {total} partitions moved")
        if not left + replicas:
            return
        if row["drain"] == "none":
            raise Unavailable(f"the drain of broker {broker_id} was ended, with {left} partitions left on it")
        if time.monotonic() > deadline and not left:
            raise Unavailable(
                f"broker {broker_id} still has replicas of {replicas} replica sets after {timeout_s:g} s:"
                " others are not in sync yet, or the write quorum needs it",
                hint="`tidelog replica-set list` shows the sets; `replica-set set-policy` changes what they need",
            )
        if time.monotonic() > deadline:
            raise Unavailable(
                f"broker {broker_id} still has {left} partitions after {timeout_s:g} s; the drain continues",
                hint="`tidelog partition list` shows the reason",
            )
        time.sleep(POLL_S)


def _render_plan(broker_id: int, moves: list[Row]) -> str:
    if not moves:
        return f"broker {broker_id} has no partitions to move"
    rows = [[move["topic"], move["partition"], broker_id, move["to"]] for move in moves]
    table = output.table(["TOPIC", "PARTITION", "FROM", "TO"], rows, right=["PARTITION", "FROM", "TO"])
    counts = sorted(Counter(move["to"] for move in moves).items())
    return f"{table}\n\n" + ", ".join(f"{count} to broker {target}" for target, count in counts)


_data_dir = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Of the `tidelog up` of the brokers; default: as reported by the broker.",
)


def _directory(data_dir: Path | None, cluster: ClusterConnection) -> Path:
    """The directory of the `tidelog up`: as given or configured, else that of the connected broker on this machine."""
    directory = Path(load_config(None, (), node__data_dir=str(data_dir) if data_dir else None).config.node.data_dir)
    if data_dir is not None or up_control.listens(directory):
        return directory
    try:
        of_node = cluster.broker_config("node.data_dir")
    except TidelogError:
        return directory  # the command reports the error when it needs the directory
    return Path(of_node).parent if of_node and up_control.listens(Path(of_node).parent) else directory


@broker.command()
@_data_dir
@admin_options
def add(data_dir: Path | None, bootstrap: str) -> None:
    """Have a running `tidelog up` start one more broker."""
    added = up_control.ask(_directory(data_dir, ClusterConnection(bootstrap)), {"do": "add"})
    output.emit(f"added broker {added['id']} at {added['bootstrap']}")
    if added.get("to_restart"):  # an older `tidelog up` tells none
        brokers = ", ".join(map(str, added["to_restart"]))
        output.warn(
            f"the WALs of brokers {brokers} are on one disk each until they are started again, and then on three:"
            " `tidelog cluster restart --rolling`"
        )


@broker.command()
@_broker_id
@click.option("--force", is_flag=True, help="Even if its process is running: fence it; it should be stopped.")
@click.option(
    "--accept-loss",
    is_flag=True,
    help="It is permanently dead: move its partitions without the records that only its WAL has.",
)
@click.option("--dry-run", is_flag=True, help="Only show the actions and losses.")
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
@admin_options
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
    """Remove a broker and its files, once it is drained, or dead and without partitions.

    Waits while other brokers recover a dead broker's partitions from the bucket. With its WAL on its own disk, only the
    broker itself can recover them; --accept-loss discards records that are not in the bucket. A broker of a
    `tidelog up` on this machine is stopped first, and its files are deleted.
    """
    cluster = ClusterConnection(bootstrap)
    rows = {row["id"]: row for row in _rows(cluster)}
    row = rows.get(broker_id)
    directory = _directory(data_dir, cluster)
    here = _found_here(directory, rows, broker_id)
    if row is not None and row["state"] == "dead" and row["partitions"]:
        losses = cluster.get(f"/losses?id={broker_id}")
        forced = accept_loss and force and losses["wal"] == BUCKET_WAL
        if dry_run:
            document = {**losses, "given_up": forced or not losses["recoverable"]}
            output.emit(json.dumps(document, indent=2) if style == "json" else _render_losses(document))
            return
        if accept_loss and (force or not losses["recoverable"]):
            placed = cluster.post(f"/losses/accept?id={broker_id}" + ("&force=true" if force else ""))
            click.echo(
                f"{placed['partitions']} partitions of broker {broker_id} continue without the records of its WAL",
                err=True,
            )
            row = {**row, "partitions": 0, "refusal": None}
        elif losses["recoverable"]:
            row = _wait_recovered(cluster, broker_id, timeout_s)
    if row is not None:
        _check_removable(row, force or here.runs)
    if dry_run:
        _show_dry_run(broker_id, row, here, style)
        return
    other = _other(cluster, broker_id)
    if here.runs:
        up_control.ask(directory, {"do": "stop", "id": broker_id})
    try:
        answer = cluster.at(other["admin_url"], other["id"]).post(f"/brokers/remove?id={broker_id}")
    except NotFound:
        if not here.left:
            raise
        answer = {"status": "removed", "id": broker_id, "wal_objects_deleted": 0}
    if here.runs or here.left:
        up_control.ask(directory, {"do": "forget", "id": broker_id})
    if style == "json":
        output.emit(json.dumps(answer, indent=2))
        return
    output.emit(f"removed broker {broker_id}")
    if answer["wal_objects_deleted"]:
        output.emit(f"deleted {answer['wal_objects_deleted']} objects of its WAL")


def _other(cluster: ClusterConnection, broker_id: int) -> Row:
    """Return another broker, which answers now. Raises `Unavailable` before anything was stopped or removed."""

    def ask(row: Row) -> Row:
        cluster.ask(row["admin_url"], "/brokers", timeout_s=BROKER_TIMEOUT_S, broker=row["id"])
        return row

    living = [row for row in _rows(cluster) if row["id"] != broker_id and row["state"] != "dead" and row["admin_url"]]
    answers = list(ask_at_once({row["id"]: partial(ask, row) for row in living}).values())
    for answer in answers:
        if not isinstance(answer, TidelogError):
            return answer
    problem = "".join(f": {error.message}" for error in answers[:1] if isinstance(error, TidelogError))
    raise Unavailable(f"no other broker is alive to remove broker {broker_id} from the metadata{problem}")


def _wait_recovered(cluster: ClusterConnection, broker_id: int, timeout_s: float) -> Row:
    """Wait until others have taken over a dead broker's partitions. Raises `Unavailable` after the time-out."""
    deadline = time.monotonic() + timeout_s
    told = -1
    while True:
        row = _find(cluster, broker_id, deadline)
        if row["partitions"] != told:
            told = row["partitions"]
            click.echo(f"broker {broker_id}: {told} partitions are still to be recovered from the bucket", err=True)
        if not told or row["state"] != "dead":
            return row
        if time.monotonic() > deadline:
            raise Unavailable(
                f"{told} partitions of broker {broker_id} not recovered within {timeout_s:g} s; recovery continues",
                hint="`tidelog status` shows the successor and its errors; --accept-loss --force discards them",
            )
        time.sleep(POLL_S)


def _render_losses(losses: Row) -> str:
    if not losses["given_up"]:
        return f"nothing would be lost: others recover the partitions of broker {losses['broker']} from the bucket"
    rows = [[one["topic"], one["partition"], one["end_offset"]] for one in losses["partitions"]]
    table = output.table(["TOPIC", "PARTITION", "GOES-ON-AT"], rows, right=["PARTITION", "GOES-ON-AT"])
    if losses["wal_bytes"] is None:
        lost = "no controller knows the amount: all records written since its last uploads"
    else:
        when = output.moment(losses["told_ms"])
        where = "not uploaded" if losses["recoverable"] else "not in the bucket"
        lost = f"{losses['wal_bytes']:,} bytes of its WAL were {where} when it was last heard of, {when}"
    instead = "if its disk can be read, start the broker over it instead: then nothing is lost"
    if losses["recoverable"]:
        instead = "without --force others recover them from the bucket: then nothing is lost"
    return (
        f"{table}\n\nrecords of these partitions from these offsets on would be lost: {lost}\n"
        f"{instead} (wal.kind is {losses['wal']})"
    )


class _FoundHere(NamedTuple):
    """What the `tidelog up` on a directory has of a broker."""

    runs: bool
    """It runs it."""
    left: bool
    """It has stopped it to be removed, and has its files: the removal was interrupted."""


def _found_here(directory: Path, rows: Mapping[int, Row], broker_id: int) -> _FoundHere:
    """Ask the `tidelog up` on this directory, if it is one of this cluster. `rows`: of the cluster's brokers, by id."""
    try:
        told = up_control.ask(directory, {"do": "list"})
    except Unavailable:
        return _FoundHere(False, False)
    runs = {each for each, row in rows.items() if told["brokers"].get(str(each)) == row["address"]}
    return _FoundHere(broker_id in runs, bool(runs) and broker_id in told.get("removed", ()))


def _show_dry_run(broker_id: int, row: Row | None, here: _FoundHere, style: str) -> None:
    """Tell what a removal would do of a broker that owns nothing. Raises `NotFound` if it would find nothing."""
    if row is None and not here.left:
        raise NotFound(
            f"there is no broker {broker_id}",
            hint="`tidelog broker list` shows them; what an interrupted removal has left goes without --dry-run",
        )
    text = f"broker {broker_id} owns nothing: nothing is lost"
    if row is None:
        text = f"broker {broker_id} was removed: its files would be deleted"
    output.emit(json.dumps(row, indent=2) if style == "json" else text)


def _check_removable(row: Row, may_live: bool) -> None:
    """Check before anything is stopped; the controller checks again. Raises `InvalidInput`."""
    name = f"broker {row['id']}"
    if row["partitions"] or row["coming"]:
        lost = ", and it is dead: records that are not in the bucket are only in its WAL"
        raise InvalidInput(
            f"{name} owns {row['partitions']} partitions, and {row['coming']} are moving to it"
            + (lost if row["state"] == "dead" else ""),
            hint=("start it, then " if row["state"] == "dead" else "")
            + f"`tidelog broker drain {row['id']}` moves them"
            + (
                "; if it is permanently dead, use --accept-loss, with --dry-run first" if row["state"] == "dead" else ""
            ),
        )
    if row["state"] == "alive":
        raise InvalidInput(
            f"{name} is alive, and partitions may be placed on it at any time",
            hint=f"`tidelog broker drain {row['id']}` first",
        )
    refusal = row.get("refusal")  # an older version does not tell
    if refusal is not None:
        raise InvalidInput(refusal["problem"], hint=refusal["hint"])
    if row["state"] != "dead" and not may_live:
        raise InvalidInput(f"the process of {name} is still running", hint="stop it first, or fence it with --force")

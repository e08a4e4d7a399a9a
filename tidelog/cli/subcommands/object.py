"""`tidelog object list|inspect|verify`: the objects in the bucket, through a broker's admin HTTP; `accept-loss`.

`compact` and `clean` are in `tidelog.cli.subcommands.object_jobs`.

The broker has access to the bucket and knows which objects belong to the cluster. `verify` reads every byte of them,
bypassing all caches; it exits with 7 if it finds a problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection
from tidelog.cli.completion import object_ids
from tidelog.cli.options import admin_options, config_options, format_option, load_config, watch_option
from tidelog.cli.subcommands import object_jobs
from tidelog.cli.subcommands.quarantine import quarantine
from tidelog.cli.subcommands.status import GOOD_STATES
from tidelog.runtime.errors import CorruptData, NotFound, TidelogError, Unavailable
from tidelog.runtime.progress_bar import ProgressBar

T = TypeVar("T")

PAGE = 1_000
_BLOCK_KEYS = (
    "stream_id",
    "topic",
    "partition",
    "part",
    "start_offset",
    "end_offset",
    "records",
    "position",
    "length_bytes",
    "crc32c",
)
_STREAMS_SHOWN = 10
_FINDING_HEADERS = (
    *("OBJECT", "PART", "BYTE", "STREAM", "TOPIC", "PARTITION", "OF", "START", "END"),
    "PROBLEM",
)


@click.group("object")
def object_() -> None:
    """List, inspect, verify, compact and clean up the objects in the bucket."""


object_.add_command(object_jobs.compact)
object_.add_command(object_jobs.clean)
object_.add_command(quarantine)


# --- list and inspect --------------------------------------------------------------------------------------------


@object_.command("list")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="Maximum number; default: all.")
@click.option("--after", type=click.IntRange(min=0), metavar="ID", help="Only objects with a greater id.")
@format_option
@watch_option
@admin_options
def list_(limit: int | None, after: int | None, style: str, watch_s: float | None, bootstrap: str) -> None:
    """List the objects that the cluster's metadata knows."""
    cluster = ClusterConnection(bootstrap)
    empty = "no objects: records are uploaded with a delay (section [upload] of the configuration)"
    output.show(style, lambda: list(_pages(cluster, limit, after)), _render_list, watch_s=watch_s, empty=empty)


def _pages(cluster: ClusterConnection, limit: int | None, after: int | None) -> Iterator[dict[str, Any]]:
    left = limit
    while left is None or left > 0:
        size = PAGE if left is None else min(PAGE, left)
        query = {"limit": size} if after is None else {"limit": size, "after": after}
        page = cluster.get(f"/objects?{urlencode(query)}")
        yield from page["objects"]
        after = page["next_after"]
        if after is None:
            return
        left = left - size if left is not None else None


def _render_list(document: list[dict[str, Any]]) -> str:
    headers = ["ID", "KIND", "STATE", "SIZE", "STREAMS", "SINCE", "KEY"]
    rows = [
        [
            one["id"],
            one["kind"],
            one["state"],
            output.size(one["size_bytes"]),
            one["streams"],
            output.moment(one["since_ms"]),
            one["key"],
        ]
        for one in document
    ]
    return output.table(headers, rows, right=["ID", "SIZE", "STREAMS"])


@object_.command()
@click.argument("object_id", type=click.IntRange(min=0), metavar="ID", shell_complete=object_ids)
@format_option
@watch_option
@admin_options
def inspect(object_id: int, style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show an object's footer and the blocks of its index."""
    cluster = ClusterConnection(bootstrap)
    output.show(style, lambda: _ask(lambda: cluster.get(f"/objects/{object_id}")), _render_object, watch_s=watch_s)


def _ask(request: Callable[[], T]) -> T:
    """Run the request; if the object does not exist, add the command line's hint."""
    try:
        return request()
    except NotFound as error:
        raise NotFound(error.message, hint="`tidelog object list` shows them") from error


def _render_object(document: dict[str, Any]) -> str:
    about = [
        ("object", document["id"]),
        ("key", document["key"]),
        ("kind", document["kind"]),
        ("state", document["state"]),
        ("size", f"{output.size(document['size_bytes'])} ({document['size_bytes']} bytes)"),
        ("created", output.moment(document["created_ms"])),
        ("appends", document["records"]),
    ]
    headers = ["STREAM", "TOPIC", "PARTITION", "PART", "START", "END", "APPENDS", "POSITION", "LENGTH", "CRC32C"]
    rows = [[block[key] for key in _BLOCK_KEYS] for block in document["blocks"]]
    right = [name for name in headers if name not in ("TOPIC", "PART", "CRC32C")]
    return f"{output.pairs(about)}\n\n{output.table(headers, rows, right=right)}"


# --- verify ------------------------------------------------------------------------------------------------------


@object_.command()
@click.argument("object_ids", nargs=-1, type=click.IntRange(min=0), metavar="[ID]...", shell_complete=object_ids)
@format_option
@admin_options
def verify(object_ids: tuple[int, ...], style: str, bootstrap: str) -> None:
    """Read and check every byte of all objects, or of the given ones. Exits 7 if a problem is found.

    What was found is shown, and exits 7, although a broker or the bucket fails before the end.
    """
    cluster = ClusterConnection(bootstrap)
    findings: list[dict[str, Any]] = []
    counted = {"objects": 0, "bytes": 0}
    problem = None
    try:
        _ask(lambda: _follow(cluster, object_ids, findings, counted))
    except Unavailable as error:
        if not findings:
            raise
        problem = error.message
    else:
        _tell_others(cluster, object_ids, findings)
    document: dict[str, Any] = {**counted, "findings": findings}
    if problem is not None:
        document["problem"] = problem

    def render(document: dict[str, Any]) -> str:
        checked = f"{document['objects']} objects, {output.size(document['bytes'])} checked"
        if not findings:
            return f"sound: {checked}"
        if problem is not None:
            checked += f", and the others not: {problem}"
        rows = [row for one in findings for row in _finding_rows(one)]
        return f"{output.table(_FINDING_HEADERS, rows, right=['OBJECT', 'BYTE', 'START', 'END'])}\n\nDAMAGED: {checked}"

    output.show(style, lambda: document, render)
    if findings:
        raise CorruptData(
            f"{len(findings)} problem{'' if len(findings) == 1 else 's'} found in the bucket",
            hint="`tidelog object inspect ID` shows the affected streams; see docs/operations.md",
        )


def _finding_rows(finding: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield a row for each stream with unreadable offsets; of many, the first few and the number of others."""
    streams = finding["streams"]
    head = [finding["key"] if finding["object"] is None else finding["object"], finding["part"], finding["position"]]
    for one in streams[:_STREAMS_SHOWN]:
        whose = [one["topic"], one["partition"], one["part"], one["start_offset"], one["end_offset"]]
        yield [*head, one["stream_id"], *whose, finding["problem"]]
    if len(streams) > _STREAMS_SHOWN or not streams:
        more = f"and {len(streams) - _STREAMS_SHOWN} more streams" if streams else finding["problem"]
        yield [*head, None, None, None, None, None, None, more]


def _tell_others(cluster: ClusterConnection, object_ids: tuple[int, ...], findings: list[dict[str, Any]]) -> None:
    """Have each other broker verify what it takes for damaged or does not compact, so that it learns what is sound.

    Each keeps its own list. Of one that does not answer, or aborts, it is warned: it keeps it until the next time.
    """
    known = [(one["object"], one["part"], one["position"]) for one in findings]
    try:
        status = cluster.get("/status")
    except TidelogError as error:
        output.warn(f"the other brokers keep what they take for damaged: {error.message}")
        return
    for row in status["nodes"]:
        if row["id"] == status["node_id"] or not row["admin_url"] or row["state"] not in GOOD_STATES:
            continue
        theirs: list[dict[str, Any]] = []
        try:
            _follow(cluster.at(row["admin_url"], row["id"]), object_ids, theirs, {}, suspects=True)
        except TidelogError as error:
            output.warn(f"broker {row['id']} keeps what it takes for damaged: {error.message}")
        findings += [one for one in theirs if (one["object"], one["part"], one["position"]) not in known]


def _follow(
    cluster: ClusterConnection,
    object_ids: tuple[int, ...],
    findings: list[dict[str, Any]],
    counted: dict[str, int],
    *,
    suspects: bool = False,
) -> None:
    """Collect the findings, and count what is checked, while the broker checks. Raises `Unavailable` if it aborts."""
    query = urlencode([*(("id", each) for each in object_ids), *([("suspects", "true")] if suspects else [])])
    with ProgressBar("verifying") as progress:
        total = 0
        for line in cluster.post_lines(f"/objects/verify?{query}"):
            event = line["event"]
            if event == "start":
                total = line["bytes"]
                progress.update(0, total)
            elif event in ("progress", "done"):
                counted.update(objects=line["objects"], bytes=line["bytes"])
                progress.update(line["bytes"], total)
            elif event == "finding":
                findings.append({key: value for key, value in line.items() if key != "event"})
            elif event == "error":
                raise Unavailable(f"object {line['object']}: {line['error']}", hint=line["hint"])
            if event == "done":
                return
    raise Unavailable("the verification was cut short", hint="try again; see `tidelog status`")


# --- accept-loss -------------------------------------------------------------------------------------------------


@object_.command("accept-loss")
@click.argument("loss", metavar="LOSS")
@click.option(
    "--data-dir", type=click.Path(path_type=Path), metavar="DIR", help="The node's data directory [tidelog-data]."
)
@config_options
def accept_loss(loss: str, data_dir: Path | None, config_file: Path | None, assignments: tuple[str, ...]) -> None:
    """Give up the objects of a bucket that has lost them: LOSS as the refused start printed it.

    Takes effect at the next start of this node, once. The metadata goes on naming the objects; `tidelog object verify`
    lists what cannot be read.
    """
    from tidelog.process.accepted_loss import BUCKET_LOSS, accept

    config = load_config(
        config_file, assignments, node__data_dir=str(data_dir) if data_dir is not None else None
    ).config
    path = accept(Path(config.node.data_dir), loss, BUCKET_LOSS)
    output.emit(f"accepted loss {loss} in {path}: start the node again")

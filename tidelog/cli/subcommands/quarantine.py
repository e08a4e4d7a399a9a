"""`tidelog object quarantine list|release|records`: list and release quarantined streams.

The records of such a stream in the WAL do not follow its committed end (docs/rules.md, rule 5). They were set aside in
the bucket; the partition stays closed. A release reopens it at the committed end, without the records set aside;
`records` prints these, before and after, as input for `tidelog produce`.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection
from tidelog.cli.completion import quarantined
from tidelog.cli.options import admin_options, format_option, watch_option
from tidelog.runtime.errors import CorruptData, InvalidInput, NotFound, Unavailable

Row = dict[str, Any]


@click.group()
def quarantine() -> None:
    """Show and release streams whose WAL records do not follow the committed end."""


@quarantine.command("list")
@format_option
@watch_option
@admin_options
def list_(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the quarantined streams, the reasons, and the records set aside."""
    cluster = ClusterConnection(bootstrap)
    output.show(style, lambda: _rows(cluster), _render, watch_s=watch_s, empty="no stream is quarantined")


def _rows(cluster: ClusterConnection) -> list[Row]:
    rows: list[Row] = cluster.get("/quarantine")["streams"]
    return rows


def _render(rows: list[Row]) -> str:
    headers = ["STREAM", "TOPIC", "PARTITION", "OF", "GOES-ON-AT", "SET-ASIDE", "REASON"]
    cells = [
        [
            row["stream"],
            row["topic"],
            row["partition"],
            row["part"],
            row["end_offset"],
            output.size(row["size_bytes"]),
            row["reason"],
        ]
        for row in rows
    ]
    return output.table(headers, cells, right=["STREAM", "PARTITION", "GOES-ON-AT", "SET-ASIDE"])


@quarantine.command()
@click.argument("partition", metavar="TOPIC:PARTITION", shell_complete=quarantined)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@format_option
@admin_options
def release(partition: str, yes: bool, style: str, bootstrap: str) -> None:
    """Reopen a partition at its committed end. Records set aside stay in the bucket and out of the log."""
    topic, number = _place(partition)
    cluster = ClusterConnection(bootstrap)
    mine = [row for row in _rows(cluster) if (row["topic"], row["partition"]) == (topic, number)]
    if not mine:
        raise NotFound(f"no stream of {partition} is quarantined", hint="`tidelog object quarantine list` shows them")
    if not yes:
        size = output.size(sum(row["size_bytes"] for row in mine))
        output.confirm(f"reopen {partition} without {size} that were set aside")
    answer = cluster.post("/quarantine/release?" + urlencode([("stream", row["stream"]) for row in mine]))
    if style == "json":
        output.emit(json.dumps({**answer, "streams": mine}, indent=2))
        return
    for row in mine:
        output.emit(f"released the {row['part']} stream of {partition}: it continues at {row['end_offset']}")
        for key in row["objects"]:
            output.emit(f"set aside: {key}")


@quarantine.command()
@click.argument("partition", metavar="TOPIC:PARTITION", shell_complete=quarantined)
@admin_options
def records(partition: str, bootstrap: str) -> None:
    """Write a partition's records set aside, one JSON per line, as `produce --format json` reads them."""
    topic, number = _place(partition)
    query = urlencode({"topic": topic, "partition": number})
    for line in ClusterConnection(bootstrap).post_lines(f"/quarantine/records?{query}"):
        if line["event"] == "record":
            output.emit(json.dumps(line["record"], ensure_ascii=False))
        elif line["event"] == "error":
            raise (CorruptData if line["corrupt"] else Unavailable)(line["error"], hint=line["hint"])
        else:
            return
    raise Unavailable("the response was interrupted", hint="try again; see `tidelog status`")


def _place(text: str) -> tuple[str, int]:
    topic, _, number = text.rpartition(":")
    if not topic or not number.isdecimal():
        raise InvalidInput(f"{text!r} is not TOPIC:PARTITION")
    return topic, int(number)

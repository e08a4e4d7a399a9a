"""`tidelog object quarantine list|release|records`: streams that take nothing more until a person has decided.

What the WAL held of such a stream does not follow what is committed of it (DESIGN.md, rule 5). It was set aside in the
bucket; the partition stays closed. A release lets it go on at what is committed, without what was set aside; `records`
shows that, before and after, and `tidelog produce` takes it.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlencode

import click

from runtime.errors import CorruptData, InvalidInput, NotFound, Unavailable
from tidelog import output
from tidelog.client import Cluster
from tidelog.options import bootstrap_option, format_option

Row = dict[str, Any]


@click.group()
def quarantine() -> None:
    """Show and release streams whose WAL does not fit what is committed."""


@quarantine.command("list")
@format_option
@bootstrap_option
def list_(style: str, bootstrap: str) -> None:
    """Show the quarantined streams, why they are, and what of them was set aside."""
    cluster = Cluster(bootstrap)
    output.show(style, lambda: _rows(cluster), _render, empty="no stream is quarantined")


def _rows(cluster: Cluster) -> list[Row]:
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
@click.argument("partition", metavar="TOPIC:PARTITION")
@click.option("--yes", is_flag=True, help="Do not ask.")
@format_option
@bootstrap_option
def release(partition: str, yes: bool, style: str, bootstrap: str) -> None:
    """Let a partition go on at what is committed of it. What was set aside stays in the bucket, and out of the log."""
    topic, number = _place(partition)
    cluster = Cluster(bootstrap)
    mine = [row for row in _rows(cluster) if (row["topic"], row["partition"]) == (topic, number)]
    if not mine:
        raise NotFound(f"no stream of {partition} is quarantined", hint="`tidelog object quarantine list` shows them")
    if not yes:
        size = output.size(sum(row["size_bytes"] for row in mine))
        output.confirm(f"let {partition} go on without {size} that were set aside")
    answer = cluster.post("/quarantine/release?" + urlencode([("stream", row["stream"]) for row in mine]))
    if style == "json":
        output.emit(json.dumps({**answer, "streams": mine}, indent=2))
        return
    for row in mine:
        output.emit(f"released the {row['part']} stream of {partition}: it goes on at {row['end_offset']}")
        for key in row["objects"]:
            output.emit(f"set aside: {key}")


@quarantine.command()
@click.argument("partition", metavar="TOPIC:PARTITION")
@bootstrap_option
def records(partition: str, bootstrap: str) -> None:
    """Write the records that were set aside of a partition, one JSON a line, as `produce --format json` takes them."""
    topic, number = _place(partition)
    query = urlencode({"topic": topic, "partition": number})
    for line in Cluster(bootstrap).post_lines(f"/quarantine/records?{query}"):
        if line["event"] == "record":
            output.emit(json.dumps(line["record"], ensure_ascii=False))
        elif line["event"] == "error":
            raise (CorruptData if line["corrupt"] else Unavailable)(line["error"], hint=line["hint"])
        else:
            return
    raise Unavailable("the records were cut short", hint="try again; see `tidelog status`")


def _place(text: str) -> tuple[str, int]:
    topic, _, number = text.rpartition(":")
    if not topic or not number.isdecimal():
        raise InvalidInput(f"{text!r} is not TOPIC:PARTITION")
    return topic, int(number)

"""`tidelog snapshot create|list|describe|delete`: named snapshots, which hold topics as they are at one moment.

A snapshot copies nothing: it keeps the objects that have the records in the bucket, whatever retention, compaction or
the deletion of the topic would do with them. What it costs is what only it keeps.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection, unknown
from tidelog.cli.completion import snapshot_names, topic_names
from tidelog.cli.options import admin_options, bootstrap_option, format_option, price_option, watch_option
from tidelog.console.prices import Prices, load_prices, priced

Row = dict[str, Any]


@click.group()
def snapshot() -> None:
    """Hold topics as they are now: take, list, describe and delete snapshots."""


@snapshot.command()
@click.argument("name")
@click.option(
    "--topics",
    "topics",
    multiple=True,
    metavar="TOPIC[,TOPIC...]",
    shell_complete=topic_names,
    help="Which topics; may repeat. Default: all that are not internal.",
)
@format_option
@admin_options
def create(name: str, topics: tuple[str, ...], style: str, bootstrap: str) -> None:
    """Take a snapshot. Every record that was acknowledged before is in it; nothing is copied."""
    cluster = ClusterConnection(bootstrap)
    wanted = [each for text in topics for each in text.split(",") if each]
    begun = time.monotonic()
    row = cluster.post("/snapshots?" + urlencode([("name", name), *(("topic", each) for each in wanted)]))
    row["milliseconds"] = round((time.monotonic() - begun) * 1000, 1)
    if style == "json":
        output.emit(json.dumps(row, indent=2))
        return
    output.emit(
        f"took snapshot {row['name']} of {_count(len(row['topics']), 'topic')},"
        f" {_count(row['partitions'], 'partition')}, {row['records']} offsets, in {row['milliseconds']:.0f} ms:"
        f" it holds {_count(row['objects'], 'object')}, {output.size(row['object_bytes'])}"
    )


@snapshot.command("list")
@price_option()
@format_option
@watch_option
@bootstrap_option
def list_(price_file: Path | None, style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the snapshots: what each holds, what only it keeps in the bucket, and what that costs a month."""
    prices = load_prices(price_file)
    cluster = ClusterConnection(bootstrap)
    output.show(
        style,
        lambda: [priced(row, prices) for row in cluster.get("/snapshots")["snapshots"]],
        lambda rows: _render(rows, prices),
        watch_s=watch_s,
        empty="there are no snapshots; `tidelog snapshot create NAME` takes one",
    )


@snapshot.command()
@click.argument("name", shell_complete=snapshot_names)
@price_option()
@format_option
@watch_option
@bootstrap_option
def describe(name: str, price_file: Path | None, style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show one snapshot, with the offsets that it holds of each partition."""
    prices = load_prices(price_file)
    cluster = ClusterConnection(bootstrap)

    def load() -> Row:
        _require(cluster, name)
        return priced(cluster.get("/snapshots/describe?" + urlencode({"name": name})), prices)

    output.show(style, load, lambda row: _render_one(row, prices), watch_s=watch_s)


@snapshot.command()
@click.argument("name", shell_complete=snapshot_names)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@format_option
@admin_options
def delete(name: str, yes: bool, style: str, bootstrap: str) -> None:
    """Delete a snapshot. What only it held is deleted from the bucket; topics are not touched."""
    cluster = ClusterConnection(bootstrap)
    row = _require(cluster, name)
    if not yes:
        output.confirm(f"delete snapshot {name}, and with it {output.size(row['only_bytes'])} that only it keeps")
    row = cluster.post("/snapshots/delete?" + urlencode({"name": name}))
    if style == "json":
        output.emit(json.dumps(row, indent=2))
        return
    output.emit(
        f"deleted snapshot {name}, which alone kept {_count(row['only_objects'], 'object')},"
        f" {output.size(row['only_bytes'])}"
    )


def _require(cluster: ClusterConnection, name: str) -> Row:
    """Return the snapshot's row. Raises `NotFound` that suggests the nearest name."""
    rows: list[Row] = cluster.get("/snapshots")["snapshots"]
    found = next((row for row in rows if row["name"] == name), None)
    if found is None:
        names = [row["name"] for row in rows]
        raise unknown("snapshot", name, names, otherwise="`tidelog snapshot list` shows them")
    return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _money(row: Row) -> str:
    return f"{row['cost_per_month']:.4g}"


def _render(rows: list[Row], prices: Prices) -> str:
    cells = [
        [
            row["name"],
            output.moment(row["created_ms"]),
            len(row["topics"]),
            row["partitions"],
            row["objects"],
            output.size(row["object_bytes"]),
            output.size(row["only_bytes"]),
            _money(row),
        ]
        for row in rows
    ]
    numbers = ["TOPICS", "PARTITIONS", "OBJECTS", "HELD", "ONLY-BY-IT", f"{prices.currency}/MONTH"]
    return output.table(["SNAPSHOT", "TAKEN", *numbers], cells, right=numbers)


def _render_one(row: Row, prices: Prices) -> str:
    about = output.pairs(
        [
            ("snapshot", row["name"]),
            ("taken", f"{output.moment(row['created_ms'])}, at metadata version {row['version']}"),
            ("holds", f"{_count(row['objects'], 'object')}, {output.size(row['object_bytes'])}"),
            ("only by it", f"{_count(row['only_objects'], 'object')}, {output.size(row['only_bytes'])}"),
            ("costs", f"{_money(row)} {prices.currency} a month, for what only it keeps"),
        ]
    )
    keys = ["topic", "partition", "start_offset", "end_offset", "leader_epoch"]
    cells = [[each[key] for key in keys] for each in row["partitions_held"]]
    numbers = ["PARTITION", "FROM", "TO", "EPOCH"]
    return f"{about}\n\n{output.table(['TOPIC', *numbers], cells, right=numbers)}"

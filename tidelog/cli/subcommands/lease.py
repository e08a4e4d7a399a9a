"""`tidelog lease list|end`: leases of readers outside the cluster, which keep objects in the bucket.

Readers take and renew their leases themselves; an operator sees what they hold up, and ends those of readers that are
gone. A reader whose lease was ended takes another one and looks up its objects again.
"""

from __future__ import annotations

import json
from typing import Any

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection
from tidelog.cli.completion import lease_ids
from tidelog.cli.options import admin_options, bootstrap_option, format_option, watch_option
from tidelog.runtime.errors import NotFound

Row = dict[str, Any]


@click.group()
def lease() -> None:
    """Show and end leases of readers outside the cluster."""


@lease.command("list")
@format_option
@watch_option
@bootstrap_option
def list_(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the leases, and how many deleted objects each keeps in the bucket."""
    cluster = ClusterConnection(bootstrap)
    output.show(style, lambda: _rows(cluster), _render, watch_s=watch_s, empty="there are no leases")


def _rows(cluster: ClusterConnection) -> list[Row]:
    rows: list[Row] = cluster.get("/leases")["leases"]
    return rows


def _render(rows: list[Row]) -> str:
    cells = [
        [
            row["id"],
            row["holder"],
            row["version"],
            output.moment(row["since_ms"]),
            f"{row['hold_ms'] / 3_600_000:g} h",
            row["held_objects"],
        ]
        for row in rows
    ]
    headers = ["LEASE", "HOLDER", "VERSION", "SINCE", "BOUND", "HELD-OBJECTS"]
    return output.table(headers, cells, right=["LEASE", "VERSION", "BOUND", "HELD-OBJECTS"])


@lease.command()
@click.argument("lease_id", metavar="LEASE", type=click.IntRange(min=1), shell_complete=lease_ids)
@format_option
@admin_options
def end(lease_id: int, style: str, bootstrap: str) -> None:
    """End a lease. Its reader looks up its objects again."""
    cluster = ClusterConnection(bootstrap)
    row = next((each for each in _rows(cluster) if each["id"] == lease_id), None)
    if row is None:
        raise NotFound(f"there is no lease {lease_id}", hint="`tidelog lease list` shows them")
    cluster.post(f"/leases/end?id={lease_id}")
    if style == "json":
        output.emit(json.dumps(row, indent=2))
        return
    holder = output.cell(row["holder"])
    output.emit(f"ended lease {lease_id} of {holder}, which kept {row['held_objects']} deleted objects")

"""`tidelog cost`: the cost of the bucket, by purpose and by topic, with configurable prices.

The usage comes from the brokers (`GET /bucket/usage`), the prices from a file or the defaults, which are an assumption
and are shown as such. Every live broker is requested; one that does not respond is reported and left out.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection
from tidelog.cli.many import ask_at_once
from tidelog.cli.options import DurationType, bootstrap_option, format_option, price_option, watch_option
from tidelog.cli.subcommands.status import GOOD_STATES
from tidelog.console.costs import SHARED, bill, difference
from tidelog.console.prices import load_prices, to_toml
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.progress import SECONDS
from tidelog.runtime.progress_bar import ProgressBar

USAGE = "/bucket/usage"
USAGE_TIMEOUT_S = 10.0
ROUGH_S = 600.0
"""Shorter measurements extrapolate badly to a month: uploads and compactions come in bursts."""


@click.command()
@price_option("TOML or JSON; default: assumed prices of AWS S3 Standard")
@click.option("--print-prices", is_flag=True, help="Print the price table as TOML, as a template, and exit.")
@click.option(
    "--window", type=DurationType(), metavar="TIME", help="Measure for this time (30s, 10m); default: since the start."
)
@format_option
@watch_option
@bootstrap_option
def cost(
    price_file: Path | None, print_prices: bool, window: int | None, style: str, watch_s: float | None, bootstrap: str
) -> None:
    """Show what the bucket costs: by purpose and topic, so far, a month, and a GB written."""
    prices = load_prices(price_file)
    if print_prices:
        output.emit(to_toml(prices))
        return
    cluster = ClusterConnection(bootstrap)

    def load() -> dict[str, Any]:
        usages = _ask(cluster)
        if window:
            before = {usage["node_id"]: usage for usage in usages}
            _wait(window / 1000)
            usages = [difference(before.get(usage["node_id"], usage), usage) for usage in _ask(cluster)]
        return bill(usages, prices)

    output.show(style, load, _render, watch_s=watch_s)


def _wait(seconds: float) -> None:
    began = time.monotonic()
    with ProgressBar("measuring", round(seconds), SECONDS) as progress:
        while (left := began + seconds - time.monotonic()) > 0:
            progress.update(round(seconds - left))
            time.sleep(min(left, 1.0))


def _ask(cluster: ClusterConnection) -> list[dict[str, Any]]:
    """Return the usage of every broker that responds, the connected broker first. Raises `Unavailable`."""
    usages: list[dict[str, Any]] = [cluster.get(USAGE)]

    def ask(node: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = cluster.ask(node["admin_url"], USAGE, timeout_s=USAGE_TIMEOUT_S, broker=node["id"])
        return found

    asked = {}
    for node in cluster.get("/status")["nodes"]:
        if node["id"] == usages[0]["node_id"]:
            continue
        if node["state"] in GOOD_STATES:
            asked[node["id"]] = partial(ask, node)
        else:
            output.warn(f"broker {node['id']} is {node['state']}: its bucket usage is missing")
    for broker, answer in ask_at_once(asked, USAGE_TIMEOUT_S).items():
        if isinstance(answer, TidelogError):
            output.warn(f"broker {broker} does not report its bucket usage: {answer.message}")
        else:
            usages.append(answer)
    return usages


def _render(document: dict[str, Any]) -> str:
    total, stored = document["total"], document["stored"]
    seconds = max(node["seconds"] for node in document["nodes"])
    measured = _span(seconds)
    if seconds < ROUGH_S:
        measured += ": too short for a good extrapolation"
    stock = f"{output.size(stored['bytes'])} in {stored['objects']} objects"
    if stored["held"]["bytes"]:
        stock += f", of them {output.size(stored['held']['bytes'])} only for snapshots and branches"
    if stored["waiting"]["bytes"]:
        stock += f", of them {output.size(stored['waiting']['bytes'])} waiting to be deleted"
    about = [
        ("bucket", document["bucket"]),
        ("prices", f"{document['prices']['name']}; in {document['currency']}"),
        ("measured", measured),
        ("written", output.size(document["produced_bytes"])),
        ("stored", stock),
    ]
    purposes = [(one["purpose"], one, None) for one in document["purposes"] if one["requests"]]
    written = _money(total["cost_per_gb_written"])
    return "\n\n".join(
        [
            output.pairs(about),
            _table("PURPOSE", [*purposes, ("(all)", total, None)]),
            _table("TOPIC", [(_name(one), one, one["stored_bytes"]) for one in document["topics"]]),
            output.pairs(
                [
                    ("so far", f"{_money(total['cost'])} {document['currency']}"),
                    ("a month", _month(total, document["currency"])),
                    ("a GB written", written and f"{written} {document['currency']}, without storage"),
                ]
            ),
        ]
    )


def _month(total: dict[str, Any], currency: str) -> str:
    storage = _money(total["storage_cost_per_month"])
    return f"{_money(total['cost_per_month'])} {currency}, of it {storage} for storage"


def _name(row: dict[str, Any]) -> str:
    return "(shared)" if row["topic"] is SHARED else str(row["topic"])


def _table(kind: str, rows: list[tuple[str, dict[str, Any], int | None]]) -> str:
    operations = ["PUT", "LIST", "GET", "HEAD", "DELETE"]
    headers = [kind, *operations, "RECEIVED", "SENT", "STORED", "SO-FAR", "MONTH", "GB-WRITTEN"]
    lines = []
    for name, one, stored in rows:
        counts = [_count(one["requests"].get(key.lower(), 0)) for key in operations]
        sizes = [output.size(one["received_bytes"]), output.size(one["sent_bytes"]), output.size(stored)]
        money = [_money(one[key]) for key in ("cost", "cost_per_month", "cost_per_gb_written")]
        lines.append([name, *counts, *sizes, *money])
    if kind == "PURPOSE":
        headers.remove("STORED")
        for line in lines:
            del line[8]
    return output.table(headers, lines, right=headers[1:])


def _count(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def _money(value: float | None) -> str | None:
    """Format an amount with two decimals, a small amount with two significant digits."""
    if value is None:
        return None
    if value == 0 or value >= 1:
        return f"{value:.2f}"
    for decimals in range(2, 12):
        if value >= 10 ** (1 - decimals):
            return f"{value:.{decimals}f}"
    return "0.00"


def _span(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"

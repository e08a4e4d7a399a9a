"""`tidelog status`: the cluster's nodes, what they have to do, and what is wrong, if anything.

The broker that `--bootstrap` reaches names the others; each is asked for what only it knows. Exit code 10 when
something is wrong, 5 when no broker can be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from runtime.errors import TidelogError
from tidelog import output
from tidelog.client import Cluster, http_json
from tidelog.options import bootstrap_option, format_option, watch_option

SOMETHING_WRONG = 10
"""Exit code."""
GOOD_STATES = ("ready", "alive", "draining", "drained")

Document = dict[str, Any]
_RIGHT = ["NODE", "PID", "PARTITIONS", "WAL", "TO-UPLOAD", "MEMORY", "LOG-CACHE"]


@click.command()
@format_option
@watch_option
@bootstrap_option
def status(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the cluster's nodes and what is wrong, if anything."""
    cluster = Cluster(bootstrap)
    document = output.show(style, lambda: gather(cluster.get("/status"), _ask), _render, watch_s=watch_s)
    if document["problems"]:
        raise click.exceptions.Exit(SOMETHING_WRONG)


def _ask(admin_url: str) -> Document:
    answer = http_json(admin_url, "/status")
    assert isinstance(answer, dict)
    return answer


def gather(asked: Document, ask: Callable[[str], Document]) -> Document:
    """One document of the whole cluster: that of the node asked first, with what `ask` brings from each other one.

    Each node's `wal`, `upload`, `memory`, `bucket` and `partitions` are its own; `problems` are everybody's.
    """
    nodes = []
    problems = list(asked["problems"])
    for row in asked["nodes"]:
        if row["id"] == asked["node_id"]:
            nodes.append({**row, **_own(asked)})
            continue
        if "broker" not in row["roles"]:
            nodes.append(row)  # what is wrong with a controller the broker that was asked has said
            continue
        if row["state"] not in GOOD_STATES:
            problems.append(f"broker {row['id']} at {row['address']} is {row['state']}")
            nodes.append(row)
            continue
        try:
            answer = ask(row["admin_url"])
        except TidelogError as error:
            problems.append(f"broker {row['id']}: {error.message}")
            nodes.append(row)
            continue
        own = next((one for one in answer["nodes"] if one["id"] == row["id"]), row)
        own = {**own, **({"controller": row["controller"]} if "controller" in row else {})}
        nodes.append({**own, **_own(answer)})
        problems += [one for one in answer["problems"] if one not in problems]
    common = ("cluster_id", "node_id", "time_ms", "image_version", "topics")
    return {**{key: asked[key] for key in common}, "nodes": nodes, "problems": problems}


def _own(answer: Document) -> Document:
    return {key: answer[key] for key in ("partitions", "wal", "upload", "memory", "bucket")}


def _render(document: Document) -> str:
    about = [("cluster", document["cluster_id"]), ("topics", document["topics"])]
    headers = [
        "NODE",
        "ROLES",
        "PID",
        "ADDRESS",
        "STATE",
        "CONTROLLER",
        "PARTITIONS",
        "WAL",
        "TO-UPLOAD",
        "MEMORY",
        "LOG-CACHE",
        "BUCKET",
    ]
    rows = [_row(node) for node in document["nodes"]]
    text = [output.pairs(about), output.table(headers, rows, right=_RIGHT)]
    problems = document["problems"]
    if problems:
        text.append("problems:\n" + "\n".join(f"  - {problem}" for problem in problems))
    else:
        text.append("no problems")
    return "\n\n".join(text)


def _row(node: Document) -> list[Any]:
    row = [node["id"], ",".join(node["roles"]), node["pid"], node["address"], node["state"], node.get("controller")]
    if "wal" not in node:
        return [*row, None, None, None, None, None, None]
    partitions, wal, memory, bucket = node["partitions"], node["wal"], node["memory"], node["bucket"]
    opened, led = partitions.get("open"), partitions.get("led")
    return [
        *row,
        opened if opened == led else f"{opened} of {led}",
        output.size(wal["end_offset"] - wal["start_offset"]),
        output.size(node["upload"]["backlog_bytes"]),
        output.size(memory["resident_bytes"]),
        f"{memory['log_cache_bytes'] / memory['log_cache_bound_bytes']:.0%}",
        f"{'ok' if bucket['healthy'] else 'FAILING'} {bucket['url']}",
    ]

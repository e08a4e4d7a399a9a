"""`tidelog status`: the cluster's nodes, their backlog, and problems.

The broker at `--bootstrap` lists the others; each is requested for its own state. Exit code 10 if there is a problem, 5
if no broker can be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection, http_json
from tidelog.cli.many import BROKER_TIMEOUT_S, ask_at_once
from tidelog.cli.options import bootstrap_option, format_option, watch_option
from tidelog.runtime.errors import TidelogError, Unavailable

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
    cluster = ClusterConnection(bootstrap)
    document = output.show(style, lambda: gather(cluster.get("/status"), status_at), _render, watch_s=watch_s)
    if document["problems"]:
        raise click.exceptions.Exit(SOMETHING_WRONG)


def status_at(admin_url: str, broker: int) -> Document:
    """Ask a broker for its state. Raises what `http_json` raises."""
    answer: Document = http_json(admin_url, "/status", timeout_s=BROKER_TIMEOUT_S, broker=broker)
    return answer


def gather(asked: Document, ask: Callable[[str, int], Document], timeout_s: float = BROKER_TIMEOUT_S) -> Document:
    """Return a document of the whole cluster: that of the connected node, with the results of `ask` for the others:
    it gets the admin URL and the id of each, at the same time. `timeout_s`: how long it takes at the most.

    `partitions`, `wal`, `upload`, `memory`, `bucket` and `health` are each node's own; `problems` are those of all.
    """
    nodes = []
    problems = list(asked["problems"])
    taking_over = list(asked["failover"].get("taking_over", []))
    others = [row for row in asked["nodes"] if row["id"] != asked["node_id"] and "broker" in row["roles"]]
    living = {
        row["id"]: partial(own_status, row, asked["cluster_id"], ask) for row in others if row["state"] in GOOD_STATES
    }
    answers = ask_at_once(living, timeout_s)
    for row in asked["nodes"]:
        if row["id"] == asked["node_id"]:
            nodes.append({**row, **_own(asked)})
            continue
        if "broker" not in row["roles"]:
            nodes.append(row)  # the connected broker has reported the problems of controllers
            continue
        if row["state"] not in GOOD_STATES:
            problems.append(f"broker {row['id']} at {row['address']} is {row['state']}")
            nodes.append(row)
            continue
        answer = answers[row["id"]]
        if isinstance(answer, TidelogError):
            problems.append(f"broker {row['id']}: {answer.message}")
            nodes.append(row)
            continue
        own = next((one for one in answer["nodes"] if one["id"] == row["id"]), row)
        own = {**own, **({"controller": row["controller"]} if "controller" in row else {})}
        nodes.append({**own, **_own(answer)})
        taking_over += answer["failover"].get("taking_over", [])
        problems += [one for one in answer["problems"] if one not in problems]
    common = ("cluster_id", "node_id", "time_ms", "image_version", "level", "topics")
    failovers = _failovers(asked["failover"].get("lost", []), taking_over)
    return {
        **{key: asked.get(key, 0) for key in common},
        "metadata_in_bucket": asked.get("metadata_in_bucket"),
        "leases": asked.get("leases"),
        "nodes": nodes,
        "failovers": failovers,
        "moves": asked["moves"],
        "problems": problems,
    }


def own_status(row: Document, cluster_id: str, ask: Callable[[str, int], Document] = status_at) -> Document:
    """Return a broker's own state. Raises what `ask` raises, and `Unavailable`: an older broker answers for any other.

    `row`: with its `id` and `admin_url`. `cluster_id`: of its cluster; empty: it is not known.
    """
    answer: Any = ask(row["admin_url"], row["id"])
    if not isinstance(answer, dict) or answer.get("node_id") != row["id"]:
        raise Unavailable(f"what answers at {row['admin_url']} is another broker or program")
    if cluster_id and (other := answer.get("cluster_id")) not in (None, cluster_id):
        raise Unavailable(f"what answers at {row['admin_url']} is a broker of cluster {other}")
    return dict(answer)


def _failovers(lost: list[Document], taking_over: list[Document]) -> list[Document]:
    """The dead brokers with their backlog, and the progress of the successor."""
    work = {(one["broker"], one["since_ms"]): one for one in taking_over}
    rows = []
    for one in lost:
        doing = work.get((one["broker"], one["since_ms"]), {})
        told = {name: doing.get(name) for name in ("step", "wal_bytes", "partitions_placed", "error")}
        rows.append({**one, **told})
    return rows


def _own(answer: Document) -> Document:
    own = ("partitions", "wal", "upload", "memory", "bucket", "health")
    return {key: answer[key] for key in own if key in answer}


def _render(document: Document) -> str:
    about = [("cluster", document["cluster_id"]), ("level", document["level"]), ("topics", document["topics"])]
    about.append(("metadata in bucket", _metadata_state(document["metadata_in_bucket"])))
    if (document["leases"] or {"count": 0})["count"]:
        about.append(("leases of readers", _leases(document["leases"])))
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
    if document["failovers"]:
        text.append("failovers:\n" + _render_failovers(document["failovers"]))
    if document["moves"]["total"]:
        text.append(_render_moves(document["moves"]))
    problems = document["problems"]
    if problems:
        text.append("problems:\n" + "\n".join(f"  - {problem}" for problem in problems))
    else:
        text.append("no problems")
    return "\n\n".join(text)


def _metadata_state(state: Document | None) -> str:
    """What the active controller has written for `tidelog cluster rebuild`."""
    if state is None or state["at_ms"] is None:
        return "none yet" if state is None or not state["problem"] else f"none: {state['problem']}"
    text = f"{output.moment(state['at_ms'])}, {output.size(state['size_bytes'])}"
    return f"{text}; FAILING: {state['problem']}" if state["problem"] else text


def _leases(leases: Document) -> str:
    oldest = leases["oldest"]
    return (
        f"{leases['count']}; the oldest, of {oldest['holder']} since {output.moment(oldest['since_ms'])},"
        f" keeps {oldest['held_objects']} deleted objects"
    )


def _render_failovers(rows: list[Document]) -> str:
    headers = ["DEAD-BROKER", "WAL", "STATE", "BY", "STEP", "RECOVERED", "PARTITIONS-LEFT", "SINCE", "ERROR"]
    cells = [
        [
            row["broker"],
            row["wal"],
            row["state"],
            row["by"],
            row["step"],
            output.size(row["wal_bytes"]),
            row["partitions"],
            output.moment(row["since_ms"]),
            row["error"],
        ]
        for row in rows
    ]
    return output.table(headers, cells, right=["DEAD-BROKER", "BY", "RECOVERED", "PARTITIONS-LEFT"])


def _render_moves(moves: Document) -> str:
    rows = [
        [one["topic"], one["partition"], one["from"], one["to"], output.moment(one["since_ms"])]
        for one in moves["first"]
    ]
    table = output.table(["TOPIC", "PARTITION", "FROM", "TO", "SINCE"], rows, right=["PARTITION", "FROM", "TO"])
    more = moves["total"] - len(rows)
    return f"moving:\n{table}" + (f"\nand {more} more: `tidelog partition list`" if more else "")


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

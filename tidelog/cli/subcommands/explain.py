"""`tidelog explain TOPIC:PARTITION@OFFSET` and `tidelog explain --slow`: where one record went and when, and what the
slowest requests of the last hour spent their time on.

The leader of the partition tells of the record, and each living broker of the groups that it coordinates and of its
slow requests. A broker that does not answer is named, and the others' answers are shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlencode

import click

from tidelog.cli import output
from tidelog.cli.client import REQUEST_TIMEOUT_S, ClusterConnection
from tidelog.cli.completion import partition_names
from tidelog.cli.many import ask_at_once
from tidelog.cli.options import admin_options, format_option, watch_option
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError, Unavailable

MAX_LIMIT = 100
BROKER_TIMEOUT_S = 10.0
"""For each piece of a broker's answer, while others are asked, too."""
SHOWN_GROUPS = 20

Document = dict[str, Any]


class _RecordPlace(NamedTuple):
    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}@{self.offset}"


@click.command()
@click.argument("record", required=False, metavar="[TOPIC:PARTITION@OFFSET]", shell_complete=partition_names)
@click.option("--slow", is_flag=True, help="The slowest requests of the last hour, and what they waited for.")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, MAX_LIMIT),
    default=5,
    show_default=True,
    help="With --slow: requests of each API.",
)
@click.option("--api", metavar="NAME", help="With --slow: only this API, for example Produce.")
@click.option("--topic", metavar="NAME", help="With --slow: only requests whose first partition is of this topic.")
@format_option
@watch_option
@admin_options
def explain(
    record: str | None,
    slow: bool,
    limit: int,
    api: str | None,
    topic: str | None,
    style: str,
    watch_s: float | None,
    bootstrap: str,
) -> None:
    """Tell where one record went and when, or why requests were slow (--slow)."""
    if slow == (record is not None):
        raise InvalidInput(
            "name either a record or --slow", hint="for example `tidelog explain orders:0@42`, `tidelog explain --slow`"
        )
    cluster = ClusterConnection(bootstrap)
    if record is None:
        empty = "no requests yet"
        output.show(style, lambda: _slow(cluster, limit, api, topic), _render_slow, watch_s=watch_s, empty=empty)
        return
    place = _parse(record)
    output.show(style, lambda: _story(cluster, place), _render_story, watch_s=watch_s)


def _parse(text: str) -> _RecordPlace:
    where, at, offset = text.rpartition("@")
    topic, colon, partition = where.rpartition(":")
    is_number = all(each.isascii() and each.isdigit() and len(each) < 20 for each in (offset, partition))
    if not (at and colon and topic and is_number):
        raise InvalidInput(f"{text!r} is not a record", hint="use TOPIC:PARTITION@OFFSET, for example orders:0@42")
    return _RecordPlace(topic, int(partition), int(offset))


# --- one record ----------------------------------------------------------------------------------------------------


def _story(cluster: ClusterConnection, place: _RecordPlace) -> Document:
    """Ask the leader for the record, and all brokers for their groups. Raises `NotFound`, `Unavailable`."""
    nodes = cluster.get("/status")["nodes"]
    leader, url = _leader(cluster, place, nodes)
    query = urlencode({"topic": place.topic, "partition": place.partition, "offset": place.offset})
    document: Document = cluster.ask(url, f"/explain?{query}", timeout_s=REQUEST_TIMEOUT_S * 2, broker=leader)
    groups: list[Document] = []
    problems: list[str] = []
    where = urlencode({"topic": place.topic, "partition": place.partition})
    for answer in _ask_all(cluster, nodes, f"/explain/groups?{where}", problems):
        groups += answer["groups"]
        if answer["more"]:
            problems.append(f"broker {answer['broker']} coordinates {answer['more']} more groups, which are left out")
        if answer["loading"]:
            problems.append(f"broker {answer['broker']} is loading groups, which are left out")
    for one in groups:
        one["has_read"] = one["committed"] > place.offset
    document["groups"] = sorted(groups, key=lambda one: (not one["has_read"], one["group"]))
    document["problems"] = problems
    return document


def _leader(cluster: ClusterConnection, place: _RecordPlace, nodes: Iterable[Document]) -> tuple[int, str]:
    """Return the partition's leader, and its admin URL."""
    rows = cluster.get(f"/partitions?{urlencode({'topic': place.topic})}")["partitions"]
    row = next((one for one in rows if one["partition"] == place.partition), None)
    if row is None:
        raise NotFound(
            f"topic {place.topic} has {len(rows)} partitions, and no partition {place.partition}",
            hint=f"`tidelog topic describe {place.topic}` shows them",
        )
    if row["leader"] is None:
        raise Unavailable(
            f"nobody leads {place.topic}:{place.partition} now: broker {row['broker']} is dead, and only a leader "
            "knows its records",
            hint="`tidelog status` shows what is wrong",
        )
    url = next((one["admin_url"] for one in nodes if one["id"] == row["leader"]), None)
    if not url:
        raise Unavailable(
            f"broker {row['leader']} leads {place.topic}:{place.partition}, and its admin HTTP is not known",
            hint="`tidelog status` shows the brokers",
        )
    return row["leader"], str(url)


def _ask_all(cluster: ClusterConnection, nodes: Iterable[Document], path: str, problems: list[str]) -> list[Document]:
    """Return the answers of all living brokers; who does not answer is added to `problems`.

    Raises `InvalidInput`.
    """

    def ask(node: Document) -> Document:
        found: Document = cluster.ask(node["admin_url"], path, timeout_s=BROKER_TIMEOUT_S, broker=node["id"])
        return found

    asked = {}
    for node in nodes:
        if node["admin_url"] and node["state"] == "dead":
            problems.append(f"broker {node['id']} is dead: what it knew is not told")
        elif node["admin_url"]:
            asked[node["id"]] = partial(ask, node)
    answers = []
    for broker, answer in ask_at_once(asked, BROKER_TIMEOUT_S).items():
        if isinstance(answer, InvalidInput):
            raise answer  # it is what was asked for
        if isinstance(answer, TidelogError):
            problems.append(f"broker {broker}: {answer.message}")
        else:
            answers.append(answer)
    return answers


def _render_story(document: Document) -> str:
    place = f"{document['topic']}:{document['partition']}@{document['offset']}"
    about: list[tuple[str, Any]] = [
        ("record", place),
        ("now", document["summary"]),
        ("leader", f"broker {document['broker']}, leader epoch {document['leader_epoch']}"),
        ("remembers", f"since {output.moment(document['remembers_since_ms'])}"),
    ]
    about += _batch_lines(document["batch"], document["record"])
    if document["object"] is not None:
        about.append(("object", document["object"]["key"]))
    rows = [[one["stage"], _when(one), one["source"], one["detail"]] for one in document["stages"]]
    parts = [output.pairs(about), output.table(["STAGE", "WHEN", "FROM", "DETAIL"], rows)]
    if document["groups"]:
        parts.append(_group_table(document["groups"]))
    parts += [f"note: {each}" for each in document["problems"]]
    return "\n\n".join(parts)


def _batch_lines(batch: Document | None, record: Document | None) -> list[tuple[str, Any]]:
    lines: list[tuple[str, Any]] = []
    if batch is not None:
        span = f"offsets {batch['base_offset']} to {batch['last_offset']}"
        lines.append(("batch", f"{span}, {batch['size_bytes']} bytes, {batch['compression']}"))
        if batch["producer_id"] is not None:
            text = f"id {batch['producer_id']}, epoch {batch['producer_epoch']}"
            lines.append(
                ("producer", text + (f", sequence {batch['sequence']}" if batch["sequence"] is not None else ""))
            )
        if batch["transaction"] is not None:
            lines.append(("transaction", batch["transaction"]))
    if record is not None and record["marker"] is not None:
        lines.append(("marker", f"of a transaction: {record['marker']}"))
    elif record is not None:
        sizes = [f"{name} {_bytes(record[f'{name}_bytes'])}" for name in ("key", "value")]
        lines.append(("sizes", f"{', '.join(sizes)}, {record['headers']} headers"))
    return lines


def _bytes(count: int | None) -> str:
    return "null" if count is None else f"{count} bytes"


def _when(stage: Document) -> str | None:
    """Format a time or its bounds; without them, the state of the stage."""
    after, by = stage["after_ms"], stage["by_ms"]
    if after is None and by is None:
        return str(stage["state"])
    if after is None:
        return f"by {output.moment(by)}"
    if by is None:
        return f"after {output.moment(after)}"
    if after == by:
        return output.moment(by)
    return f"{output.moment(after)} + {_duration(by - after)}"


def _group_table(groups: list[Document]) -> str:
    rows = [
        [one["group"], one["committed"], one["has_read"], output.moment(one["commit_ms"])]
        for one in groups[:SHOWN_GROUPS]
    ]
    text = output.table(["GROUP", "COMMITTED", "READ", "COMMITTED-AT"], rows, right=["COMMITTED"])
    return text + (f"\nand {len(groups) - SHOWN_GROUPS} more groups" if len(groups) > SHOWN_GROUPS else "")


# --- slow requests -------------------------------------------------------------------------------------------------


def _slow(cluster: ClusterConnection, limit: int, api: str | None, topic: str | None) -> Document:
    """Return the slowest requests of all brokers, `limit` of each API. Raises `Unavailable` if none answers."""
    nodes = cluster.get("/status")["nodes"]
    wanted = {"limit": limit, "api": api, "topic": topic}
    query = urlencode({name: value for name, value in wanted.items() if value is not None})
    problems: list[str] = []
    answers = _ask_all(cluster, nodes, f"/requests/slow?{query}", problems)
    if not answers:
        raise Unavailable(f"no broker tells of slow requests: {'; '.join(problems)}", hint="see `tidelog status`")
    by_api: dict[str, list[Document]] = {}
    for answer in answers:
        for one in answer["requests"]:
            by_api.setdefault(one["api"], []).append({"broker": answer["broker"], **one})
    for name, requests in by_api.items():
        by_api[name] = sorted(requests, key=lambda one: -float(one["duration_ms"]))[:limit]
    return {
        "since_ms": {str(answer["broker"]): answer["since_ms"] for answer in answers},
        "requests": [one for _, requests in sorted(by_api.items(), key=_slowest_first) for one in requests],
        "running": [{"broker": answer["broker"], **one} for answer in answers for one in answer["running"]],
        "problems": problems,
    }


def _slowest_first(item: tuple[str, list[Document]]) -> float:
    return -float(item[1][0]["duration_ms"])


def _render_slow(document: Document) -> str:
    parts = []
    if document["requests"]:
        headers = ["API", "TOOK", "AT", "BROKER", "STAGES", "FOR"]
        rows = [
            [
                one["api"],
                _duration(one["duration_ms"]),
                (output.moment(one["ended_ms"]) or "")[11:19],
                one["broker"],
                _stages(one),
                _whose(one),
            ]
            for one in document["requests"]
        ]
        parts.append(output.table(headers, rows, right=["TOOK", "BROKER"]))
    else:
        parts.append("no request has ended yet")
    if document["running"]:
        rows = [[one["api"], _duration(one["age_ms"]), one["broker"], one["client_id"]] for one in document["running"]]
        parts.append(
            "not answered yet:\n" + output.table(["API", "SINCE", "BROKER", "CLIENT"], rows, right=["SINCE", "BROKER"])
        )
    parts += [f"note: {each}" for each in document["problems"]]
    return "\n\n".join(parts)


def _stages(one: Document) -> str:
    """The stages that took a twentieth of the time or more, longest first."""
    named = sorted(one["stages_ms"].items(), key=lambda each: -float(each[1]))
    shown = [f"{name} {_duration(ms)}" for name, ms in named if ms * 20 >= one["duration_ms"]]
    return ", ".join(shown or ["-"])


def _whose(one: Document) -> str:
    """The partition, the client, and the error."""
    parts = []
    if one["topic"] is not None:
        more = f" +{one['partitions'] - 1}" if one["partitions"] > 1 else ""
        parts.append(f"{one['topic']}:{one['partition']}{more}")
    parts.append(one["client_id"] or one["client_host"])
    if one["error_code"]:
        parts.append("not answered" if one["error_code"] < 0 else f"error {one['error_code']}")
    return ", ".join(parts)


def _duration(ms: float) -> str:
    if ms < 10:
        return f"{ms:.2f} ms"
    return f"{ms:.0f} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"

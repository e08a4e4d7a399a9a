"""`tidelog partition list|move|cancel`: the placement of partitions, and moves.

A move is committed at once and then carried out by the brokers: the command waits until every partition is served by
its new broker (except with `--no-wait`), and prints the duration and cost. Ctrl-C ends the waiting, not the moves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection
from tidelog.cli.completion import broker_ids, partition_names, topic_names
from tidelog.cli.many import BROKER_TIMEOUT_S, ask_at_once
from tidelog.cli.options import admin_options, format_option, watch_option
from tidelog.cli.placements import Get, placements
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError, Unavailable
from tidelog.runtime.progress_bar import ProgressBar

AT_ONCE = 1_024
"""Maximum number of moves in one request."""
POLL_S = 0.1
ADDRESSES_S = 1.0
"""Between two looks at the addresses of brokers, while one that is asked does not answer."""
FIGURES_S = 2.0
"""Time-out for the old broker to report a move's figures after the new broker serves the partition."""

Row = dict[str, Any]
_NOTHING_TOLD: Row = {"moves": [], "opened": [], "estimate": None}


class TopicPartition(NamedTuple):
    """A partition."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"


@click.group()
def partition() -> None:
    """Show where partitions are, and move them between brokers."""


# --- list --------------------------------------------------------------------------------------------------------


@partition.command("list")
@click.argument("topics", nargs=-1, metavar="[TOPIC]...", shell_complete=topic_names)
@format_option
@watch_option
@admin_options
def list_(topics: tuple[str, ...], style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the partitions of topics; without a name, all partitions that are being moved."""
    cluster = ClusterConnection(bootstrap)
    output.show(style, lambda: _rows(cluster, topics), _render, watch_s=watch_s)


def _rows(cluster: ClusterConnection, topics: Collection[str]) -> list[Row]:
    """Return the rows of partitions; moving partitions with the reports of their brokers."""
    rows: list[Row] = placements(cluster.get, topics) if topics else cluster.get("/partitions")["partitions"]
    leaders = {row["leader"] for row in rows if row["to"] is not None}
    reports = _moves_of(cluster, _admin_urls(cluster.get), leaders) if leaders else {}
    told: dict[tuple[int | None, str, int], Row] = {}
    for leader, report in reports.items():
        for move in report["moves"]:
            if move["finished_ms"] is None:
                told[leader, move["topic"], move["partition"]] = move
    for row in rows:
        move = told.get((row["leader"], row["topic"], row["partition"]), {})
        row["phase"] = move.get("phase", "waiting" if row["to"] is not None else None)
        row["attempts"] = move.get("attempts")
        row["error"] = move.get("error")
        if row["to"] is not None and row["leader"] is None:
            row["error"] = f"broker {row['broker']} is dead, and its WAL may have records that are not in the bucket"
    return rows


def _admin_urls(get: Get) -> dict[int, str]:
    """The admin URLs of the live brokers."""
    nodes = get("/status")["nodes"]
    return {node["id"]: node["admin_url"] for node in nodes if node["state"] != "dead" and node["admin_url"]}


def _moves_of(cluster: ClusterConnection, urls: Mapping[int, str], leaders: Iterable[int | None]) -> dict[int, Row]:
    """The `/moves` of brokers that lead partitions, without those that cannot be reached. None: nobody leads one.

    A partition is placed on a broker's replica set, which another member may lead.
    """

    def ask(leader: int) -> Row:
        found: Row = cluster.ask(urls[leader], "/moves", timeout_s=BROKER_TIMEOUT_S, broker=leader)
        return found

    asked = {leader: partial(ask, leader) for leader in leaders if leader is not None and leader in urls}
    return {leader: found for leader, found in ask_at_once(asked).items() if not isinstance(found, TidelogError)}


class _LeaderReports:
    """What brokers tell of their moves, while brokers come, go, and get other addresses."""

    def __init__(self, cluster: ClusterConnection, get: Get) -> None:
        self._cluster = cluster
        self._get = get
        self._urls = _admin_urls(get)
        self._asked_at = time.monotonic()

    def of(self, leaders: Iterable[int | None]) -> dict[int, Row]:
        """See `_moves_of`. If one does not answer, the addresses are asked for again."""
        wanted = {leader for leader in leaders if leader is not None}
        told = _moves_of(self._cluster, self._urls, wanted)
        if wanted - told.keys() and time.monotonic() > self._asked_at + ADDRESSES_S:
            self._urls = _admin_urls(self._get)
            self._asked_at = time.monotonic()
            told |= _moves_of(self._cluster, self._urls, wanted - told.keys())
        return told


def _render(rows: list[Row]) -> str:
    if not rows:
        return "no partition is being moved"
    headers = ["TOPIC", "PARTITION", "LEADER", "EPOCH", "MOVES-TO", "SINCE", "PHASE", "ATTEMPTS", "PROBLEM"]
    cells = [
        [
            row["topic"],
            row["partition"],
            row["leader"],
            row["leader_epoch"],
            row["to"],
            output.moment(row["since_ms"]),
            row["phase"],
            row["attempts"],
            row["error"],
        ]
        for row in rows
    ]
    return output.table(headers, cells, right=["PARTITION", "LEADER", "EPOCH", "MOVES-TO", "ATTEMPTS"])


# --- move, cancel ------------------------------------------------------------------------------------------------


@partition.command()
@click.argument("places", nargs=-1, metavar="[TOPIC:PARTITION]...", shell_complete=partition_names)
@click.option(
    "--to",
    "target",
    type=int,
    metavar="BROKER",
    shell_complete=broker_ids,
    help="Target. Default with --from: all other brokers.",
)
@click.option(
    "--from", "source", type=int, metavar="BROKER", shell_complete=broker_ids, help="All partitions of this broker."
)
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="JSON in the format of kafka-reassign-partitions.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be uploaded, and how long writes would stall.")
@click.option("--no-wait", is_flag=True, help="Return when the placements are committed.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=120.0, show_default=True, help="Seconds to wait."
)
@format_option
@admin_options
def move(
    places: tuple[str, ...],
    target: int | None,
    source: int | None,
    file: Path | None,
    dry_run: bool,
    no_wait: bool,
    timeout_s: float,
    style: str,
    bootstrap: str,
) -> None:
    """Move partitions to another broker, without copying data and while they are in use."""
    cluster = ClusterConnection(bootstrap)
    wanted = _wanted(cluster, places, target, source, file)
    before = {TopicPartition(row["topic"], row["partition"]): row for row in _placed(cluster, wanted)}
    wanted = {place: broker for place, broker in wanted.items() if not _stays(before[place], broker)}
    if dry_run:
        _show(style, _predict(cluster, wanted, before), _render_plan)
        return
    failures = output.Failures()
    started = time.monotonic()
    accepted = _place(cluster, wanted, failures)
    report: list[Row] = []
    if not no_wait:
        try:
            report = _wait(cluster, accepted, before, started, timeout_s, failures)
        except Unavailable as error:  # the moves go on
            failures.add(error)
    _show(style, report or [_plain(place, before, broker) for place, broker in accepted.items()], _render_done)
    failures.exit()


def _stays(row: Row, broker: int) -> bool:
    """Whether a partition is on a broker, and not about to leave it."""
    return bool(row["broker"] == broker and row["to"] in (None, broker))


@partition.command()
@click.argument("places", nargs=-1, required=True, metavar="TOPIC:PARTITION...", shell_complete=partition_names)
@admin_options
def cancel(places: tuple[str, ...], bootstrap: str) -> None:
    """Cancel moves in progress: the partitions stay on their brokers."""
    failures = output.Failures()
    done = _place(ClusterConnection(bootstrap), {_parse(text): None for text in places}, failures)
    for place in done:
        output.emit(f"cancelled the move of {place}")
    failures.exit()


def _parse(text: str) -> TopicPartition:
    topic, colon, index = text.rpartition(":")
    if not colon or not topic or not (index.isascii() and index.isdigit()):
        raise InvalidInput(f"{text!r} is not a partition", hint="use TOPIC:PARTITION, for example orders:0")
    return TopicPartition(topic, int(index))


def _wanted(
    cluster: ClusterConnection, places: tuple[str, ...], target: int | None, source: int | None, file: Path | None
) -> dict[TopicPartition, int]:
    """Return the target broker of each partition. Raises `InvalidInput`, `NotFound`."""
    if sum((bool(places), source is not None, file is not None)) != 1:
        raise InvalidInput(
            "exactly one selection of partitions is required",
            hint="use TOPIC:PARTITION..., --from BROKER or --file FILE",
        )
    if file is not None:
        if target is not None:
            raise InvalidInput("--file names the brokers itself: omit --to")
        return _read(file)
    if places:
        if target is None:
            raise InvalidInput("the target broker is missing", hint="use --to BROKER")
        return dict.fromkeys(map(_parse, places), target)
    assert source is not None
    return _spread(cluster, source, target)


def _spread(cluster: ClusterConnection, source: int, target: int | None) -> dict[TopicPartition, int]:
    """Return the target of each partition that is placed on `source`, which may be dead, or that it leads.

    Raises `InvalidInput`, `NotFound`.
    """
    if not any(node["id"] == source and "broker" in node["roles"] for node in cluster.get("/status")["nodes"]):
        raise NotFound(f"there is no broker {source}", hint="`tidelog broker list` shows them")
    metadata = cluster.metadata()
    mine: list[TopicPartition] = []
    counts = dict.fromkeys(metadata.brokers, 0)
    for row in placements(cluster.get, metadata.topics, but_deleted=True):
        counts[row["leader"]] = counts.get(row["leader"], 0) + 1
        if source in (row["leader"], row["broker"]):
            mine.append(TopicPartition(row["topic"], row["partition"]))
    others = [broker for broker in sorted(metadata.brokers) if broker != source]
    if target is None and not others:
        raise InvalidInput(f"there is no broker besides {source}")
    found: dict[TopicPartition, int] = {}
    for place in mine:
        broker = target if target is not None else min(others, key=lambda each: counts[each])
        counts[broker] = counts.get(broker, 0) + 1
        found[place] = broker
    return found


def _read(file: Path) -> dict[TopicPartition, int]:
    """Read Kafka's reassignment JSON: `{"partitions": [{"topic", "partition", "replicas": [broker]}]}`."""
    try:
        rows = json.loads(file.read_text())["partitions"]
        return {TopicPartition(str(row["topic"]), int(row["partition"])): int(row["replicas"][0]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, OverflowError) as error:
        raise InvalidInput(
            f"{file} is not a list of reassignments: {error!r}",
            hint='{"partitions": [{"topic": "orders", "partition": 0, "replicas": [2]}]}',
        ) from error


def _placed(cluster: ClusterConnection, places: Iterable[TopicPartition]) -> list[Row]:
    """Return the current placement of these partitions. Raises `NotFound`."""
    wanted = set(places)
    if not wanted:
        return []
    rows = placements(cluster.get, (place.topic for place in wanted))
    found = [row for row in rows if TopicPartition(row["topic"], row["partition"]) in wanted]
    for place in wanted - {TopicPartition(row["topic"], row["partition"]) for row in found}:
        raise NotFound(f"partition {place} does not exist", hint=f"`tidelog topic describe {place.topic}` shows them")
    return found


def _place(
    cluster: ClusterConnection, wanted: dict[TopicPartition, Any], failures: output.Failures
) -> dict[TopicPartition, Any]:
    """Commit placements and return the accepted ones."""
    accepted: dict[TopicPartition, Any] = {}
    items = list(wanted.items())
    for start in range(0, len(items), AT_ONCE):
        moves = [
            {"topic": place.topic, "partition": place.partition, "to": broker}
            for place, broker in items[start : start + AT_ONCE]
        ]
        try:
            results = cluster.post("/moves", {"moves": moves})["results"]
        except TidelogError as error:
            if not start:
                raise
            failures.add(error)
            output.warn(f"the last {len(items) - start} partitions were not asked for, or not answered")
            break
        for result in results:
            place = TopicPartition(result["topic"], result["partition"])
            if result["error"] is not None:
                failures.add(InvalidInput(f"{place}: {result['error']}"))
            else:
                accepted[place] = result["to"]
    return accepted


def _wait(
    cluster: ClusterConnection,
    wanted: dict[TopicPartition, int],
    before: dict[TopicPartition, Row],
    started: float,
    timeout_s: float,
    failures: output.Failures,
) -> list[Row]:
    """Wait until the new brokers serve all partitions; return the figures of both ends of each move."""
    with ProgressBar("moving", len(wanted), "partitions") as progress:
        return _wait_all(cluster, wanted, before, started, timeout_s, failures, progress)


def _wait_all(
    cluster: ClusterConnection,
    wanted: dict[TopicPartition, int],
    before: dict[TopicPartition, Row],
    started: float,
    timeout_s: float,
    failures: output.Failures,
    progress: ProgressBar,
) -> list[Row]:
    deadline = started + timeout_s
    left = dict(wanted)
    served: dict[TopicPartition, float] = {}
    report: list[Row] = []
    get = partial(cluster.get_patiently, deadline=deadline)
    reports = _LeaderReports(cluster, get)
    while left and time.monotonic() < deadline:
        found = placements(get, (place.topic for place in left), but_deleted=True)
        rows = {TopicPartition(row["topic"], row["partition"]): row for row in found}
        for place in left.keys() - rows.keys():
            failures.add(NotFound(f"{place}: its topic was deleted while it was to be moved"))
            del left[place]
        rows = {place: rows[place] for place in left}
        moved = {place for place, row in rows.items() if row["broker"] == left[place]}
        gone = {place for place, row in rows.items() if row["broker"] != left[place] and row["to"] != left[place]}
        for place in gone:
            failures.add(Unavailable(f"{place}: the move was cancelled, or replaced by another"))
            del left[place]
        told = reports.of({row["leader"] for place in moved for row in (before[place], rows[place])})
        for place in moved:
            row = _figures(place, before[place], left[place], rows[place], told)
            if row is None:
                continue
            at = served.setdefault(place, time.monotonic())
            if row["stall_ms"] is not None or time.monotonic() > at + FIGURES_S:
                report.append({**row, "seconds": round(at - started, 3)})
                del left[place]
        progress.update(len(wanted) - len(left))
        if left:
            time.sleep(POLL_S)
    for place, broker in left.items():
        failures.add(
            Unavailable(f"{place} is not on broker {broker} after {timeout_s:g} s", hint="see `tidelog partition list`")
        )
    return sorted(report, key=lambda row: (row["topic"], row["partition"]))


def _figures(place: TopicPartition, before: Row, target: int, now: Row, told: dict[int, Row]) -> Row | None:
    """Return the figures of a move; None until the new broker serves the partition."""
    opened = [
        one
        for one in told.get(now["leader"], _NOTHING_TOLD)["opened"]
        if (one["topic"], one["partition"], one["leader_epoch"]) == (*place, now["leader_epoch"])
    ]
    if not opened:
        return None
    left = [
        one
        for one in told.get(before["leader"], _NOTHING_TOLD)["moves"]
        if (one["topic"], one["partition"]) == place
        and one["phase"] == "done"
        and before["leader_epoch"] <= one["leader_epoch"] < now["leader_epoch"]
    ]
    open_ms = opened[-1]["open_ms"]
    return {
        **_plain(place, {place: before}, target),
        "uploaded_bytes": left[-1]["drained_bytes"] if left else None,
        "stall_ms": round(left[-1]["stall_ms"] + open_ms, 1) if left else None,
        "attempts": left[-1]["attempts"] if left else None,
    }


def _plain(place: TopicPartition, before: dict[TopicPartition, Row], target: int) -> Row:
    return {"topic": place.topic, "partition": place.partition, "from": before[place]["broker"], "to": target}


def _predict(
    cluster: ClusterConnection, wanted: dict[TopicPartition, int], before: dict[TopicPartition, Row]
) -> list[Row]:
    """Return what each source reports of its backlog and its last moves."""
    told = _moves_of(cluster, _admin_urls(cluster.get), {before[one]["leader"] for one in wanted})
    led = {row["id"] for row in cluster.get("/replica-sets")["replica_sets"] if row["state"] == "led"}
    plan = []
    for place, target in wanted.items():
        source = before[place]["broker"]
        found = told.get(before[place]["leader"], _NOTHING_TOLD)["estimate"] or {}
        upload, stall_ms, basis = found.get("upload_bytes"), found.get("stall_ms"), found.get("basis")
        if not found:
            basis = f"broker {source} is dead: the partition moves when the broker has restarted"
        elif target not in led:
            basis = f"broker {target} is dead or unknown: the move would be refused"
        plan.append({**_plain(place, before, target), "upload_bytes": upload, "stall_ms": stall_ms, "basis": basis})
    return plan


def _show(style: str, rows: list[Row], render: Any) -> None:
    output.emit(json.dumps(rows, indent=2) if style == "json" else render(rows))


def _render_plan(rows: list[Row]) -> str:
    if not rows:
        return "nothing to move: all partitions are on their target brokers"
    headers = ["TOPIC", "PARTITION", "FROM", "TO", "TO-UPLOAD-FIRST", "STALL", "ESTIMATED-BY"]
    cells = [
        [
            row["topic"],
            row["partition"],
            row["from"],
            row["to"],
            output.size(row["upload_bytes"]),
            _seconds(row["stall_ms"]),
            row["basis"],
        ]
        for row in rows
    ]
    return output.table(headers, cells, right=["PARTITION", "FROM", "TO", "TO-UPLOAD-FIRST", "STALL"])


def _render_done(rows: list[Row]) -> str:
    if not rows:
        return "nothing was moved"
    headers = ["TOPIC", "PARTITION", "FROM", "TO", "TOOK", "UPLOADED-LAST", "STALL", "ATTEMPTS"]
    cells = [
        [
            row["topic"],
            row["partition"],
            row["from"],
            row["to"],
            f"{row['seconds']:.2f} s" if "seconds" in row else "committed",
            output.size(row.get("uploaded_bytes")),
            _seconds(row.get("stall_ms")),
            row.get("attempts"),
        ]
        for row in rows
    ]
    return output.table(headers, cells, right=["PARTITION", "FROM", "TO", "TOOK", "UPLOADED-LAST", "STALL", "ATTEMPTS"])


def _seconds(stall_ms: float | None) -> str | None:
    return None if stall_ms is None else f"{stall_ms / 1000:.3f} s"

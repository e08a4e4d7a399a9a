"""`tidelog replica-set`: the replica sets, that is the WALs of a cluster and the brokers that keep them.

The controllers elect: `elect` begins an election and shows how it ends. They also choose the brokers that keep
replicas, as many as the policy wants; `add-member` and `remove-member` are for an operator who wants others.
"""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import urlencode

import click

from tidelog.cli import output
from tidelog.cli.client import ClusterConnection
from tidelog.cli.completion import broker_ids, replica_set_ids
from tidelog.cli.options import admin_options, format_option, watch_option
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError, Unavailable
from tidelog.runtime.progress_bar import ProgressBar

POLL_S = 0.2
MASTER_TIMEOUT_S = 3.0
"""For the master's answer to what only it knows; it may hang."""
Document = dict[str, Any]
_set_id = click.argument("replica_set", metavar="ID", type=click.IntRange(min=0), shell_complete=replica_set_ids)


@click.group("replica-set")
def replica_set_() -> None:
    """Show replica sets, elect their masters, and set their policies, members and priorities."""


@replica_set_.command("list")
@format_option
@watch_option
@admin_options
def list_(style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show each replica set with its master, members and write quorum."""
    cluster = ClusterConnection(bootstrap)
    output.show(style, lambda: cluster.get("/replica-sets")["replica_sets"], _render_list, watch_s=watch_s)


def _render_list(rows: list[Document]) -> str:
    headers = ["ID", "STATE", "MASTER", "EPOCH", "MEMBERS", "LEARNERS", "JOINING", "IN-SYNC", "QUORUM", "PARTITIONS"]
    cells = [
        [
            row["id"],
            row["state"],
            row["master"],
            row["master_epoch"],
            _ids(row["members"]),
            _ids(row["learners"]),
            _ids(row["joining"]),
            _ids(row["in_sync"]),
            row["quorum"],
            row["partitions"],
        ]
        for row in rows
    ]
    return output.table(headers, cells, right=["ID", "MASTER", "EPOCH", "QUORUM", "PARTITIONS"])


def _ids(brokers: list[int]) -> str | None:
    return ",".join(map(str, brokers)) or None


@replica_set_.command()
@_set_id
@format_option
@watch_option
@admin_options
def describe(replica_set: int, style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show a replica set's replicas, how far they are behind, its policy, and its elections.

    What only the master knows is asked of it.
    """
    cluster = ClusterConnection(bootstrap)
    output.show(style, lambda: _with_live(cluster, replica_set), _render, watch_s=watch_s)


def _described(cluster: ClusterConnection, replica_set: int, deadline: float | None = None) -> Document:
    """Return what any broker tells of a set from the metadata, without what only its master knows.

    `deadline`: of a command that waits; the brokers are asked again while none answers.
    """
    path = f"/replica-sets/describe?id={replica_set}"
    found: Document = cluster.get(path) if deadline is None else cluster.get_patiently(path, deadline)
    return found


def _with_live(cluster: ClusterConnection, replica_set: int) -> Document:
    """Return the same, with what its master knows, which is asked if it is another broker.

    `live` is null if it could not be asked; `live_problem` says why.
    """
    document = _described(cluster, replica_set)
    live, url, problem = document["live"], document["master_admin_url"], None
    if live is None and url:
        try:
            path = f"/replica-sets/describe?id={replica_set}"
            live = cluster.ask(url, path, timeout_s=MASTER_TIMEOUT_S, broker=document["master"])["live"]
            problem = (
                None if live is not None else f"broker {document['master']} does not lead the set yet, or any more"
            )
        except TidelogError as error:
            problem = f"the master, broker {document['master']}, does not answer: {error.message}"
    elif live is None:
        problem = "the set has no master" if document["master"] is None else "the master has told no admin HTTP"
    followers = {row["broker"]: row for row in live["followers"]} if live is not None else {}
    return {
        **document,
        "live": live,
        "live_problem": problem,
        "replicas": [{**row, **_lag(row, live, followers.get(row["broker"]))} for row in document["replicas"]],
    }


def _lag(row: Document, live: Document | None, follower: Document | None) -> Document:
    """Return how far a replica is behind, as its master knows it; nulls where nobody does."""
    if follower is not None:
        return {
            "connected": follower["connected"],
            "end_offset": follower["end_offset"] if follower["end_offset"] >= 0 else None,
            "lag_bytes": follower["gap_bytes"],
            "caught_up_ms": follower["caught_up_ms"],
        }
    if live is not None and row["role"] == "master":
        lag = live["end_offset"] - live["durable_offset"]
        return {"connected": None, "end_offset": live["durable_offset"], "lag_bytes": lag, "caught_up_ms": 0}
    return dict.fromkeys(("connected", "end_offset", "lag_bytes", "caught_up_ms"))


def _render(document: Document) -> str:
    about = [
        ("replica set", document["id"]),
        ("state", document["state"]),
        ("master", document["master"]),
        ("master epoch", document["master_epoch"]),
        ("sync-state set", f"{_ids(document['in_sync'])} (epoch {document['sync_state_set_epoch']})"),
        ("write quorum", document["quorum"]),
        ("committed to", document["committed_offset"]),
        *_render_live(document),
        *_render_last_election(document["last_election"]),
        *_render_exchange(document["exchange"]),
        ("partitions", document["partitions"]),
        *((name.replace("_", " "), value) for name, value in document["policy"].items()),
    ]
    numbers = ["BROKER", "PRIORITY", "KNOWN-END", "END", "LAG-BYTES", "CAUGHT-UP-MS"]
    headers = ["BROKER", "ROLE", "ALIVE", "IN-SYNC", "CONNECTED", *numbers[3:], *numbers[1:3], "WAL"]
    fields = ["broker", "role", "alive", "in_sync", "connected", "end_offset", "lag_bytes", "caught_up_ms"]
    fields += ["priority", "known_end", "wal"]
    cells = [
        [_priority(row) if field == "priority" else row[field] for field in fields] for row in document["replicas"]
    ]
    parts = [output.pairs(about), output.table(headers, cells, right=numbers)]
    if document["election"] is not None:
        parts.append(_render_election(document["election"]))
    return "\n\n".join(parts)


def _priority(row: Document) -> str:
    """Return a replica's election priority, with a mark if an operator has set it."""
    return f"{row['priority']} (set)" if row["set_priority"] is not None else str(row["priority"])


def _render_live(document: Document) -> list[tuple[str, Any]]:
    live = document["live"]
    if live is None:
        return [("not known", document["live_problem"])]
    refusal = f", and acks=all is refused: {live['refusal']}" if live["refusal"] else ""
    return [
        ("confirmed to", live["confirm_offset"]),
        ("WAL ends at", live["end_offset"]),
        ("in sync now", f"{len(live['in_sync'])} of {len(live['sync_state_set'])}, needed {live['need']}{refusal}"),
        ("degraded", live["degraded"]),
    ]


def _render_last_election(ended: Document | None) -> list[tuple[str, Any]]:
    if ended is None:
        return []
    loss = ", a loss was accepted" if ended["accepted_loss"] else ""
    text = f"{output.moment(ended['elected_ms'])}, epoch {ended['master_epoch']}, broker {ended['master']}{loss}"
    return [("last election", text), ("because", ended["reason"])]


def _render_exchange(exchange: Document | None) -> list[tuple[str, Any]]:
    if exchange is None:
        return []
    return [("exchange", f"broker {exchange['replaced']} leaves when broker {exchange['newcomer']} is in sync")]


def _render_election(election: Document) -> str:
    about = [
        ("election since", output.moment(election["began_ms"])),
        ("because", election["reason"]),
        ("designated", election["designated"]),
        ("promises needed", election["needed"]),
        ("no promise of", _ids(election["silent"])),
    ]
    headers = ["PROMISED", "LAST-EPOCH", "END", "CONFIRMED", "COUNTS"]
    cells = [
        [row["broker"], row["last_epoch"], row["end_offset"], row["confirm_offset"], row["counts"]]
        for row in election["promises"]
    ]
    return f"{output.pairs(about)}\n\n{output.table(headers, cells, right=headers[:4])}"


@replica_set_.command()
@_set_id
@click.option(
    "--broker",
    type=click.IntRange(min=0),
    metavar="ID",
    shell_complete=broker_ids,
    help="Elect this one if it has all that may be confirmed.",
)
@click.option(
    "--accept-loss", is_flag=True, help="Elect --broker now, although it may lack confirmed records. They are lost."
)
@click.option("--no-wait", is_flag=True, help="Return when the election has begun.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=30.0, show_default=True, help="Seconds to wait."
)
@format_option
@admin_options
def elect(
    replica_set: int,
    broker: int | None,
    accept_loss: bool,
    no_wait: bool,
    timeout_s: float,
    style: str,
    bootstrap: str,
) -> None:
    """End the master's epoch, and let the promises of the members elect a master.

    With --accept-loss: for an election that does not end, because too many members have lost their disks.
    """
    if accept_loss and broker is None:
        raise InvalidInput("--accept-loss needs --broker: the replica to go on with")
    cluster = ClusterConnection(bootstrap)
    query: dict[str, Any] = {"id": replica_set}
    if broker is not None:
        query["broker"] = broker
    if accept_loss:
        query["accept_loss"] = "true"
    epoch = cluster.post(f"/replica-sets/elect?{urlencode(query)}")["master_epoch"]
    document = _described(cluster, replica_set) if no_wait else _wait_elected(cluster, replica_set, epoch, timeout_s)
    if style == "json":
        output.emit(json.dumps(document, indent=2))
    elif document["master"] is None:
        output.emit(f"election for epoch {epoch} of replica set {replica_set} has begun")
    else:
        master, epoch = document["master"], document["master_epoch"]
        output.emit(f"broker {master} is the master of replica set {replica_set} in epoch {epoch}")


def _wait_elected(cluster: ClusterConnection, replica_set: int, epoch: int, timeout_s: float) -> Document:
    with ProgressBar("electing a master"):
        deadline = time.monotonic() + timeout_s
        while True:
            document = _described(cluster, replica_set, deadline)
            if document["master_epoch"] >= epoch and document["master"] is not None:
                return document
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"replica set {replica_set} has no master after {timeout_s:g} s",
                    hint=f"`tidelog replica-set describe {replica_set}` shows whose promise is missing; it goes on",
                )
            time.sleep(POLL_S)


@replica_set_.command("add-member")
@_set_id
@click.option(
    "--broker",
    type=click.IntRange(min=0),
    metavar="ID",
    shell_complete=broker_ids,
    required=True,
    help="The broker to keep a replica.",
)
@click.option("--learner", is_flag=True, help="It receives everything, and is never counted or elected.")
@click.option("--no-wait", is_flag=True, help="Return when the replica is assigned.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Seconds to wait."
)
@format_option
@admin_options
def add_member(
    replica_set: int, broker: int, learner: bool, no_wait: bool, timeout_s: float, style: str, bootstrap: str
) -> None:
    """Have a broker keep a replica of a set, and wait until it is in sync, or, a learner, until it has joined.

    A member beyond the number that the policy wants is removed again if it does not get in sync; a learner is not. A
    learner becomes a member when it is added without --learner.
    """
    document = _add(ClusterConnection(bootstrap), replica_set, broker, None if no_wait else timeout_s, learner=learner)
    _tell_added(document, replica_set, broker, style)


@replica_set_.command("promote-member")
@_set_id
@click.option(
    "--broker",
    type=click.IntRange(min=0),
    metavar="ID",
    shell_complete=broker_ids,
    required=True,
    help="The learner to promote.",
)
@click.option("--no-wait", is_flag=True, help="Return when it is a member.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=300.0, show_default=True, help="Seconds to wait."
)
@format_option
@admin_options
def promote_member(replica_set: int, broker: int, no_wait: bool, timeout_s: float, style: str, bootstrap: str) -> None:
    """Make a learner a member of its set, with the WAL that it has, and wait until it is in sync."""
    cluster = ClusterConnection(bootstrap)
    if broker not in _described(cluster, replica_set)["learners"]:
        raise InvalidInput(
            f"broker {broker} is no learner of replica set {replica_set}",
            hint=f"`tidelog replica-set describe {replica_set}` shows its replicas",
        )
    document = _add(cluster, replica_set, broker, None if no_wait else timeout_s)
    _tell_added(document, replica_set, broker, style)


def _add(
    cluster: ClusterConnection, replica_set: int, broker: int, timeout_s: float | None, *, learner: bool = False
) -> Document:
    """Add a broker to a set, or promote it, and wait until it is in its place; None: do not wait."""
    query = {"id": replica_set, "broker": broker, "learner": str(learner).lower()}
    cluster.post(f"/replica-sets/add-member?{urlencode(query)}")
    if timeout_s is None:
        return _described(cluster, replica_set)
    return _wait_in(cluster, replica_set, broker, "learners" if learner else "in_sync", timeout_s)


def _tell_added(document: Document, replica_set: int, broker: int, style: str) -> None:
    if style == "json":
        output.emit(json.dumps(document, indent=2))
    elif broker in document["learners"]:
        output.emit(f"broker {broker} is a learner of replica set {replica_set}")
    elif broker in document["in_sync"]:
        output.emit(f"broker {broker} is in sync in replica set {replica_set}")
    else:
        output.emit(f"a replica of replica set {replica_set} is assigned to broker {broker}")


def _wait_in(cluster: ClusterConnection, replica_set: int, broker: int, place: str, timeout_s: float) -> Document:
    """Wait until a broker is among the `in_sync`, or the `learners`, of a replica set."""
    with ProgressBar("waiting for the replica"):
        deadline = time.monotonic() + timeout_s
        while True:
            document = _described(cluster, replica_set, deadline)
            if broker in document[place]:
                return document
            if time.monotonic() > deadline:
                what = "in sync in" if place == "in_sync" else "a learner of"
                raise Unavailable(
                    f"broker {broker} is not {what} replica set {replica_set} after {timeout_s:g} s",
                    hint=f"`tidelog replica-set describe {replica_set}` shows whether it has joined; it goes on",
                )
            time.sleep(POLL_S)


@replica_set_.command("remove-member")
@_set_id
@click.option(
    "--broker",
    type=click.IntRange(min=0),
    metavar="ID",
    shell_complete=broker_ids,
    required=True,
    help="The broker to remove.",
)
@click.option("--no-wait", is_flag=True, help="Return when the removal has begun.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=60.0, show_default=True, help="Seconds to wait."
)
@format_option
@admin_options
def remove_member(replica_set: int, broker: int, no_wait: bool, timeout_s: float, style: str, bootstrap: str) -> None:
    """Remove a broker's replica of a set, or its assignment. Its copy of the WAL is deleted.

    One that is in sync leaves when the master has let go of it, which the policy must allow. The master cannot be
    removed: elect another member first.
    """
    cluster = ClusterConnection(bootstrap)
    cluster.post(f"/replica-sets/remove-member?{urlencode({'id': replica_set, 'broker': broker})}")
    document = _described(cluster, replica_set) if no_wait else _wait_gone(cluster, replica_set, broker, timeout_s)
    if style == "json":
        output.emit(json.dumps(document, indent=2))
    elif _keeps(document, broker):
        output.emit(f"broker {broker} is to leave replica set {replica_set}")
    else:
        output.emit(f"broker {broker} keeps no replica of replica set {replica_set}")


def _keeps(document: Document, broker: int) -> bool:
    return any(row["broker"] == broker for row in document["replicas"])


def _wait_gone(cluster: ClusterConnection, replica_set: int, broker: int, timeout_s: float) -> Document:
    with ProgressBar("waiting for the master"):
        deadline = time.monotonic() + timeout_s
        while True:
            document = _described(cluster, replica_set, deadline)
            if not _keeps(document, broker):
                return document
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"broker {broker} is still a member of replica set {replica_set} after {timeout_s:g} s",
                    hint="its master lets go of it when enough others are in sync for the policy; it goes on",
                )
            time.sleep(POLL_S)


@replica_set_.command("set-policy")
@_set_id
@click.option("--total-replicas", type=click.IntRange(min=1), metavar="N", help="Members wanted.")
@click.option(
    "--in-sync-replicas", type=click.IntRange(min=1), metavar="N", help="Members that must hold a record to confirm it."
)
@click.option("--min-in-sync-replicas", type=click.IntRange(min=1), metavar="N", help="The least when it degrades.")
@click.option(
    "--enable-auto-in-sync-replicas/--disable-auto-in-sync-replicas",
    default=None,
    help="Whether the write quorum follows the number of members in sync.",
)
@click.option(
    "--all-ack-in-sync-state-set/--no-all-ack-in-sync-state-set",
    default=None,
    help="Whether every member of the sync-state set must hold a record.",
)
@click.option("--max-gap-bytes", type=click.IntRange(min=1), metavar="BYTES", help="Less behind is in sync.")
@click.option(
    "--slave-timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="Caught up within so long is in sync.",
)
@click.option(
    "--max-behind-s", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Behind so long, a member leaves."
)
@format_option
@admin_options
def set_policy(replica_set: int, style: str, bootstrap: str, **fields: Any) -> None:
    """Change a replica set's replication policy. Fields that are not named stay."""
    changes = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in fields.items()
        if value is not None
    }
    if not changes:
        raise InvalidInput("nothing is to be changed", hint="`tidelog replica-set set-policy --help` shows the options")
    cluster = ClusterConnection(bootstrap)
    found = cluster.post(f"/replica-sets/policy?{urlencode({'id': replica_set, **changes})}")
    told = output.pairs([(name.replace("_", " "), value) for name, value in found["policy"].items()])
    output.emit(json.dumps(found, indent=2) if style == "json" else told)


@replica_set_.command("set-priority")
@_set_id
@click.option(
    "--broker", type=click.IntRange(min=0), metavar="ID", shell_complete=broker_ids, required=True, help="The member."
)
@click.option("--priority", type=int, metavar="N", help="Of members that are equally far the larger number is elected.")
@click.option("--unset", is_flag=True, help="What the broker is configured with counts again.")
@format_option
@admin_options
def set_priority(replica_set: int, broker: int, priority: int | None, unset: bool, style: str, bootstrap: str) -> None:
    """Set a member's election priority in one set, instead of the broker's `replication.election_priority`.

    The preferred master leads again whatever its priority is.
    """
    if unset == (priority is not None):
        raise InvalidInput("give one of --priority N and --unset")
    cluster = ClusterConnection(bootstrap)
    query = {"id": replica_set, "broker": broker} | ({"priority": priority} if priority is not None else {})
    cluster.post(f"/replica-sets/priority?{urlencode(query)}")
    document = _described(cluster, replica_set)
    row = next((each for each in document["replicas"] if each["broker"] == broker), None)
    if row is None:
        raise NotFound(
            f"the priority was set, and broker {broker} keeps no replica of replica set {replica_set} any more",
            hint=f"`tidelog replica-set describe {replica_set}` shows its replicas",
        )
    told = f"the election priority of broker {broker} in replica set {replica_set} is {row['priority']}"
    output.emit(json.dumps(document, indent=2) if style == "json" else told)

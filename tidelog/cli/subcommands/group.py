"""`tidelog group list|describe|delete|reset-offsets`: consumer groups and their offsets.

Lag is the high watermark minus the committed offset: the number of offsets the group has not yet read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from typing import Any

import click

from tidelog.cli import output
from tidelog.cli.client import REQUEST_TIMEOUT_S, ClusterConnection, unknown
from tidelog.cli.completion import group_names, partition_numbers, topic_names
from tidelog.cli.options import TimestampType, bootstrap_option, format_option, watch_option
from tidelog.console.client_errors import translate
from tidelog.console.groups import INACTIVE, NAMELESS, STATES, Place, ResetTo, group_state, lag_row, reset_offset
from tidelog.runtime.errors import InvalidInput, NotFound, TidelogError, Unavailable


@click.group()
def group() -> None:
    """List, describe, delete and reset consumer groups."""


# --- list --------------------------------------------------------------------------------------------------------


@group.command("list")
@click.option(
    "--state", "states", type=click.Choice(STATES), multiple=True, help="Only groups in this state; may repeat."
)
@format_option
@watch_option
@bootstrap_option
def list_(states: tuple[str, ...], style: str, watch_s: float | None, bootstrap: str) -> None:
    """List the consumer groups."""
    cluster = ClusterConnection(bootstrap)

    def load() -> list[dict[str, Any]]:
        return [one for one in _listed(cluster) if not states or one["state"] in states]

    def render(document: list[dict[str, Any]]) -> str:
        return output.table(["GROUP", "STATE"], [[one["group"], one["state"]] for one in document])

    output.show(style, load, render, watch_s=watch_s, empty="no groups")


def _listed(cluster: ClusterConnection) -> list[dict[str, Any]]:
    """Return every group and its state. Raises the first error of a broker that cannot list its groups."""
    result = cluster.wait(cluster.admin.list_consumer_groups(request_timeout=REQUEST_TIMEOUT_S), "groups")
    if result.errors:
        raise translate(result.errors[0], "groups")
    found = [{"group": one.group_id, "state": group_state(one.state)} for one in result.valid]
    return sorted(found, key=lambda one: str(one["group"]))


# --- describe ----------------------------------------------------------------------------------------------------


@group.command()
@click.argument("groups", nargs=-1, required=True, metavar="GROUP...", shell_complete=group_names)
@format_option
@watch_option
@bootstrap_option
def describe(groups: tuple[str, ...], style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show groups' members, their assignments, and the lag of each partition."""
    cluster = ClusterConnection(bootstrap)
    failures = output.Failures() if watch_s is None else None

    def load() -> list[dict[str, Any]]:
        return output.gather(groups, lambda name: _describe(cluster, name), failures)

    output.show(style, load, lambda document: "\n\n".join(map(_render_group, document)), watch_s=watch_s)
    if failures is not None:
        failures.exit()


def _description(cluster: ClusterConnection, name: str) -> Any:
    """Return the group's `ConsumerGroupDescription`. A missing group is dead and has no members."""
    futures = cluster.admin.describe_consumer_groups([name], request_timeout=REQUEST_TIMEOUT_S)
    return cluster.wait(futures[name], f"group {name!r}")


def _describe(cluster: ClusterConnection, name: str) -> dict[str, Any]:
    described = _description(cluster, name)
    state = group_state(described.state)
    committed = _committed(cluster, name)
    if state == "dead" and not committed:
        raise _no_group(cluster, name)
    owners: dict[Place, str] = {}
    members = []
    for member in described.members:
        held = sorted((one.topic, one.partition) for one in (member.assignment.topic_partitions or []))
        owners.update(dict.fromkeys(held, member.member_id))
        members.append(
            {
                "member_id": member.member_id,
                "instance_id": member.group_instance_id,
                "client_id": member.client_id,
                "host": member.host,
                "assignment": [{"topic": topic, "partition": partition} for topic, partition in held],
            }
        )
    coordinator = described.coordinator
    return {
        "group": name,
        "state": state,
        "assignor": described.partition_assignor or None,
        "coordinator": coordinator.id if coordinator is not None else None,
        "members": members,
        "partitions": _lags(cluster, committed, owners),
    }


def _no_group(cluster: ClusterConnection, name: str) -> NotFound:
    known = [one["group"] for one in _listed(cluster)]
    return unknown("group", name, known, otherwise="`tidelog group list` shows them")


def _nearest(cluster: ClusterConnection, name: str, error: NotFound) -> NotFound:
    """The same error with the nearest name, if the groups can be listed."""
    with contextlib.suppress(TidelogError):
        return _no_group(cluster, name)
    return error


def _committed(cluster: ClusterConnection, name: str, wanted: Iterable[Place] | None = None) -> dict[Place, int]:
    """Return the committed offsets of a group for all or the given partitions, without those that have none."""
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

    if not name:
        raise InvalidInput(NAMELESS)
    asked = [TopicPartition(topic, partition) for topic, partition in wanted] if wanted is not None else None
    futures = cluster.admin.list_consumer_group_offsets(
        [ConsumerGroupTopicPartitions(name, asked)], request_timeout=REQUEST_TIMEOUT_S
    )
    result = cluster.wait(futures[name], f"offsets of group {name!r}")
    return {(one.topic, one.partition): one.offset for one in result.topic_partitions or [] if one.offset >= 0}


def _lags(cluster: ClusterConnection, committed: dict[Place, int], owners: dict[Place, str]) -> list[dict[str, Any]]:
    """Return all partitions of the group's topics; a partition without a committed offset has no lag."""
    topics = cluster.metadata().topics
    touched = {topic for topic, _ in (*committed, *owners)}
    there = {(topic, partition) for topic in touched & topics.keys() for partition in topics[topic].partitions}
    keys = sorted({*committed, *owners, *there})
    offsets = cluster.offsets(sorted(there))
    ends = {key: span.high_watermark for key, span in offsets.items()}
    return [lag_row(key, committed.get(key), ends.get(key), owners.get(key)) for key in keys]


def _render_group(document: dict[str, Any]) -> str:
    rows = document["partitions"]
    lags = [one["lag"] for one in rows if one["lag"] is not None]
    about = [
        ("group", document["group"]),
        ("state", document["state"]),
        ("coordinator", document["coordinator"]),
        ("assignor", document["assignor"]),
        ("members", len(document["members"])),
        ("total lag", sum(lags)),
    ]
    text = [output.pairs(about)]
    if rows:
        headers = ["TOPIC", "PARTITION", "COMMITTED", "HIGH-WATERMARK", "LAG", "MEMBER"]
        keys = ["topic", "partition", "committed", "high_watermark", "lag", "member_id"]
        text.append(output.table(headers, [[one[key] for key in keys] for one in rows], right=headers[1:5]))
    if document["members"]:
        headers = ["MEMBER", "INSTANCE", "CLIENT", "HOST", "PARTITIONS"]
        members = [
            [one["member_id"], one["instance_id"], one["client_id"], one["host"], len(one["assignment"])]
            for one in document["members"]
        ]
        text.append(output.table(headers, members, right=["PARTITIONS"]))
    return "\n\n".join(text)


# --- delete ------------------------------------------------------------------------------------------------------


@group.command()
@click.argument("groups", nargs=-1, required=True, metavar="GROUP...", shell_complete=group_names)
@format_option
@bootstrap_option
def delete(groups: tuple[str, ...], style: str, bootstrap: str) -> None:
    """Delete groups that have no members, with their committed offsets."""
    cluster = ClusterConnection(bootstrap)
    failures = output.Failures()
    done = []
    futures = cluster.admin.delete_consumer_groups(list(dict.fromkeys(groups)), request_timeout=REQUEST_TIMEOUT_S)
    for name, future in futures.items():
        try:
            cluster.wait(future, f"cannot delete group {name!r}")
            done.append(name)
        except NotFound as error:
            failures.add(_nearest(cluster, name, error))
        except TidelogError as error:
            failures.add(error)
    if style == "json":
        output.emit(json.dumps({"deleted": done}))
    elif done:
        output.emit("\n".join(f"deleted {name}" for name in done))
    failures.exit()


# --- reset-offsets -----------------------------------------------------------------------------------------------


@group.command("reset-offsets")
@click.argument("name", metavar="GROUP", shell_complete=group_names)
@click.option(
    "-t",
    "--topic",
    "topics",
    multiple=True,
    required=True,
    metavar="TOPIC",
    help="May repeat.",
    shell_complete=topic_names,
)
@click.option(
    "-p",
    "--partition",
    "partitions",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only this partition; may repeat.",
    shell_complete=partition_numbers,
)
@click.option("--to-earliest", "earliest", is_flag=True, help="To the oldest record.")
@click.option("--to-latest", "latest", is_flag=True, help="To the end.")
@click.option("--to-offset", "offset", type=click.IntRange(min=0), metavar="N", help="To offset N.")
@click.option("--to-datetime", "timestamp_ms", type=TimestampType(), metavar="TIME", help="ISO 8601, ms, or -10m.")
@click.option("--shift-by", "shift", type=int, metavar="N", help="By N offsets, back if negative.")
@click.option("--dry-run", is_flag=True, help="Show what would be done.")
@format_option
@bootstrap_option
def reset_offsets(
    name: str,
    topics: tuple[str, ...],
    partitions: tuple[int, ...],
    earliest: bool,
    latest: bool,
    offset: int | None,
    timestamp_ms: int | None,
    shift: int | None,
    dry_run: bool,
    style: str,
    bootstrap: str,
) -> None:
    """Move a group's committed offsets, within the range of the partitions. The group must have no members."""
    options: dict[ResetTo, int | None] = {
        "earliest": 0 if earliest else None,
        "latest": 0 if latest else None,
        "offset": offset,
        "time": timestamp_ms,
        "shift": shift,
    }
    chosen = [(to, value) for to, value in options.items() if value is not None]
    if len(chosen) != 1:
        raise InvalidInput(
            "exactly one target is required",
            hint="use --to-earliest, --to-latest, --to-offset, --to-datetime or --shift-by",
        )
    cluster = ClusterConnection(bootstrap)
    keys = _partitions(cluster, topics, partitions)
    described = _description(cluster, name)
    state = group_state(described.state)
    if state not in INACTIVE:
        raise Unavailable(
            f"group {name!r} is active ({state}, {len(described.members)} members): members would overwrite offsets",
            hint=f"stop them first; `tidelog group describe {name}` shows them",
        )
    before = _committed(cluster, name, keys)
    after = _targets(cluster, name, keys, before, *chosen[0])
    failures = output.Failures()
    if not dry_run:
        keys = _commit(cluster, name, after, failures)
    document = {
        "group": name,
        "dry_run": dry_run,
        "partitions": [
            {"topic": key[0], "partition": key[1], "before": before.get(key), "after": after[key]} for key in keys
        ],
    }
    if keys or style == "json":
        output.show(style, lambda: document, _render_reset)
    failures.exit()


def _partitions(cluster: ClusterConnection, topics: tuple[str, ...], only: tuple[int, ...]) -> list[Place]:
    keys = []
    for topic, there in cluster.topics(dict.fromkeys(topics)).items():
        missing = sorted(set(only) - set(there))
        if missing:
            raise InvalidInput(f"topic {topic!r} has the partitions 0 to {len(there) - 1}, not {missing[0]}")
        keys += [(topic, partition) for partition in there if not only or partition in only]
    return keys


def _targets(
    cluster: ClusterConnection,
    name: str,
    keys: list[Place],
    before: dict[Place, int],
    to: ResetTo,
    value: int,
) -> dict[Place, int]:
    """Return the new offset of each partition, limited to its range."""
    ranges = cluster.offsets(keys)
    found = cluster.offsets_at(keys, value) if to == "time" else {}
    for topic, partition in ranges:
        if to == "shift" and (topic, partition) not in before:
            raise InvalidInput(
                f"group {name!r} has no committed offset in {topic} [{partition}] to shift",
                hint="use --to-earliest, --to-latest or --to-offset, or choose with --partition",
            )
    return {
        key: reset_offset(to, value, span.log_start_offset, span.high_watermark, before.get(key), found.get(key))
        for key, span in ranges.items()
    }


def _commit(cluster: ClusterConnection, name: str, offsets: dict[Place, int], failures: output.Failures) -> list[Place]:
    """Commit the offsets; return the partitions of which they are. The others are among the failures."""
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

    changes = [TopicPartition(topic, partition, offset) for (topic, partition), offset in offsets.items()]
    futures = cluster.admin.alter_consumer_group_offsets(
        [ConsumerGroupTopicPartitions(name, changes)], request_timeout=REQUEST_TIMEOUT_S
    )
    result = cluster.wait(futures[name], f"cannot reset group {name!r}")
    refused: set[Place] = set()
    for one in result.topic_partitions or []:
        if one.error is not None:
            refused.add((one.topic, one.partition))
            failures.add(translate(one.error, f"cannot reset {one.topic} [{one.partition}]"))
    return [place for place in offsets if place not in refused]


def _render_reset(document: dict[str, Any]) -> str:
    headers = ["TOPIC", "PARTITION", "BEFORE", "AFTER"]
    keys = ["topic", "partition", "before", "after"]
    rows = [[one[key] for key in keys] for one in document["partitions"]]
    text = output.table(headers, rows, right=headers[1:])
    return f"{text}\n\ndry run: nothing was changed" if document["dry_run"] else text

"""`tidelog topic create|branch|branches|list|describe|alter|delete`.

With several names, all are processed: failures are reported, and the exit code is that of the first failure.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from tidelog.cli import output
from tidelog.cli.client import (
    ANSWER_TIMEOUT_S,
    REQUEST_TIMEOUT_S,
    ClusterConnection,
    kafka_admin,
    refusals,
    unknown,
)
from tidelog.cli.completion import branch_sources, topic_config_keys, topic_configs, topic_names
from tidelog.cli.many import ask_at_once
from tidelog.cli.options import admin_options, bootstrap_option, format_option, parse_pairs, price_option, watch_option
from tidelog.cli.subcommands.status import own_status
from tidelog.console.prices import load_prices, priced
from tidelog.runtime.errors import AlreadyExists, InvalidInput, NotFound, TidelogError

OWN_CONFIG = "dynamic-topic-config"
"""The source of a config that is set for the topic."""
CLEANUP_POLICY, COMPACT = "cleanup.policy", "compact"
CLEANING = ("dirty_ratio", "dirty_bytes", "first_dirty_offset", "last_cleaned_ms", "problem")
"""What a leader tells of the log compaction of a partition."""


@click.group()
def topic() -> None:
    """Create, branch, list, describe, alter and delete topics."""


# --- create ------------------------------------------------------------------------------------------------------


@topic.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("-p", "--partitions", type=click.IntRange(min=1), help="Partitions; default: kafka.num_partitions.")
@click.option(
    "-r",
    "--replication-factor",
    "replicas",
    type=click.IntRange(min=1),
    help="Place it on replica sets with as many replicas; default: on any.",
)
@click.option(
    "-c",
    "--config",
    "configs",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=topic_configs,
    help="A topic config; may repeat.",
)
@click.option("--if-not-exists", is_flag=True, help="An existing topic is not an error.")
@format_option
@bootstrap_option
def create(
    names: tuple[str, ...],
    partitions: int | None,
    replicas: int | None,
    configs: tuple[str, ...],
    if_not_exists: bool,
    style: str,
    bootstrap: str,
) -> None:
    """Create topics."""
    cluster = ClusterConnection(bootstrap)
    wanted = dict(parse_pairs("--config", configs))
    failures = output.Failures()
    done = []
    for name in dict.fromkeys(names):
        created = True
        try:
            _create(cluster, name, partitions or -1, replicas or -1, wanted)
            _warn_of(wanted)
        except AlreadyExists as error:
            if not if_not_exists:
                failures.add(error)
                continue
            created = False
        except TidelogError as error:
            failures.add(error)
            continue
        try:
            done.append({"name": name, "created": created, "partitions": len(_appeared(cluster, name))})
        except TidelogError as error:
            if created:
                output.warn(f"topic {name!r} was created, and no broker that was asked knows it yet")
            failures.add(error)

    def render(document: list[dict[str, Any]]) -> str:
        return "\n".join(
            f"{'created' if one['created'] else 'exists already:'} {one['name']}: {_count(one['partitions'])}"
            for one in document
        )

    if done or style == "json":
        output.show(style, lambda: done, render)
    failures.exit()


def _create(cluster: ClusterConnection, name: str, partitions: int, replicas: int, configs: dict[str, str]) -> None:
    what = f"cannot create topic {name!r}" + (f" with {partitions} partitions" if partitions > 0 else "")
    with refusals(what):
        new = kafka_admin().NewTopic(name, num_partitions=partitions, replication_factor=replicas, config=configs)
        futures = cluster.admin.create_topics([new], request_timeout=REQUEST_TIMEOUT_S)
    cluster.wait(futures[name], f"cannot create topic {name!r}")


def _warn_of(configs: dict[str, str]) -> None:
    """Warn of configs that the brokers keep and do not obey."""
    from tidelog.broker.partitions import topic_config

    told = topic_config.warning(configs)
    if told is not None:
        output.warn(f"warning: {told}")


def _appeared(cluster: ClusterConnection, name: str) -> list[int]:
    """Return the partitions of an existing topic; a broker may learn of it shortly after its creation."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            return cluster.topics([name])[name]
        except NotFound:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _count(partitions: int) -> str:
    return f"{partitions} partition{'' if partitions == 1 else 's'}"


# --- branch ------------------------------------------------------------------------------------------------------


@topic.command()
@click.argument("source", metavar="TOPIC@SNAPSHOT", shell_complete=branch_sources)
@click.argument("name", metavar="NEW")
@click.option(
    "-c",
    "--config",
    "configs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Another topic config; may repeat.",
    shell_complete=topic_configs,
)
@click.option(
    "--delete-config",
    "removed",
    multiple=True,
    metavar="KEY",
    help="The default instead; may repeat.",
    shell_complete=topic_config_keys,
)
@format_option
@admin_options
def branch(
    source: str, name: str, configs: tuple[str, ...], removed: tuple[str, ...], style: str, bootstrap: str
) -> None:
    """Create a topic that begins with what a snapshot holds of another one. Nothing is copied.

    Its configs are those that the topic had, retention among them.
    """
    old, at, snapshot = source.rpartition("@")
    if not at or not old or not snapshot:
        raise InvalidInput(
            f"TOPIC@SNAPSHOT is expected, not {source!r}", hint="for example orders@before; `tidelog snapshot list`"
        )
    cluster = ClusterConnection(bootstrap)
    query = [("snapshot", snapshot), ("source", old), ("name", name)]
    query += [("config", f"{key}={value}") for key, value in parse_pairs("--config", configs)]
    query += [("config", key) for key in removed]
    begun = time.monotonic()
    document = cluster.post("/branches?" + urlencode(query))
    document["milliseconds"] = round((time.monotonic() - begun) * 1000, 1)
    _appeared(cluster, name)

    def render(document: dict[str, Any]) -> str:
        return (
            f"created {name} of {source}: {_count(document['partitions'])}, {document['shared']} offsets in"
            f" {document['objects']} shared objects ({output.size(document['object_bytes'])}),"
            f" in {document['milliseconds']:.0f} ms"
        )

    output.show(style, lambda: document, render)


@topic.command()
@price_option()
@format_option
@watch_option
@bootstrap_option
def branches(price_file: Path | None, style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show the topics that are branches: what they share, what only they keep, and what that costs a month."""
    prices = load_prices(price_file)
    cluster = ClusterConnection(bootstrap)

    def load() -> list[dict[str, Any]]:
        return [priced(row, prices) for row in cluster.get("/branches")["branches"]]

    def render(rows: list[dict[str, Any]]) -> str:
        keys = ["topic", "source", "partitions", "shared", "own", "objects"]
        cells = [
            [
                *(row[key] for key in keys),
                output.size(row["object_bytes"]),
                output.size(row["only_bytes"]),
                f"{row['cost_per_month']:.4g}",
            ]
            for row in rows
        ]
        numbers = ["PARTITIONS", "SHARED", "OWN", "OBJECTS", "HELD", "ONLY-BY-IT", f"{prices.currency}/MONTH"]
        return output.table(["TOPIC", "BRANCH-OF", *numbers], cells, right=numbers)

    none = "no topic is a branch; `tidelog topic branch TOPIC@SNAPSHOT NEW` creates one"
    output.show(style, load, render, watch_s=watch_s, empty=none)


# --- list and describe -------------------------------------------------------------------------------------------


@topic.command("list")
@click.option("--internal", is_flag=True, help="Also internal topics.")
@format_option
@watch_option
@bootstrap_option
def list_(internal: bool, style: str, watch_s: float | None, bootstrap: str) -> None:
    """List the topics."""
    cluster = ClusterConnection(bootstrap)

    def load() -> list[dict[str, Any]]:
        described = _descriptions(cluster, sorted(cluster.metadata().topics))
        return [
            {"name": one.name, "partitions": len(one.partitions), "internal": one.is_internal}
            for one in described
            if internal or not one.is_internal
        ]

    def render(document: list[dict[str, Any]]) -> str:
        headers = ["TOPIC", "PARTITIONS", *(["INTERNAL"] if internal else [])]
        rows = [[one["name"], one["partitions"], one["internal"]][: len(headers)] for one in document]
        return output.table(headers, rows, right=["PARTITIONS"])

    output.show(style, load, render, watch_s=watch_s, empty="no topics; `tidelog topic create NAME` creates one")


def _descriptions(cluster: ClusterConnection, names: list[str]) -> list[Any]:
    """Return `TopicDescription`s, without topics that were deleted meanwhile."""
    from confluent_kafka import KafkaError, KafkaException, TopicCollection

    if not names:
        return []
    futures = cluster.admin.describe_topics(TopicCollection(names), request_timeout=REQUEST_TIMEOUT_S)
    found = []
    for name, future in futures.items():
        try:
            found.append(cluster.wait(future, f"topic {name!r}"))
        except TidelogError as error:
            cause = error.__cause__
            if not isinstance(cause, KafkaException) or cause.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise
    return found


@topic.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=topic_names)
@click.option("--configs", "all_configs", is_flag=True, help="Every config and the source of its value.")
@format_option
@watch_option
@bootstrap_option
def describe(names: tuple[str, ...], all_configs: bool, style: str, watch_s: float | None, bootstrap: str) -> None:
    """Show topics' partitions, offsets, and the configs that are not defaults.

    Of compacted topics: the share of bytes that may be superseded, and the time of the last compaction.
    """
    cluster = ClusterConnection(bootstrap)
    failures = output.Failures() if watch_s is None else None

    def load() -> list[dict[str, Any]]:
        known = [name for one in output.gather(names, lambda name: cluster.topics([name]), failures) for name in one]
        return [_describe(cluster, one, all_configs) for one in _descriptions(cluster, known)]

    output.show(style, load, lambda document: "\n\n".join(map(_render_topic, document)), watch_s=watch_s)
    if failures is not None:
        failures.exit()


def _describe(cluster: ClusterConnection, described: Any, all_configs: bool) -> dict[str, Any]:
    name = described.name
    led = [(name, one.id) for one in described.partitions if one.leader is not None]
    offsets = cluster.offsets(led)
    partitions = []
    for one in sorted(described.partitions, key=lambda one: one.id):
        found = offsets.get((name, one.id))
        partitions.append(
            {
                "partition": one.id,
                "leader": one.leader.id if one.leader is not None else None,
                "leader_epoch": found.leader_epoch if found is not None else None,
                "log_start_offset": found.log_start_offset if found is not None else None,
                "high_watermark": found.high_watermark if found is not None else None,
                "replicas": [node.id for node in one.replicas],
                "in_sync": [node.id for node in one.isr],
            }
        )
    configs = _configs(cluster, name)
    if any(one["name"] == CLEANUP_POLICY and COMPACT in one["value"].split(",") for one in configs):
        told = _cleanings(cluster, name, {one["leader"] for one in partitions})
        for row in partitions:
            cleaning = told.get(row["partition"], {})
            row.update({key: cleaning.get(key) for key in CLEANING})
    document = {
        "name": name,
        "id": str(described.topic_id),
        "internal": described.is_internal,
        "configs": {one["name"]: one["value"] for one in configs if one["source"] == OWN_CONFIG},
        "partitions": partitions,
    }
    return {**document, "all_configs": configs} if all_configs else document


def _cleanings(cluster: ClusterConnection, name: str, brokers: Collection[int | None]) -> dict[int, dict[str, Any]]:
    """Return what the leaders tell of their log compaction, by partition. Who cannot be asked tells nothing."""
    found: dict[int, dict[str, Any]] = {}
    status: dict[str, Any] = {"nodes": [], "cluster_id": ""}
    with contextlib.suppress(TidelogError):  # the rest of the answer does not depend on the admin listeners
        status = cluster.get("/status")
    asked = {
        node["id"]: partial(own_status, node, status["cluster_id"])
        for node in status["nodes"]
        if node["id"] in brokers and node["admin_url"]
    }
    for answer in ask_at_once(asked).values():
        if not isinstance(answer, TidelogError):
            rows = answer.get("log_compaction", {}).get("partitions", ())
            found.update({row["partition"]: row for row in rows if row["topic"] == name})
    return found


def _configs(cluster: ClusterConnection, name: str) -> list[dict[str, Any]]:
    """Return every config of a topic: `name`, `value`, and `source` in Kafka's terms."""
    api = kafka_admin()
    resource = api.ConfigResource(api.ConfigResource.Type.TOPIC, name)
    futures = cluster.admin.describe_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
    configs = cluster.wait(futures[resource], f"configs of topic {name!r}")
    return [
        {"name": key, "value": entry.value, "source": api.ConfigSource(entry.source).name.lower().replace("_", "-")}
        for key, entry in sorted(configs.items())
    ]


def _render_topic(document: dict[str, Any]) -> str:
    own = ", ".join(f"{key}={value}" for key, value in document["configs"].items())
    about = output.pairs([("topic", document["name"]), ("id", document["id"]), ("configs", own or "defaults")])
    numbers = ["PARTITION", "LEADER", "EPOCH", "LOG-START", "HIGH-WATERMARK"]
    keys = ["partition", "leader", "leader_epoch", "log_start_offset", "high_watermark"]
    rows = [
        [*(one[key] for key in keys), *(",".join(map(str, one[key])) for key in ("replicas", "in_sync"))]
        for one in document["partitions"]
    ]
    cleaned = [] if not any("dirty_ratio" in one for one in document["partitions"]) else ["DIRTY", "COMPACTED"]
    if cleaned:
        now_ms = time.time() * 1000
        for row, one in zip(rows, document["partitions"], strict=True):
            row += _cleaning_cells(one, now_ms)
    header = [*numbers, "REPLICAS", "IN-SYNC", *cleaned]
    text = f"{about}\n\n{output.table(header, rows, right=[*numbers, *cleaned])}"
    if "all_configs" in document:
        configs = [[one["name"], one["value"], one["source"]] for one in document["all_configs"]]
        text += f"\n\n{output.table(['CONFIG', 'VALUE', 'SOURCE'], configs)}"
    return text


def _cleaning_cells(partition: dict[str, Any], now_ms: float) -> list[str | None]:
    ratio, at_ms = partition["dirty_ratio"], partition["last_cleaned_ms"]
    if ratio is None:
        return [None, None]
    dirty = "problem" if partition["problem"] else f"{ratio:.0%}"
    return [dirty, "never" if at_ms is None else f"{max(0, now_ms - at_ms) / 60_000:.0f} min ago"]


# --- alter and delete --------------------------------------------------------------------------------------------


@topic.command()
@click.argument("name", shell_complete=topic_names)
@click.option("-p", "--partitions", type=click.IntRange(min=1), help="The new number of partitions; it can only grow.")
@click.option(
    "-c",
    "--config",
    "configs",
    multiple=True,
    metavar="KEY=VALUE",
    shell_complete=topic_configs,
    help="Set a topic config; may repeat.",
)
@click.option(
    "--delete-config",
    "removed",
    multiple=True,
    metavar="KEY",
    shell_complete=topic_config_keys,
    help="Reset to its default; may repeat.",
)
@format_option
@bootstrap_option
def alter(
    name: str, partitions: int | None, configs: tuple[str, ...], removed: tuple[str, ...], style: str, bootstrap: str
) -> None:
    """Change a topic's configs or add partitions."""
    changes: dict[str, str | None] = {**dict(parse_pairs("--config", configs)), **dict.fromkeys(removed)}
    if partitions is None and not changes:
        raise InvalidInput("nothing to alter", hint="give --partitions, --config or --delete-config")
    cluster = ClusterConnection(bootstrap)
    cluster.topics([name])
    if changes:
        _alter_configs(cluster, name, changes)
        _warn_of({key: value for key, value in changes.items() if value is not None})
    if partitions is not None:
        try:
            _add_partitions(cluster, name, partitions)
        except TidelogError:
            if changes:
                output.warn(f"only the configs of topic {name!r} were altered: {', '.join(changes)}")
            raise
    own = {one["name"]: one["value"] for one in _configs(cluster, name) if one["source"] == OWN_CONFIG}
    document = {"name": name, "partitions": len(cluster.topics([name])[name]), "configs": own}

    def render(document: dict[str, Any]) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in document["configs"].items()) or "default configs"
        return f"altered {document['name']}: {_count(document['partitions'])}, {shown}"

    output.show(style, lambda: document, render)


def _add_partitions(cluster: ClusterConnection, name: str, partitions: int) -> None:
    with refusals(f"cannot raise the partitions of topic {name!r} to {partitions}"):
        new = kafka_admin().NewPartitions(name, partitions)
        futures = cluster.admin.create_partitions([new], request_timeout=REQUEST_TIMEOUT_S)
    cluster.wait(futures[name], f"cannot add partitions to topic {name!r}")


def _alter_configs(cluster: ClusterConnection, name: str, changes: dict[str, str | None]) -> None:
    api = kafka_admin()
    operation = api.AlterConfigOpType
    entries = [
        api.ConfigEntry(key, value, incremental_operation=operation.DELETE if value is None else operation.SET)
        for key, value in changes.items()
    ]
    resource = api.ConfigResource(api.ConfigResource.Type.TOPIC, name, incremental_configs=entries)
    futures = cluster.admin.incremental_alter_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
    cluster.wait(futures[resource], f"cannot alter topic {name!r}")


@topic.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=topic_names)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@format_option
@bootstrap_option
def delete(names: tuple[str, ...], yes: bool, style: str, bootstrap: str) -> None:
    """Delete topics and all their records."""
    cluster = ClusterConnection(bootstrap)
    known = cluster.metadata().topics
    failures = output.Failures()
    wanted = []
    for name in dict.fromkeys(names):
        if name in known:
            wanted.append(name)
        else:
            failures.add(unknown("topic", name, known, otherwise="`tidelog topic list` shows them"))
    if wanted and not yes:
        output.confirm(f"delete {', '.join(wanted)} and all records in {'it' if len(wanted) == 1 else 'them'}")
    done = []
    futures = cluster.admin.delete_topics(wanted, request_timeout=REQUEST_TIMEOUT_S) if wanted else {}
    for name, future in futures.items():
        try:
            cluster.wait(future, f"cannot delete topic {name!r}")
            done.append(name)
        except TidelogError as error:
            failures.add(error)
    if style == "json":
        output.emit(json.dumps({"deleted": done}))
    elif done:
        output.emit("\n".join(f"deleted {name}" for name in done))
    failures.exit()

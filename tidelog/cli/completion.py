"""What the shell's completion offers: names that the cluster knows, and keys of settings.

The shell runs `tidelog` anew at each press of TAB, and nobody wants to wait for it: a cluster that has not answered
within `LIMIT_S`, for whatever reason, completes to nothing. There is no place for a message on the line that is being
typed.

Entry: the functions, for `shell_complete` of a parameter.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tidelog.cli.options import BOOTSTRAP_ENV, DEFAULT_BOOTSTRAP
from tidelog.runtime.errors import TidelogError

if TYPE_CHECKING:
    from tidelog.cli.client import ClusterConnection

T = TypeVar("T")

LIMIT_S = 1.0
"""How long the cluster may take, imports included."""
MOST_OBJECTS = 1_000
"""Of the objects the first so many are offered."""

Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def topic_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The topics that begin with `incomplete`; internal ones only once they are being typed."""
    known = _asked(context, lambda cluster: list(cluster.metadata().topics))
    return [name for name in _beginning(known, incomplete) if incomplete or not name.startswith("__")]


def partition_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The partitions that begin with `incomplete`, as TOPIC:NUMBER."""

    def load(cluster: ClusterConnection) -> list[str]:
        topics = cluster.metadata().topics
        return [f"{name}:{index}" for name in sorted(topics) for index in sorted(topics[name].partitions)]

    named = _asked(context, load)
    return [name for name in named if name.startswith(incomplete) and (incomplete or not name.startswith("__"))]


def partition_numbers(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The partitions of the topic that is named before."""
    topic = context.params.get("topic") or next(iter(context.params.get("topics") or ()), None)
    if not isinstance(topic, str):
        return []
    return _numbers(_asked(context, lambda cluster: cluster.topics([topic])[topic]), incomplete)


def group_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The consumer groups that begin with `incomplete`."""

    def load(cluster: ClusterConnection) -> list[str]:
        found = cluster.wait(cluster.admin.list_consumer_groups(request_timeout=LIMIT_S), "groups")
        return [each.group_id for each in found.valid]

    return _beginning(_asked(context, load), incomplete)


def topic_config_keys(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The keys of topics' configs that begin with `incomplete`."""
    from tidelog.broker.partitions.topic_config import TOPIC_CONFIGS

    return _beginning(TOPIC_CONFIGS, incomplete)


def topic_configs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The same, with the sign that a value follows."""
    return [f"{key}=" for key in topic_config_keys(context, parameter, incomplete)]


def snapshot_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The snapshots that begin with `incomplete`."""

    def load(cluster: ClusterConnection) -> list[str]:
        return [row["name"] for row in cluster.get("/snapshots")["snapshots"]]

    return _beginning(_asked(context, load), incomplete)


def branch_sources(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The topics of snapshots, `TOPIC@SNAPSHOT`, that begin with `incomplete`."""

    def load(cluster: ClusterConnection) -> list[str]:
        rows = cluster.get("/snapshots")["snapshots"]
        return [f"{topic}@{row['name']}" for row in rows for topic in row["topics"]]

    return _beginning(_asked(context, load), incomplete)


def _of_rows(path: str, rows: str, key: str) -> Complete:
    """The values of a field in a list that the admin HTTP gives."""

    def complete(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
        return _numbers(_asked(context, lambda cluster: [row[key] for row in cluster.get(path)[rows]]), incomplete)

    return complete


broker_ids = _of_rows("/brokers", "brokers", "id")
replica_set_ids = _of_rows("/replica-sets", "replica_sets", "id")
controller_ids = _of_rows("/controllers", "members", "id")
object_ids = _of_rows(f"/objects?limit={MOST_OBJECTS}", "objects", "id")
lease_ids = _of_rows("/leases", "leases", "id")


def broker_list(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Brokers with commas between them, each once."""
    *given, last = incomplete.split(",")
    left = [each for each in broker_ids(context, parameter, last) if each not in given]
    return [",".join((*given, each)) for each in left]


def controller_settings(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The settings of controllers that may be changed while they run."""

    def load(cluster: ClusterConnection) -> list[str]:
        return [row["key"] for row in cluster.get("/controllers/config")["settings"] if row["dynamic"]]

    return _beginning(_asked(context, load), incomplete)


def quarantined(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The partitions of quarantined streams."""

    def load(cluster: ClusterConnection) -> list[str]:
        return [f"{row['topic']}:{row['partition']}" for row in cluster.get("/quarantine")["streams"]]

    return _beginning(set(_asked(context, load)), incomplete)


def _asked(context: click.Context, load: Callable[[ClusterConnection], list[Any]]) -> list[Any]:
    """Return what the cluster says, or nothing when it does not say it in time."""
    told: list[Any] = []

    def ask() -> None:
        from tidelog.cli.client import ClusterConnection

        try:
            told.extend(load(ClusterConnection(bootstrap)))
        except TidelogError:
            return

    bootstrap = context.params.get("bootstrap") or os.environ.get(BOOTSTRAP_ENV) or DEFAULT_BOOTSTRAP
    thread = threading.Thread(target=ask, daemon=True, name="completion")  # the process ends without it
    thread.start()
    thread.join(LIMIT_S)
    return [] if thread.is_alive() else told


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))


def _numbers(numbers: Iterable[int], incomplete: str) -> list[str]:
    return [str(number) for number in sorted(numbers) if str(number).startswith(incomplete)]

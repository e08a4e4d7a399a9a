"""Names for the shell's completion, asked of the cluster: topics, groups, and partitions as TOPIC:NUMBER.

The shell runs `tidelog` anew at each press of TAB. A cluster that does not answer completes to nothing: there is no
place for a message on the line that is being typed.

Entry: `topic_names`, `group_names`, `partition_names`, for `shell_complete` of a parameter.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from tidelog.cli.options import BOOTSTRAP_ENV, DEFAULT_BOOTSTRAP
from tidelog.runtime.errors import TidelogError

if TYPE_CHECKING:
    from tidelog.cli.client import ClusterConnection

GROUPS_TIMEOUT_S = 3.0


def topic_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The topics that begin with `incomplete`; internal ones only once they are being typed."""
    try:
        known = _cluster(context).metadata().topics
    except TidelogError:
        return []
    return [name for name in _beginning(known, incomplete) if incomplete or not name.startswith("__")]


def partition_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The partitions that begin with `incomplete`."""
    try:
        topics = _cluster(context).metadata().topics
    except TidelogError:
        return []
    named = [f"{name}:{index}" for name in sorted(topics) for index in sorted(topics[name].partitions)]
    return [name for name in named if name.startswith(incomplete) and (incomplete or not name.startswith("__"))]


def group_names(context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """The consumer groups that begin with `incomplete`."""
    try:
        cluster = _cluster(context)
        found = cluster.wait(cluster.admin.list_consumer_groups(request_timeout=GROUPS_TIMEOUT_S), "groups")
    except TidelogError:
        return []
    return _beginning([each.group_id for each in found.valid], incomplete)


def _cluster(context: click.Context) -> ClusterConnection:
    from tidelog.cli.client import ClusterConnection

    return ClusterConnection(context.params.get("bootstrap") or os.environ.get(BOOTSTRAP_ENV) or DEFAULT_BOOTSTRAP)


def _beginning(names: list[str] | dict[str, object], incomplete: str) -> list[str]:
    return sorted(name for name in names if name.startswith(incomplete))

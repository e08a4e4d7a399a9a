"""What speaks against ending a broker's process now, to start it again: the rule of a rolling restart.

One broker at a time is away, and nobody's writes stop meanwhile. The rule is asked twice: by the command that begins a
restart, where it decides (`BeginRestart`), and by whoever shows a plan. So two operators that restart brokers at the
same time never take two away. See docs/design/0016-rolling-restart.md.

Entry: `restart_hindrances`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from tidelog.controller.model.records import BrokerRecord, DrainMode, ReplicaSetRecord
from tidelog.controller.model.replication import PolicyRecord, ReplicationRecord, has_several


def restart_hindrances(
    broker_id: int,
    brokers: Iterable[BrokerRecord],
    replica_sets: Iterable[ReplicaSetRecord],
    replication: Callable[[int], ReplicationRecord | None],
) -> list[str]:
    """Return what speaks against restarting a broker now, one sentence each; empty: nothing.

    `replication` returns the row of a replica set. Sets of one member are no reason: their partitions move.
    """
    by_id = {each.id: each for each in brokers}
    others = [each for each in by_id.values() if each.id != broker_id]
    found = [f"broker {each.id} is dead" for each in others if not each.alive]
    found += [f"broker {each.id} is stopping" for each in others if each.alive and each.draining == DrainMode.SHUTDOWN]
    if not any(each.alive and not each.draining for each in others):
        found.append("no other broker is alive, and not draining, to serve its partitions meanwhile")
    living = {each.id for each in by_id.values() if each.alive}
    for record in replica_sets:
        if has_several(record):
            found += _of_set(broker_id, record, replication(record.id) or ReplicationRecord(record.id), living)
    return found


def _of_set(broker_id: int, record: ReplicaSetRecord, row: ReplicationRecord, living: Collection[int]) -> list[str]:
    """Return what a replica set of several members has against it."""
    if row.election is not None:
        return [f"replica set {record.id} elects a master"]
    if record.master not in living:
        return [f"replica set {record.id} has no master"]
    found = [
        f"replica set {record.id}: broker {each} is not in sync"
        for each in record.members
        if each not in record.sync_state_set and each not in row.leaving
    ]
    left = len({*record.sync_state_set} - {broker_id})
    if not found and broker_id in record.sync_state_set and left < (needed := needed_in_sync(row.policy, left)):
        found.append(f"replica set {record.id} needs {needed} members in sync for a write, and would have {left}")
    return found


def needed_in_sync(policy: PolicyRecord, left: int) -> int:
    """Return how many members in sync a write needs where `left` are."""
    if policy.all_ack_in_sync_state_set:
        return max(1, policy.min_in_sync_replicas)
    return policy.checked().quorum(left, left)

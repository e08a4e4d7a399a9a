"""The replicas of partitions as Kafka's clients see them, and the replica sets that clients mean by naming brokers.

Replication belongs to the replica set: a partition's replicas are the set's members, its in-sync replicas the
SyncStateSet. To Kafka's tools the preferred leader of a partition is its first replica: the broker with the set's id,
if it is a member. Learners are not shown: they are never counted and never elected.

Entry: `members_of`, `replicas_of`, `named_replica_set`, `default_replicas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tidelog.controller.image.image import Image
from tidelog.controller.model.errors import InvalidReplicaAssignment
from tidelog.controller.model.records import PartitionRecord


class PartitionReplicas(NamedTuple):
    """Brokers, each part with the preferred leader first."""

    nodes: tuple[int, ...]
    in_sync: tuple[int, ...]
    offline: tuple[int, ...]
    """Those that are not alive."""


def members_of(image: Image, replica_set: int) -> tuple[int, ...]:
    """Return the members of a replica set, the preferred master first; none of an unknown set."""
    record = image.replica_sets.get(replica_set)
    return () if record is None else _preferred_first(replica_set, record.members)


def replicas_of(image: Image, partition: PartitionRecord) -> PartitionReplicas:
    """Return the replicas of a partition."""
    record = image.replica_sets.get(partition.replica_set)
    if record is None:
        return PartitionReplicas((), (), ())
    nodes = _preferred_first(record.id, record.members)
    offline = tuple(each for each in nodes if not _is_alive(image, each))
    return PartitionReplicas(nodes, _preferred_first(record.id, record.sync_state_set), offline)


def _preferred_first(replica_set: int, brokers: tuple[int, ...]) -> tuple[int, ...]:
    if replica_set not in brokers[1:]:
        return brokers
    return (replica_set, *(each for each in brokers if each != replica_set))


def _is_alive(image: Image, broker_id: int) -> bool:
    broker = image.brokers.get(broker_id)
    return broker is not None and broker.alive


def named_replica_set(image: Image, brokers: Sequence[int], partition: str) -> int:
    """Return the replica set that the replicas named for a partition are: its members, the preferred master first.

    Sets with the same members are told apart by that one. A single broker that no set consists of names the set of
    which it is the preferred master. Raises `InvalidReplicaAssignment`.
    """
    if not brokers or len(set(brokers)) != len(brokers):
        raise InvalidReplicaAssignment(f"{partition}: its replicas must be named, each once")
    unknown = [broker for broker in brokers if broker not in image.brokers]
    if unknown:
        raise InvalidReplicaAssignment(f"{partition}: brokers {unknown} are not known")
    preferred = image.replica_sets.get(brokers[0])
    candidates = [*([preferred] if preferred is not None else []), *image.replica_sets.values()]
    for one in candidates:
        if set(one.members) == set(brokers):
            return one.id
    if preferred is not None and len(brokers) == 1:
        return preferred.id
    raise InvalidReplicaAssignment(
        f"{partition}: no replica set has the members {list(brokers)}",
        hint="replication belongs to replica sets, which `tidelog replica-set list` shows: name the members of one,"
        " its preferred master first",
    )


def default_replicas(image: Image) -> int:
    """Return how many replicas a topic has at least that asks for no number: as the smallest set that takes it."""
    masters = ((each, image.master_of(each)) for each in image.replica_sets)
    open_sets = [each for each, master in masters if master is not None and not master.draining]
    return min(map(image.replica_count, open_sets), default=1)

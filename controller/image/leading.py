"""Who leads a replica set, and who could: questions about sets of several members that several parts ask of an image.

A replica set has the id of its *home* broker, which is its preferred master. A set of several members may be led by
another one, so what a broker serves follows from the masters, and not from the ids of sets.

Entry: `led_sets`, `partitions_led`, `may_lead`, `other_leaders`, `first_choices`, `takers`.
"""

from __future__ import annotations

from tidelog.controller.image.image import Image
from tidelog.controller.model.records import BrokerRecord, DrainMode, ReplicaSetRecord
from tidelog.controller.model.replication import has_several


def led_sets(image: Image, broker_id: int) -> list[ReplicaSetRecord]:
    """Return the replica sets whose master the broker is, by id.

    One of one member is its broker's at any time. One for which an election is under way counts as its last master's,
    whose promise may be needed.
    """
    found = []
    for record in sorted(image.replica_sets.values(), key=lambda each: each.id):
        election = image.election(record.id)
        master = record.master if election is None else election.last_master
        if broker_id == master or (broker_id in record.members and not has_several(record)):
            found.append(record)
    return found


def partitions_led(image: Image, broker_id: int) -> int:
    """Return the number of partitions of the replica sets whose master the broker is."""
    return sum(image.index.partition_counts.get(each.id, 0) for each in led_sets(image, broker_id))


def may_lead(image: Image, record: ReplicaSetRecord, broker_id: int) -> bool:
    """Whether a broker is alive, does not drain or leave, and has the WAL with which it is in the SyncStateSet.

    Only a promise shows that its WAL has what an election needs.
    """
    broker, row = image.brokers.get(broker_id), image.replication.get(record.id)
    if broker is None or not broker.alive or broker.draining or row is None or broker_id in row.leaving:
        return False
    joined = row.replica(broker_id)
    return joined is not None and any(
        (each.broker_id, each.wal_id) == (broker_id, joined.wal_id) for each in row.in_sync
    )


def other_leaders(image: Image, record: ReplicaSetRecord) -> list[int]:
    """Return the members other than the master that may lead, by id; empty for a set of one."""
    return [each for each in record.sync_state_set if each != record.master and may_lead(image, record, each)]


def first_choices(image: Image, record: ReplicaSetRecord) -> list[int]:
    """Return those of `other_leaders` that should lead rather than the others, by id.

    The preferred master, whatever priorities there are; else those with the largest election priority.
    """
    others, row = other_leaders(image, record), image.replication.get(record.id)
    if record.id in others or row is None:
        return [each for each in others if each == record.id]
    most = max((row.priority_of(each) for each in others), default=0)
    return [each for each in others if row.priority_of(each) == most]


def takers(image: Image) -> dict[int, BrokerRecord]:
    """Return the masters of the replica sets that may be given partitions, by replica set, in order.

    A set takes none while its master drains, and while its home broker is drained by an operator.
    """
    found: dict[int, BrokerRecord] = {}
    for set_id in sorted(image.replica_sets):
        master, home = image.master_of(set_id), image.brokers.get(set_id)
        if master is None or master.draining or (home is not None and home.draining == DrainMode.OPERATOR):
            continue
        found[set_id] = master
    return found

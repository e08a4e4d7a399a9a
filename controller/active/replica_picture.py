"""What the plans of replicas know: the sets that they look after, which members count, and who has how many replicas.

Entry: `planned_sets`, `replica_loads`, `keeps_replicas`, `takes_replicas`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from tidelog.controller.image.image import Image
from tidelog.controller.model.records import (
    BUCKET_WAL,
    NO_BROKER,
    BrokerRecord,
    DrainMode,
    ReplicaSetRecord,
)
from tidelog.controller.model.replication import ReplicationRecord

DISK_WAL = "disk"


class PlannedSet(NamedTuple):
    """A replica set that the plans look after."""

    record: ReplicaSetRecord
    row: ReplicationRecord
    places: set[int]
    """The brokers that have or shall have a replica, those assigned by this round included."""
    usable: set[int]
    """Those of them that count."""

    @property
    def wanted(self) -> int:
        """Return how many usable members the policy wants."""
        return self.row.policy.total_replicas


def planned_sets(image: Image, lost: Collection[int]) -> list[PlannedSet]:
    """Return the replica sets to look after, by id. `lost`: brokers that are not waited for any more."""
    found = (_planned_set(image, each, lost) for each in sorted(image.replication))
    return [each for each in found if each is not None]


def _planned_set(image: Image, set_id: int, lost: Collection[int]) -> PlannedSet | None:
    """Return a replica set, unless it is to be left alone."""
    record, row, home = image.replica_sets.get(set_id), image.replication[set_id], image.brokers.get(set_id)
    if record is None or row.policy.total_replicas <= 1 or not row.in_sync or row.election is not None:
        return None
    if record.successor != NO_BROKER or image.master_of(set_id) is None:
        return None
    if home is None or home.draining == DrainMode.OPERATOR:
        return None
    places = {*row.assigned, *record.members, *record.learners}
    not_counted = {*lost, *record.learners, *row.learning, *row.leaving}
    usable = {each for each in places - not_counted if keeps_replicas(image, each)}
    return PlannedSet(record, row, places, usable)


def replica_loads(image: Image) -> Counter[int]:
    """Return the number of replicas that each broker has or shall have, learners included."""
    loads: Counter[int] = Counter()
    for record in image.replica_sets.values():
        row = image.replication.get(record.id)
        loads.update({*record.members, *record.learners, *(row.assigned if row is not None else ())})
    return loads


def keeps_replicas(image: Image, broker_id: int) -> bool:
    """Whether a broker may go on with the replicas that it has."""
    broker = image.brokers.get(broker_id)
    return broker is not None and broker.draining != DrainMode.OPERATOR and broker.wal_kind != BUCKET_WAL


def takes_replicas(broker: BrokerRecord) -> bool:
    """Whether a broker may be assigned replicas."""
    return broker.alive and not broker.draining and broker.wal_kind == DISK_WAL and bool(broker.peer_address)

"""Checks of replica sets with several members in an idle cluster.

- `liveness` (`unsettled_replicas`): each has a master and no election under way, all its members are in sync, and it
  has as many as its policy wants.
- `replicas-differ` (`compare_replicas`): the members have the same WAL records up to what is confirmed.

Entry: `unsettled_replicas`, `compare_replicas`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.broker.hot_set import HotSet
from tidelog.controller.image.image import Image
from tidelog.controller.model.records import DrainMode, ReplicaSetRecord
from tidelog.controller.model.replication import ReplicationRecord, has_several
from tidelog.runtime.errors import TidelogError
from tidelog.simulation.checkers import Finding
from tidelog.simulation.world.cluster import SimCluster
from tidelog.storage.wal.base import WalRecord

READ_BYTES = 1 << 20


def _replicated(image: Image) -> Iterator[tuple[ReplicaSetRecord, ReplicationRecord]]:
    for set_id, row in sorted(image.replication.items()):
        record = image.replica_sets.get(set_id)
        if record is not None and has_several(record):
            yield record, row


def unsettled_replicas(cluster: SimCluster, image: Image) -> list[str]:
    """Return the reasons why replica sets are not as they are to be."""
    found = []
    places = [one for one in image.brokers.values() if one.alive and not one.draining and one.peer_address]
    for record, row in _replicated(image):
        what = f"replica set {record.id}"
        home = image.brokers.get(record.id)
        if image.master_of(record.id) is None:
            found.append(f"{what} has no master")
        if row.election is not None:
            found.append(f"{what} elects in epoch {record.master_epoch}: {[*row.election.promises]}")
        behind = {*record.members} - {*record.sync_state_set}
        found += [f"broker {each} is not in sync in {what}" for each in sorted(behind)]
        is_kept = home is not None and home.draining != DrainMode.OPERATOR
        if is_kept and len(record.members) < min(row.policy.total_replicas, len(places)):
            found.append(f"{what} has members {record.members}")
    found += [
        f"replica set {each} has one member"
        for each, row in image.replication.items()
        if row.policy.total_replicas > 1 and row.in_sync and each in image.replica_sets
        if not has_several(image.replica_sets[each]) and len(places) > 1 and each in {one.id for one in places}
    ]
    return found


async def compare_replicas(cluster: SimCluster) -> list[Finding]:
    """Return where members of a set differ from their master, up to its confirm offset."""
    active = cluster.active
    if active is None:
        return []
    found = []
    for record, _ in _replicated(active.image):
        master = _replica(cluster, record.master, record.id)
        if master is None:
            continue
        for each in record.members:
            other = _replica(cluster, each, record.id)
            problem = await _difference(master, other) if other is not None and other is not master else ""
            if problem:
                message = f"replica set {record.id}: broker {each} and its master, broker {record.master}: {problem}"
                found.append(Finding(rule="replicas-differ", message=message))
    return found


def _replica(cluster: SimCluster, broker_id: int, set_id: int) -> HotSet | None:
    node = cluster.nodes.get(broker_id)
    if node is None or node.broker is None or not node.ready:
        return None
    return node.broker.parts.data.hot_sets.get(set_id)


async def _difference(master: HotSet, other: HotSet) -> str:
    at = max(master.wal.start_offset, other.wal.start_offset)
    end = min(master.wal.confirm_offset, other.wal.durable_offset)
    while at < end:
        try:
            ours, theirs = await _records(master, at, end), await _records(other, at, end)
        except TidelogError as error:
            return f"at {at}: {error}"
        for one, another in zip(ours, theirs, strict=False):
            if (one.offset, one.type, bytes(one.payload)) != (another.offset, another.type, bytes(another.payload)):
                return f"other records at {one.offset}"
        if not ours or not theirs:
            return f"nothing to read at {at}, before {end}"
        at = min(ours[-1].end_offset, theirs[-1].end_offset)
    start = max(master.wal.start_offset, other.wal.start_offset)
    if start < end and other.wal.epoch_history.epoch_at(end - 1) != master.wal.epoch_history.epoch_at(end - 1):
        return f"other epochs before {end}"
    return ""


async def _records(one: HotSet, at: int, end: int) -> list[WalRecord]:
    return [each for each in await one.wal.read_records(at, READ_BYTES) if each.offset < end]

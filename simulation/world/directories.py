"""Which WAL directory may be lost now, so that nothing acknowledged is lost with it: a quorum's other members have it.

Entry: `may_be_lost`, `must_return`.
"""

from __future__ import annotations

from tidelog.controller.model.replication import ReplicationRecord
from tidelog.simulation.world.cluster import SimCluster


def may_be_lost(cluster: SimCluster, set_id: int, broker_id: int) -> bool:
    """Return whether a broker may lose its directory of a replica set: the policy tolerates it now.

    Of a set with one member that the broker's own controllers know (`tidelog.broker.wal_keeper`): always. Of one with
    several: while no election is under way, another is its master, at least two are in sync, and each other one in sync
    has the directory that counts.
    """
    row = cluster.watch.replicas.rows.get(set_id)
    record = cluster.watch.replica_set(set_id)
    if row is None or record is None or len(row.replicas) <= 1:
        return set_id == broker_id
    if row.election is not None or record.master in (-1, broker_id) or not _is_spare(cluster, row, broker_id):
        return False
    return all(
        cluster.nodes[each.broker_id].disks.mount(set_id).has_wal(each.wal_id)
        for each in row.in_sync
        if each.broker_id != broker_id
    )


def must_return(cluster: SimCluster, set_id: int, broker_id: int) -> bool:
    """Return whether a broker lost the directory that counts of a set that has grown to several members since.

    Then nothing makes it refuse the one that it found, and nobody else has what is in the other one.
    """
    row = cluster.watch.replicas.rows.get(set_id)
    if row is None or len(row.replicas) <= 1:
        return False
    mount = cluster.nodes[broker_id].disks.mount(set_id)
    return any(each.broker_id == broker_id and mount.had_wal(each.wal_id) for each in row.in_sync)


def _is_spare(cluster: SimCluster, row: ReplicationRecord, broker_id: int) -> bool:
    """Whether whatever was confirmed is held by a member in sync other than this broker."""
    in_sync = {each.broker_id for each in row.in_sync}
    if broker_id not in in_sync:
        return True
    return len(in_sync) >= 2

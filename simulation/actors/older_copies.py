"""A fault: members of a replica set come back with older copies of their disks, while the one that has all is down.

It is what a restore of several machines from images of an earlier hour leaves. No quorum protects from that, and
still nobody may be elected: what is in the bucket, or what the controllers were told, shows that the copies are older
(`tidelog.controller.model.replication.was_set_back`, from `EMPTY_COPY_LEVEL` on). When the fault ends, the master's
disk is there again, and an operator mounts the right disks; then nothing that was acknowledged is missing.

Only where that holds: the copies of all members in sync but the master end before what is in the bucket, or before
what the controllers know of them.

Entry: `OlderCopies`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from tidelog.controller.model.levels import EMPTY_COPY_LEVEL
from tidelog.controller.model.replication import ReplicationRecord
from tidelog.simulation.world.cluster import SimCluster, SimNode
from tidelog.simulation.world.disk import Platters

TAKEN_ANEW = 0.2
"""How often copies of a set are replaced by newer ones when there are some."""


class _DiskCopy(NamedTuple):
    """Of one replica's disk, at one moment."""

    wal_id: str
    end_offset: int
    platters: Platters


class OlderCopies:
    """Copies of replicas' disks from earlier in the seed, by replica set and broker."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._copies: dict[int, dict[int, _DiskCopy]] = {}

    def take(self, rng: random.Random) -> None:
        """Copy the disks of each replica set of which all members in sync are there."""
        for row in self._several():
            known = self._copies.get(row.id, {})
            is_current = all(
                (copy := known.get(each.broker_id)) is not None and copy.wal_id == each.wal_id for each in row.in_sync
            )
            if is_current and rng.random() >= TAKEN_ANEW:
                continue
            copies = {each.broker_id: self._copy(row.id, each.broker_id, each.wal_id) for each in row.in_sync}
            if all(copies.values()):
                self._copies[row.id] = {broker: copy for broker, copy in copies.items() if copy is not None}

    def mount(self, rng: random.Random) -> Callable[[], None] | None:
        """Crash the members in sync of a set, and start all but the master with the copies.

        Returns what ends that, or None where the copies would be taken for good disks, and rightly so.
        """
        found = [(row, copies) for row in self._several() if (copies := self._usable(row))]
        if not found or self._cluster.level < EMPTY_COPY_LEVEL:
            return None
        row, copies = rng.choice(found)
        record = self._cluster.watch.replica_set(row.id)
        assert record is not None
        nodes = self._cluster.nodes
        master, epoch = nodes[record.master], record.master_epoch
        master.crash(power=False)
        followers = [nodes[each] for each in sorted(copies)]
        originals = [self._exchange(each, row.id, copies[each.id].platters.copy()) for each in followers]
        del self._copies[row.id]

        def undo() -> None:
            now = self._cluster.watch.replica_set(row.id)
            if now is None or now.master == -1 or now.master_epoch == epoch:  # else the set goes on with what it has
                for node, platters in zip(followers, originals, strict=True):
                    self._exchange(node, row.id, platters)
            master.recover()

        return undo

    def _several(self) -> list[ReplicationRecord]:
        rows = self._cluster.watch.replicas.rows
        return [rows[each] for each in sorted(rows) if len(rows[each].in_sync) > 1]

    def _copy(self, set_id: int, broker_id: int, wal_id: str) -> _DiskCopy | None:
        node = self._cluster.nodes[broker_id]
        replica = node.broker.parts.data.hot_sets.get(set_id) if node.ready and node.broker is not None else None
        mount = node.disks.mount(set_id)
        if replica is None or not mount.has_wal(wal_id):
            return None
        return _DiskCopy(wal_id, replica.wal.end_offset, mount.platters.copy())

    def _usable(self, row: ReplicationRecord) -> dict[int, _DiskCopy]:
        """Return the copies for all members in sync but the master; empty if they are not, or prove nothing."""
        record, copies = self._cluster.watch.replica_set(row.id), self._copies.get(row.id, {})
        if record is None or row.election is not None or not self._has_its_disk(row, record.master):
            return {}
        last = row.last_election
        if last is not None and last.accepted_loss:
            return {}
        found = {}
        for each in row.in_sync:
            copy = copies.get(each.broker_id)
            if each.broker_id == record.master:
                continue
            known_end = max(record.committed_wal_offset, each.known_end)
            if copy is None or copy.wal_id != each.wal_id or copy.end_offset >= known_end:
                return {}
            found[each.broker_id] = copy
        return found

    def _has_its_disk(self, row: ReplicationRecord, broker_id: int) -> bool:
        node = self._cluster.nodes.get(broker_id)
        return (
            node is not None
            and node.ready
            and any(
                each.broker_id == broker_id and node.disks.mount(row.id).has_wal(each.wal_id) for each in row.in_sync
            )
        )

    def _exchange(self, node: SimNode, set_id: int, platters: Platters) -> Platters:
        """Crash a node, and start it with another disk for a set's WAL; return the one that it had."""
        node.crash(power=False)
        mount = node.disks.mount(set_id)
        mount.platters.settle()
        before, mount.platters = mount.platters, platters
        self._cluster.watch.replicas.exchanged(set_id, node.id)
        self._cluster.note(node.host, f"finds another copy of its disk of set {set_id}")
        node.recover()
        return before

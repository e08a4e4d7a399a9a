"""A fault: members of a replica set come back with older copies of their disks, while others may be down.

It is what a restore of machines from images of an earlier hour leaves. Two forms of it:

- all members in sync but the master, which has all and is down. No quorum protects from that, and still nobody may be
  elected: what is in the bucket, or what the controllers were told, shows that the copies are older
  (`tidelog.controller.model.replication.was_set_back`, from `EMPTY_COPY_LEVEL` on);
- any members, while any of the others are down, or behind by what other faults do to them. A copy may not stand in for
  the disk that it was taken from, in this election or a later one.

When the fault ends, those that are down come back, and an operator mounts the right disks unless the set goes on
without them; then nothing that was acknowledged is missing.

Only where that holds: the copies end before what the controllers know of them, and in the first form before what is
in the bucket at least.

Entry: `OlderCopies`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from tidelog.controller.model.levels import EMPTY_COPY_LEVEL
from tidelog.controller.model.records import ReplicaSetRecord
from tidelog.controller.model.replication import InSyncRecord, ReplicationRecord
from tidelog.simulation.world.cluster import SimCluster, SimNode
from tidelog.simulation.world.disk import Platters

Cut = Callable[[list[tuple[str, str]]], Callable[[], None]]
"""Cuts the network from hosts to others, and returns what heals that."""
BEHIND_S = (0.3, 2.5)
"""For how long a member is cut off from its master before."""
PREFERRED = 0.7
"""How often one copy is taken, and another member cut off, where that is possible: what few seeds have by chance."""
TAKEN_ANEW = 0.2
"""How often copies of a set are replaced by newer ones when there are some."""


class _DiskCopy(NamedTuple):
    """Of one replica's disk, at one moment."""

    wal_id: str
    end_offset: int
    platters: Platters


class _OlderPlan(NamedTuple):
    """What is done to one replica set."""

    row: ReplicationRecord
    copies: dict[int, _DiskCopy]
    """For these brokers, which start with them."""
    down: tuple[int, ...]
    """Brokers with the right disks, which are down meanwhile."""
    behind: int = -1
    """The other one, if what was confirmed last is to be missing there; else -1."""


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

    def mount(self, rng: random.Random, cut: Cut) -> Callable[[], None] | None:
        """Crash members of a set, and start some of them with the copies.

        `cut` cuts the network. Returns what ends all that, or None where the copies would be taken for good disks, and
        rightly so.
        """
        if self._cluster.level < EMPTY_COPY_LEVEL:
            return None
        plans = [plan for row in self._several() for plan in (self._all_but_master(row), self._some(row, rng)) if plan]
        if not plans:
            return None
        rare = [plan for plan in plans if plan.behind != -1]
        plan = rng.choice(rare if rare and rng.random() < PREFERRED else plans)
        return self._carry_out(plan) if plan.behind == -1 else self._carry_out_later(plan, rng.uniform(*BEHIND_S), cut)

    def _carry_out(self, plan: _OlderPlan) -> Callable[[], None]:
        set_id, nodes = plan.row.id, self._cluster.nodes
        record = self._cluster.watch.replica_set(set_id)
        assert record is not None
        for each in plan.down:
            nodes[each].crash(power=False)
        originals = {
            each: self._exchange(nodes[each], set_id, copy.platters.copy()) for each, copy in plan.copies.items()
        }
        self._copies.pop(set_id, None)

        def undo() -> None:
            if self._waits(plan, record):
                for each, platters in originals.items():
                    self._exchange(nodes[each], set_id, platters)
            for each in plan.down:
                nodes[each].recover()

        return undo

    def _carry_out_later(self, plan: _OlderPlan, seconds: float, cut: Cut) -> Callable[[], None]:
        """Cut one member off from the master before: what is confirmed meanwhile it has not."""
        record = self._cluster.watch.replica_set(plan.row.id)
        assert record is not None
        master, behind = (self._cluster.nodes[each].host for each in (record.master, plan.behind))
        heal = cut([(master, behind), (behind, master)])
        undos = [heal]

        def carry_out() -> None:
            if heal not in undos:
                return  # the fault is over
            if self._holds(plan):
                undos.append(self._carry_out(plan._replace(row=self._cluster.watch.replicas.rows[plan.row.id])))
            undos.remove(heal)
            heal()

        def undo() -> None:
            while undos:
                undos.pop()()

        self._cluster.later(seconds, carry_out)
        return undo

    def _holds(self, plan: _OlderPlan) -> bool:
        """Whether a plan can still be carried out."""
        row, record = self._cluster.watch.replicas.rows.get(plan.row.id), self._cluster.watch.replica_set(plan.row.id)
        if row is None or record is None or not _is_settled(row):
            return False
        known = {each.broker_id: each for each in row.in_sync}
        if known.keys() - plan.copies.keys() - {plan.behind} != {*plan.down}:
            return False
        return all(_is_older(copy, known.get(each)) for each, copy in plan.copies.items()) and all(
            self._has_its_disk(row, each) for each in known if each not in plan.copies
        )

    def _waits(self, plan: _OlderPlan, before: ReplicaSetRecord) -> bool:
        """Whether nobody has confirmed anything since: else the set goes on with what it has."""
        record = self._cluster.watch.replica_set(plan.row.id)
        row = self._cluster.watch.replicas.rows.get(plan.row.id)
        if record is None or row is None:
            return True
        if row.last_election != plan.row.last_election:
            return False
        is_over = record.master == -1 or before.master in {*plan.down, *plan.copies}
        return is_over and record.master in (-1, before.master)

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

    def _all_but_master(self, row: ReplicationRecord) -> _OlderPlan | None:
        """Copies for all members in sync but the master; None if they are missing, or prove nothing."""
        record, copies = self._cluster.watch.replica_set(row.id), self._copies.get(row.id, {})
        if record is None or not _is_settled(row) or not self._has_its_disk(row, record.master):
            return None
        found = {}
        for each in row.in_sync:
            if each.broker_id == record.master:
                continue
            copy, known_end = copies.get(each.broker_id), max(record.committed_wal_offset, each.known_end)
            if copy is None or copy.wal_id != each.wal_id or copy.end_offset >= known_end:
                return None
            found[each.broker_id] = copy
        return _OlderPlan(row, found, (record.master,))

    def _some(self, row: ReplicationRecord, rng: random.Random) -> _OlderPlan | None:
        """Copies for some members in sync, of which each is known to have more; the others have the right disks."""
        record, copies = self._cluster.watch.replica_set(row.id), self._copies.get(row.id, {})
        if record is None or not _is_settled(row):
            return None
        usable = [each.broker_id for each in row.in_sync if _is_older(copies.get(each.broker_id), each)]
        several = rng.randint(1, max(len(usable), 1))
        chosen = rng.sample(usable, min(1 if rng.random() < PREFERRED else several, len(usable)))
        others = [each.broker_id for each in row.in_sync if each.broker_id not in chosen]
        if not chosen or not all(self._has_its_disk(row, each) for each in others):
            return None
        spare = [each for each in others if each != record.master]
        behind = rng.choice(spare) if spare and rng.random() < PREFERRED else -1
        down = rng.sample(others, rng.randint(0, len(others)))
        if behind != -1:
            down = [each for each in others if each != behind]
        return _OlderPlan(row, {each: copies[each] for each in sorted(chosen)}, tuple(sorted(down)), behind)

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


def _is_settled(row: ReplicationRecord) -> bool:
    """Whether no election is under way, and nothing was given up in the last one."""
    return row.election is None and (row.last_election is None or not row.last_election.accepted_loss)


def _is_older(copy: _DiskCopy | None, known: InSyncRecord | None) -> bool:
    """Whether a copy is of the WAL that counts, and ends before what is known of it."""
    if copy is None or known is None:
        return False
    return copy.wal_id == known.wal_id and copy.end_offset < known.known_end

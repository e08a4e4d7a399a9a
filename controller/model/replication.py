"""Rows of table `replication`: a replica set whose WAL several brokers keep (docs/design/0015-hot-tier.md).

`ReplicaSetRecord` has the brokers' ids, the master and the epochs, which everybody needs. This row has what only the
members and an election need: which WAL each broker has, the write quorum, the policy, and an election under way with
its promises. It is a row of its own, so that commits do not carry it, and it exists from feature level 2 on, for
replica sets that an operator or a master gave one.

Invariants: `members` and `learners` are the brokers of `replicas`, `sync_state_set` those of `in_sync`, once the row
names any; every broker of `replicas`, and of `leaving`, is in `assigned`; the learners
among `replicas` are in `learning`, which is part of `assigned`; so are the brokers of `priorities`. `newcomer` and
`replaced` are both in `assigned` and not in `leaving`, or neither is set.

Entry: `ReplicationRecord`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tidelog.controller.model.levels import EMPTY_COPY_LEVEL, SET_BACK_LEVEL
from tidelog.controller.model.records import NO_BROKER, ReplicaSetRecord
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica
from tidelog.storage.replication.policy import ReplicationPolicy


class PolicyRecord(msgspec.Struct, frozen=True, array_like=True):
    """A `tidelog.storage.replication.policy.ReplicationPolicy`, as it is stored and sent; its fields, in its order."""

    total_replicas: int = 1
    in_sync_replicas: int = 1
    min_in_sync_replicas: int = 1
    enable_auto_in_sync_replicas: bool = False
    all_ack_in_sync_state_set: bool = False
    max_gap_bytes: int = 256 << 10
    slave_timeout_s: float = 3.0
    max_behind_s: float = 15.0

    def checked(self) -> ReplicationPolicy:
        """Return the policy. Raises `InvalidInput` for values that contradict each other."""
        return ReplicationPolicy(**msgspec.structs.asdict(self)).check()


class ReplicaRecord(msgspec.Struct, frozen=True, array_like=True):
    """One replica of the set: a broker, and the WAL with which it joined last."""

    broker_id: int
    wal_id: str
    is_learner: bool = False
    priority: int = 0
    """As the broker is configured; what counts is `ReplicationRecord.priority_of`."""


class InSyncRecord(msgspec.Struct, frozen=True, array_like=True):
    """One member of the SyncStateSet, and what is known of its WAL.

    A disk that is known to end later than it says in a promise was lost, swapped or rolled back.
    """

    broker_id: int
    wal_id: str
    """The WAL with which it entered the SyncStateSet. The broker may have another one by now."""
    end_offset: int = -1
    """WAL offset that it has told, or a master of it, since the present mastership began; -1: not known."""
    confirm_offset: int = -1
    """WAL offset up to which it has bytes that are confirmed: these are never truncated; -1: not known."""

    @property
    def replica(self) -> WalReplica:
        """Return the copy of the WAL."""
        return WalReplica(self.broker_id, self.wal_id)

    @property
    def known_end(self) -> int:
        """Return the WAL offset before which its WAL does not end, unless it lost something."""
        return max(self.end_offset, self.confirm_offset)


class PromiseRecord(msgspec.Struct, frozen=True, array_like=True):
    """A replica's durable promise for the epoch of the election under way."""

    broker_id: int
    registration_epoch: int
    """It counts only while this is the current one."""
    wal_id: str
    last_epoch: int
    end_offset: int
    confirm_offset: int

    @property
    def replica(self) -> WalReplica:
        """Return the copy of the WAL."""
        return WalReplica(self.broker_id, self.wal_id)


class ElectionRecord(msgspec.Struct, frozen=True, array_like=True):
    """An election under way, for the replica set's present master epoch."""

    reason: str
    began_ms: int
    """Wall clock, for operators."""
    designated: int = NO_BROKER
    """The broker that an operator wants elected, or -1."""
    last_master: int = NO_BROKER
    """Or -1."""
    is_patient: bool = True
    """Whether the promises of the last master and of the designated broker are awaited while these are alive."""
    promises: tuple[PromiseRecord, ...] = ()
    """By broker id."""
    set_back: bool = False
    """Whether a disk was seen to be an older copy: see `voting`. Set from `EMPTY_COPY_LEVEL` on."""
    refused: tuple[int, ...] = ()
    """Brokers of the SyncStateSet, sorted, whose promises were refused because their disks are older copies, and that
    have given no other one since. Set from `EMPTY_COPY_LEVEL` on."""


class PastElectionRecord(msgspec.Struct, frozen=True, array_like=True):
    """The election that ended last, for operators. Nothing is decided by it."""

    master_epoch: int
    """The epoch in which it elected."""
    master: int
    """Who was elected."""
    reason: str
    """Why the epoch before it ended."""
    began_ms: int
    elected_ms: int
    """Wall clock."""
    last_master: int = NO_BROKER
    """The master of the term before, or -1."""
    designated: int = NO_BROKER
    """Whom somebody wanted elected, or -1."""
    accepted_loss: bool = False
    """Whether an operator elected a replica that may lack confirmed records."""


class ReplicationRecord(msgspec.Struct, frozen=True, array_like=True):
    """Table `replication`, key: id of the replica set."""

    id: int
    policy: PolicyRecord = PolicyRecord()
    quorum: int = 1
    """The write quorum."""
    replicas: tuple[ReplicaRecord, ...] = ()
    """By broker id. Empty: the policy was set, and the master has not told its WAL."""
    in_sync: tuple[InSyncRecord, ...] = ()
    """The SyncStateSet, by broker id."""
    election: ElectionRecord | None = None
    assigned: tuple[int, ...] = ()
    """The brokers that shall have a replica, sorted. One that is here joins by itself; one that is no longer here, and
    has no replica any more, deletes its copy."""
    leaving: tuple[int, ...] = ()
    """Those of `assigned`, sorted, that the master shall do without: it asks for a SyncStateSet without them as soon as
    the policy allows it, and never for one with them."""
    last_election: PastElectionRecord | None = None
    """None: the set has had one member, whose broker is elected when it starts, or none has ended yet."""
    learning: tuple[int, ...] = ()
    """Those of `assigned`, sorted, whose replicas are learners, or will be when they join."""
    priorities: tuple[tuple[int, int], ...] = ()
    """Brokers of `assigned`, sorted, each with the priority that an operator has set for it in this set."""
    newcomer: int = NO_BROKER
    """The member beyond the policy that the active controller has added in place of another one, or -1."""
    replaced: int = NO_BROKER
    """The member that is to leave when the newcomer is in sync, or -1."""

    def priority_of(self, broker_id: int) -> int:
        """Return a broker's election priority: an operator's, else what it is configured with, else 0.

        Among candidates that are equally far the larger one is elected.
        """
        joined = self.replica(broker_id)
        return dict(self.priorities).get(broker_id, joined.priority if joined is not None else 0)

    def replica(self, broker_id: int) -> ReplicaRecord | None:
        """Return a broker's replica."""
        return next((each for each in self.replicas if each.broker_id == broker_id), None)

    def configuration(self, number: int) -> SetConfiguration:
        """Return the SyncStateSet and its quorum; `number` is the SyncStateSet epoch."""
        return SetConfiguration(number, frozenset(each.replica for each in self.in_sync), self.quorum)


def replica_count(record: ReplicaSetRecord, row: ReplicationRecord | None, brokers: int) -> int:
    """Return how many replicas a set has, or gets: what its policy wants of `brokers`, all that are registered."""
    wanted = row.policy.total_replicas if row is not None else 1
    return max(len(record.members), min(wanted, brokers))


def replicas_without(record: ReplicaSetRecord, row: ReplicationRecord, broker_id: int) -> set[int]:
    """Return the brokers whose replicas count, or will, when that of `broker_id` is gone."""
    return {*row.assigned, *record.members} - {broker_id, *row.leaving, *row.learning}


def best_of(promises: Iterable[PromiseRecord]) -> PromiseRecord:
    """Return the promise whose WAL has all that any other of them has. Raises `ValueError` if there is none."""
    return max(promises, key=lambda each: (each.last_epoch, each.end_offset))


def known_confirmed(members: Iterable[InSyncRecord], promises: Iterable[PromiseRecord]) -> int:
    """Return the WAL offset up to which members of a SyncStateSet know bytes to be confirmed; -1: not known.

    A replica outside of it may know more: what an operator has given up since.
    """
    rows = list(members)
    replicas = {each.replica for each in rows}
    told = [each.confirm_offset for each in promises if each.replica in replicas]
    return max([-1, *(each.confirm_offset for each in rows), *told])


def voting(
    level: int, record: ReplicaSetRecord, row: ReplicationRecord, promises: Iterable[PromiseRecord]
) -> list[PromiseRecord]:
    """Return which of the promises count in the election under way.

    Once a disk was seen to be an older copy, a promise that ends before what is in the bucket may be one with a copy,
    and it stands until its broker registers anew, while the right disks come back one by one. Of these a quorum is
    needed, or the one of the last master, which has every confirmed byte by itself.
    """
    given = list(promises)
    if row.election is None or not row.election.set_back:
        return given
    good = [each for each in given if not was_set_back(level, record, row, each)]
    members = {each.replica for each in row.in_sync}
    has_all = any(each.broker_id == row.election.last_master and each.replica in members for each in good)
    return given if has_all else good


def was_set_back(level: int, record: ReplicaSetRecord, row: ReplicationRecord, best: PromiseRecord) -> bool:
    """Return whether the best of a quorum's promises ends before what is in the bucket: disks were rolled back.

    What is in the bucket was confirmed, so one of the promises had all of it, and may have confirmed more. A WAL that
    was begun behind it and has received nothing may be found empty by a start, and ends at 0 then. One that was elected
    with an accepted loss begins there in its term.
    """
    if level < SET_BACK_LEVEL:
        return False
    last = row.last_election
    if last is not None and last.accepted_loss and best.last_epoch < last.master_epoch:
        return False
    received = best.last_epoch >= 0 or (level >= EMPTY_COPY_LEVEL and best.end_offset > 0)
    return received and best.end_offset < record.committed_wal_offset


def has_several(record: ReplicaSetRecord) -> bool:
    """Return whether a replica set has more than one replica: masters are then elected by promises."""
    return len(record.members) + len(record.learners) > 1

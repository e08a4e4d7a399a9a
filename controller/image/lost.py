"""Replica sets of dead brokers, as every copy of the metadata shows them, and the state of their takeovers.

A replica set is *lost* when it has partitions and no live master. If its WAL is in the bucket, another broker takes
over (docs/design/0007-failover.md); if its WAL is on the dead broker's disk or in its memory, only that broker can
continue.

Entry: `lost_replica_sets`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from tidelog.controller.image.image import Image
from tidelog.controller.image.leading import takers
from tidelog.controller.model.records import BUCKET_WAL, NO_BROKER, ReplicaSetRecord
from tidelog.controller.model.replication import best_of, has_several, known_confirmed, voting, was_set_back


class TakeoverState(Enum):
    """State of a lost replica set."""

    DUE = "due"
    """It needs a successor."""
    RECOVERING = "recovering"
    """A live successor recovers it."""
    ELECTING = "electing"
    """It has several members, and one of them is elected."""
    WAITING = "waiting"
    """Only its broker can continue: the WAL is not in the bucket, or the broker is coming back."""


class SetBack(NamedTuple):
    """Members whose disks are older copies, so that nobody is elected (`was_set_back`)."""

    brokers: tuple[int, ...]
    """They have promised, by id."""
    end: int
    """WAL offset where the best of their WALs ends."""
    uploaded: int
    """WAL offset up to which records are in the bucket."""
    enough: int
    """The last master, if its disk elects by itself; else -1."""

    def sentence(self, replica_set: int) -> str:
        """Return what is wrong, and the ways out."""
        where = ", ".join(map(str, self.brokers))
        enough = f" (that of broker {self.enough} is enough)" if self.enough != NO_BROKER else ""
        return (
            f"disks were rolled back: the WALs on brokers {where} end at {self.end}, and the bucket has offsets up to"
            f" {self.uploaded}. Put back the disks that the brokers had last{enough}, or give up what only they had by"
            f" `tidelog replica-set elect {replica_set} --broker B --accept-loss`"
        )


class LacksConfirmed(NamedTuple):
    """Promises that would be enough, and that lack what a member knows to be confirmed: they elect nobody."""

    brokers: tuple[int, ...]
    """Who has promised, by id."""
    end: int
    """WAL offset where the best of their WALs ends."""
    confirmed: int
    """WAL offset up to which records are known to be confirmed."""
    silent: tuple[int, ...]
    """The members that have not promised, by id."""

    def sentence(self, replica_set: int) -> str:
        """Return what is wrong, and the ways out."""
        where = ", ".join(map(str, self.brokers))
        those = f"that of {', '.join(map(str, self.silent))}" if self.silent else "one that they had last"
        return (
            f"records are missing: the WALs on brokers {where} end at {self.end}, and offsets up to {self.confirmed}"
            f" were confirmed. It needs another WAL, {those}; or give up what only it had by"
            f" `tidelog replica-set elect {replica_set} --broker B --accept-loss`"
        )


class LostReplicaSet(NamedTuple):
    """A replica set without a live master, and its state."""

    replica_set: int
    broker: int
    """The last master, which has the WAL unless that is in the bucket."""
    wal_kind: str
    master_epoch: int
    partitions: int
    state: TakeoverState
    successor: int
    since_ms: int
    """When the takeover began; 0 if none has."""
    missing: int = 0
    """Promises that the election under way still needs; 0 where disks were rolled back."""
    silent: tuple[int, ...] = ()
    """The members that could give them, by id: down, or back with another WAL or an older copy of it."""
    short: SetBack | LacksConfirmed | None = None
    """Why promises that would be enough elect nobody."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for operators."""
        return {
            "broker": self.broker,
            "wal": self.wal_kind or None,
            "partitions": self.partitions,
            "state": self.state.value,
            "by": self.successor if self.successor != NO_BROKER else None,
            "since_ms": self.since_ms or None,
        }

    def sentence(self) -> str:
        """Return the same as a sentence."""
        if self.state is TakeoverState.ELECTING:
            return self._electing()
        what = f"broker {self.broker} is dead: its {self.partitions} partitions"
        if self.state is TakeoverState.RECOVERING:
            return f"{what} are recovered from the bucket by broker {self.successor}"
        if self.state is TakeoverState.DUE:
            return f"{what} wait for a broker that recovers them from the bucket"
        if self.wal_kind == BUCKET_WAL:
            return f"{what} wait for it to return"
        return f"{what} wait for it to come back (wal.kind is {self.wal_kind or 'unknown'}, not s3)"

    def _electing(self) -> str:
        """Who is missing need not be the last master: a broker may be back without its WAL."""
        what = f"replica set {self.replica_set} has no master: its {self.partitions} partitions wait for an election"
        if self.short is not None:
            return f"{what}, and {self.short.sentence(self.replica_set)}"
        if not self.missing:
            return what
        those = ", ".join(map(str, self.silent))
        return f"{what}, which needs {self.missing} more of the WALs on brokers {those}"


def lost_replica_sets(image: Image) -> list[LostReplicaSet]:
    """Return all lost replica sets, by id."""
    found = []
    for record in sorted(image.replica_sets.values(), key=lambda each: each.id):
        partitions = image.index.partition_counts.get(record.id, 0)
        if partitions > 0 and image.master_of(record.id) is None:
            broker = record.master if record.master != NO_BROKER else record.id
            row = image.brokers.get(broker)
            kind = row.wal_kind if row is not None else ""
            state = _state(image, record, broker, kind)
            found.append(
                LostReplicaSet(
                    record.id,
                    broker,
                    kind,
                    record.master_epoch,
                    partitions,
                    state,
                    record.successor,
                    record.takeover_since_ms,
                    *_missing(image, record),
                )
            )
    return found


def _state(image: Image, record: ReplicaSetRecord, broker: int, kind: str) -> TakeoverState:
    if has_several(record):
        return TakeoverState.ELECTING
    if record.successor != NO_BROKER and _is_alive(image, record.successor):
        return TakeoverState.RECOVERING
    if kind != BUCKET_WAL or _is_alive(image, broker):
        return TakeoverState.WAITING
    return TakeoverState.DUE


def _missing(image: Image, record: ReplicaSetRecord) -> tuple[int, tuple[int, ...], SetBack | LacksConfirmed | None]:
    """Return the fields of `LostReplicaSet` that tell what an election under way still needs."""
    row, election = image.replication.get(record.id), image.election(record.id)
    if row is None or election is None:
        return 0, (), None
    configuration = row.configuration(record.sync_state_set_epoch)
    counted = {each.replica: each for each in election.promises if each.replica in configuration.members}
    silent = tuple(sorted(each.broker_id for each in configuration.members - counted.keys()))
    missing = configuration.promises_needed - len(counted)
    if missing > 0:
        return missing, silent, None
    old = [each for each in counted.values() if was_set_back(image.level, record, row, each)]
    votes = voting(image.level, record, row, counted.values())
    if len(votes) >= configuration.promises_needed and best_of(votes) not in old:
        end, confirmed = best_of(votes).end_offset, known_confirmed(row.in_sync, counted.values())
        if confirmed <= max(end, record.committed_wal_offset):
            return 0, silent, None
        return 0, silent, LacksConfirmed(tuple(sorted(each.broker_id for each in votes)), end, confirmed, silent)
    members = {each.broker_id for each in configuration.members}
    enough = election.last_master if election.set_back and election.last_master in members else NO_BROKER
    end = max(each.end_offset for each in old)
    brokers = tuple(sorted(each.broker_id for each in old))
    return 0, silent, SetBack(brokers, end, record.committed_wal_offset, enough)


def _is_alive(image: Image, broker_id: int) -> bool:
    row = image.brokers.get(broker_id)
    return row is not None and row.alive


def next_successor(image: Image, lost: LostReplicaSet) -> int | None:
    """Return the live master with the fewest takeovers, after the last one that tried; None if there is none.

    A draining broker is not chosen. If all brokers drain, nothing can be placed, and the cluster may be about to stop.
    """
    busy: dict[int, int] = {}
    for record in image.replica_sets.values():
        busy[record.successor] = busy.get(record.successor, 0) + 1
    after = lost.successor if lost.successor != NO_BROKER else lost.broker
    own = (each for each, master in takers(image).items() if master.id == each)  # it takes partitions into its home set
    able = [each for each in own if each not in (lost.broker, lost.successor)]
    return min(able, key=lambda each: (busy.get(each, 0), each <= after, each), default=None)

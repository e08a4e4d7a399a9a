"""`confirmed-alone`: what a WAL had acknowledged that is not mounted any more is not missed; what nobody had, is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tidelog.controller.model.replication import InSyncRecord, PolicyRecord, ReplicaRecord, ReplicationRecord
from tidelog.simulation.world.replica_watch import ReplicaWatch
from tidelog.storage.wal.epochs import EpochEntry, EpochHistory

SET, MASTER, FOLLOWER, EPOCH = 2, 2, 3, 1


def wal(durable_offset: int) -> Any:
    """A replica that ends there, all of it in one epoch."""
    history = EpochHistory([EpochEntry(EPOCH, 0)]) if durable_offset else EpochHistory([])
    return SimpleNamespace(durable_offset=durable_offset, epoch_history=history)


def watch(messages: list[str]) -> ReplicaWatch:
    """Of a set of two, both in sync and needed."""
    watching = ReplicaWatch(lambda rule, message: messages.append(f"{rule}: {message}"))
    row = ReplicationRecord(
        id=SET,
        policy=PolicyRecord(2, 2, 2),
        quorum=2,
        replicas=tuple(ReplicaRecord(each, f"wal-{each}") for each in (MASTER, FOLLOWER)),
        in_sync=tuple(InSyncRecord(each, f"wal-{each}", 0, 0) for each in (MASTER, FOLLOWER)),
    )
    watching.take(row, EPOCH)
    watching.opened(SET, MASTER, wal(600), lambda wal_id: wal_id == f"wal-{MASTER}")
    watching.opened(SET, FOLLOWER, wal(600), lambda wal_id: wal_id == f"wal-{FOLLOWER}")
    return watching


def test_a_member_that_lacks_it_is_missed() -> None:
    messages: list[str] = []
    watching = watch(messages)
    watching.confirms(SET, MASTER, EPOCH, 600)
    assert messages == []
    watching.opened(SET, FOLLOWER, wal(500), lambda wal_id: wal_id == f"wal-{FOLLOWER}")
    watching.confirms(SET, MASTER, EPOCH, 600)
    (message,) = messages
    assert message.startswith(
        "confirmed-alone: broker 2 confirms 600 of replica set 2 in epoch 1: [2] of [2, 3] hold it"
    )


def test_a_wal_that_begins_anew_by_itself_is_missed() -> None:
    messages: list[str] = []
    watching = watch(messages)
    watching.opened(SET, FOLLOWER, wal(0), lambda wal_id: wal_id == "wal-new")
    watching.confirms(SET, MASTER, EPOCH, 600)
    assert len(messages) == 1


def test_what_a_lost_directory_had_acknowledged_is_not_missed() -> None:
    """Its acknowledgement may have come before the loss, and the confirmation waits for something else."""
    messages: list[str] = []
    watching = watch(messages)
    watching.exchanged(SET, FOLLOWER)
    watching.confirms(SET, MASTER, EPOCH, 600)
    watching.opened(SET, FOLLOWER, wal(0), lambda wal_id: wal_id == "wal-new")
    watching.confirms(SET, MASTER, EPOCH, 600)
    assert messages == []

"""What dead brokers left behind, as every copy of the metadata shows it: who salvages it, or what it waits for.

A replica set is *lost* when it has partitions and no living master. With its WAL in the bucket another broker salvages
it (docs/design/0007-failover.md); with a WAL on the dead broker's disk or in its memory only that broker can go on.

Entry: `lost_replica_sets`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from controller.image import Image
from controller.model import NO_BROKER, ReplicaSetRecord

BUCKET_WAL = "s3"
"""The kind of WAL that any broker can take over."""


class Salvaging(Enum):
    """What becomes of a lost replica set."""

    DUE = "due"
    """It needs a salvager."""
    RECOVERING = "recovering"
    """A living salvager is at it."""
    WAITING = "waiting"
    """Only its broker can go on with it: the WAL is not in the bucket, or the broker is just coming back."""


class LostReplicaSet(NamedTuple):
    """A replica set without a living master, and what becomes of it."""

    replica_set: int
    broker: int
    """Who was its master, and has its WAL if that is not in the bucket."""
    wal_kind: str
    master_epoch: int
    partitions: int
    state: Salvaging
    salvager: int
    since_ms: int
    """When the salvage began; 0 if none has."""

    def as_dict(self) -> dict[str, Any]:
        """For operators."""
        return {
            "broker": self.broker,
            "wal": self.wal_kind or None,
            "partitions": self.partitions,
            "state": self.state.value,
            "by": self.salvager if self.salvager != NO_BROKER else None,
            "since_ms": self.since_ms or None,
        }

    def sentence(self) -> str:
        """The same for a person."""
        what = f"broker {self.broker} is dead: its {self.partitions} partitions"
        if self.state is Salvaging.RECOVERING:
            return f"{what} are recovered from the bucket by broker {self.salvager}"
        if self.state is Salvaging.DUE:
            return f"{what} wait for a broker that recovers them from the bucket"
        if self.wal_kind == BUCKET_WAL:
            return f"{what} wait for it; it is coming back"
        return f"{what} wait for it to come back (wal.kind is {self.wal_kind or 'unknown'}, not s3)"


def lost_replica_sets(image: Image) -> list[LostReplicaSet]:
    """All of them, by id."""
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
                    record.salvager,
                    record.salvage_since_ms,
                )
            )
    return found


def _state(image: Image, record: ReplicaSetRecord, broker: int, kind: str) -> Salvaging:
    if record.salvager != NO_BROKER and _is_alive(image, record.salvager):
        return Salvaging.RECOVERING
    if kind != BUCKET_WAL or _is_alive(image, broker):
        return Salvaging.WAITING
    return Salvaging.DUE


def _is_alive(image: Image, broker_id: int) -> bool:
    row = image.brokers.get(broker_id)
    return row is not None and row.alive


def next_salvager(image: Image, lost: LostReplicaSet) -> int | None:
    """Who shall salvage it: the living master that salvages least, after the last one that tried; None if none is.

    Not one that is draining: where all are, nothing can be placed, and the cluster is perhaps about to stop.
    """
    busy: dict[int, int] = {}
    for record in image.replica_sets.values():
        busy[record.salvager] = busy.get(record.salvager, 0) + 1
    after = lost.salvager if lost.salvager != NO_BROKER else lost.broker
    masters = ((each, image.master_of(each)) for each in image.replica_sets if each not in (lost.broker, lost.salvager))
    able = [each for each, master in masters if master is not None and not master.draining]
    return min(able, key=lambda each: (busy.get(each, 0), each <= after, each), default=None)

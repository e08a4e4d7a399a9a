"""Commands of a failover without a hot tier (docs/design/0007-failover.md): elect a successor, place the partitions.

`abandon` places the partitions of a permanently lost broker without a takeover. Only an operator decides this.

Invariants: a successor's term is an ordinary master epoch, and only one of master and successor is set; streams of a
dead owner are closed here only after everything in its WAL is committed. That is done under the successor's epoch,
which fences every commit and append of the dead owner (rules 3 and 4). Repeated and late commands are refused by the
epoch.
"""

from __future__ import annotations

import msgspec

from tidelog.controller.machine.moves import change_owner, live_replica_set, streams_of
from tidelog.controller.machine.placement import place_again
from tidelog.controller.machine.streams import require_master_epoch
from tidelog.controller.machine.tables import Tables
from tidelog.controller.machine.wal_notes import record_loss
from tidelog.controller.model.commands import MAX_MOVES_PER_COMMAND, Abandon, ElectSuccessor, PlaceTakenOver
from tidelog.controller.model.errors import NotEligible, NotHandedOver
from tidelog.controller.model.records import (
    BUCKET_WAL,
    NO_BROKER,
    NO_REPLICA_SET,
    PartitionRecord,
    ReplicaSetRecord,
    StreamState,
)
from tidelog.controller.model.replication import has_several
from tidelog.runtime.errors import Fenced, InvalidInput


def elect_successor(tables: Tables, command: ElectSuccessor) -> ReplicaSetRecord:
    """See `Takeover`. Raises `NotFound`, `Fenced`, `NotEligible`."""
    record = require_master_epoch(tables, command.replica_set_id, command.master_epoch)
    _require_one_member(record)
    owner = tables.brokers.get(record.master if record.master != NO_BROKER else record.id)
    if owner is None or owner.wal_kind != BUCKET_WAL:
        kind = owner.wal_kind if owner is not None else ""
        raise NotEligible(f"the WAL of replica set {record.id} is not in the bucket (wal.kind is {kind or 'unknown'})")
    if record.master != NO_BROKER and owner.alive:
        raise NotEligible(f"broker {owner.id}, the master of replica set {record.id}, is alive")
    successor = tables.brokers.get(command.broker_id)
    if successor is None or not successor.alive or successor.id == owner.id:
        raise NotEligible(f"broker {command.broker_id} is not alive, or is the lost master")
    elected = msgspec.structs.replace(
        record,
        master=NO_BROKER,
        master_epoch=record.master_epoch + 1,
        sync_state_set_epoch=record.sync_state_set_epoch + 1,
        successor=successor.id,
        takeover_since_ms=record.takeover_since_ms or tables.now_ms,
    )
    tables.replica_sets.put(record.id, elected)
    return elected


def place_taken_over(tables: Tables, command: PlaceTakenOver) -> int:
    """See `PlaceTakenOver`.

    Raises `NotFound`, `Fenced`, `NotHandedOver`, `InvalidInput`, `InvalidReplicationFactor`.
    """
    _check_count(command.partitions)
    record = require_master_epoch(tables, command.replica_set_id, command.master_epoch)
    if record.successor == NO_BROKER:
        raise Fenced(f"the takeover of replica set {record.id} is over")
    if record.committed_wal_offset < command.wal_offset:
        raise NotHandedOver(
            f"the WAL of replica set {record.id} ends at {command.wal_offset}, "
            f"but is committed up to {record.committed_wal_offset}"
        )
    mine = _owned(tables, command.partitions, record.id)
    for partition, target in zip(mine, place_again(tables, mine), strict=True):
        _place(tables, partition, target)
    left = tables.index.partition_counts.get(record.id, 0) - len(mine)
    assert left >= 0, (record, left)
    if left == 0:
        tables.replica_sets.put(record.id, msgspec.structs.replace(record, successor=NO_BROKER, takeover_since_ms=0))
    return left


def abandon(tables: Tables, command: Abandon) -> tuple[int, int]:
    """See `Abandon`. Raises `NotFound`, `Fenced`, `NotEligible`, `InvalidInput`, `InvalidReplicationFactor`."""
    _check_count(command.partitions)
    record = require_master_epoch(tables, command.replica_set_id, command.master_epoch)
    _require_one_member(record)
    owner = tables.brokers.get(record.master if record.master != NO_BROKER else record.id)
    if owner is not None and owner.alive:
        raise NotEligible(f"broker {owner.id} is alive: its WAL is not lost", hint="drain it instead")
    if owner is not None and owner.wal_kind == BUCKET_WAL and not command.force:
        raise NotEligible(
            f"the WAL of broker {owner.id} is in the bucket: other brokers recover all of it",
            hint="`tidelog status` shows their progress; --force abandons it nevertheless",
        )
    mine = _owned(tables, command.partitions, record.id)
    targets = place_again(tables, mine)
    if tables.level >= 1:
        record_loss(tables, record, mine, "an operator abandoned its dead broker")
    for partition, target in zip(mine, targets, strict=True):
        _place(tables, partition, target)
    fenced = msgspec.structs.replace(
        record,
        master=NO_BROKER,
        master_epoch=record.master_epoch + 1,
        sync_state_set_epoch=record.sync_state_set_epoch + 1,
        successor=NO_BROKER,
        takeover_since_ms=0,
    )
    tables.replica_sets.put(record.id, fenced)
    return tables.index.partition_counts.get(record.id, 0) - len(mine), fenced.master_epoch


def _require_one_member(record: ReplicaSetRecord) -> None:
    if has_several(record):
        raise NotEligible(
            f"replica set {record.id} has several members: another one goes on with its WAL",
            hint=f"`tidelog replica-set describe {record.id}` shows what its election waits for",
        )


def _check_count(partitions: tuple[tuple[bytes, int], ...]) -> None:
    if len(partitions) > MAX_MOVES_PER_COMMAND:
        raise InvalidInput(f"a command names at most {MAX_MOVES_PER_COMMAND} partitions, not {len(partitions)}")


def _owned(tables: Tables, keys: tuple[tuple[bytes, int], ...], replica_set_id: int) -> list[PartitionRecord]:
    found = [tables.partitions.get(key) for key in dict.fromkeys(keys)]
    return [each for each in found if each is not None and each.replica_set == replica_set_id]


def _place(tables: Tables, partition: PartitionRecord, replica_set_id: int) -> None:
    """Close the streams and make a live replica set the owner: the target of a move in progress if that is alive."""
    for stream in streams_of(tables, partition):
        if stream.state == StreamState.OPENED:
            assert stream.replica_set == partition.replica_set, (partition, stream)
            tables.streams.put(stream.id, msgspec.structs.replace(stream, state=StreamState.CLOSED))
    wanted = live_replica_set(tables, partition.target) if partition.target != NO_REPLICA_SET else None
    target = wanted or live_replica_set(tables, replica_set_id)
    assert target is not None, replica_set_id
    change_owner(tables, partition, target)

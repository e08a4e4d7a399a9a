"""Commands that move partitions between replica sets (docs/protocols.md, docs/design/0006-partition-moves.md).

A move is a committed `target` in the record of a partition, beside its owner `replica_set`. Ownership changes only in
`change_owner`, and only when all four streams are CLOSED and everything that the owner held is in the bucket. At that
point no process can append to them, and no data exists outside the bucket (rules 3 and 4). The leader epoch of the new
owner is larger than every epoch under which any of the streams was opened, so late requests are stale.

A partition is not moved to a replica set with fewer replicas than its topic was created with, while a set that takes
partitions has, or gets, as many.

The partitions of a command are independent: each is checked completely before any change to it is staged. A repeated
command is refused or changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from tidelog.controller.machine.streams import open_stream, require_master_epoch
from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.commands import (
    MAX_MOVES_PER_COMMAND,
    ClosedPartition,
    ElectPartitions,
    HandOver,
    MovePartitions,
    PartitionMove,
    ReclaimPartitions,
)
from tidelog.controller.model.errors import (
    ErrorInfo,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    NoReassignmentInProgress,
    NotHandedOver,
    TargetNotAlive,
    to_wire,
)
from tidelog.controller.model.records import (
    NO_REPLICA_SET,
    STREAMS_PER_PARTITION,
    DrainMode,
    PartitionRecord,
    ReplicaSetRecord,
    StreamRecord,
    StreamState,
)
from tidelog.controller.model.replication import replica_count
from tidelog.controller.model.topic_replicas import topic_replicas
from tidelog.runtime.errors import Fenced, InvalidInput, NotFound, TidelogError

Item = TypeVar("Item")


def _each(items: Sequence[Item], change: Callable[[Item], None]) -> list[ErrorInfo | None]:
    """Apply `change` to every item and return the refusal of each. Raises `InvalidInput` for too many items."""
    if not 0 < len(items) <= MAX_MOVES_PER_COMMAND:
        raise InvalidInput(f"a command names 1 to {MAX_MOVES_PER_COMMAND} partitions, not {len(items)}")
    found: list[ErrorInfo | None] = []
    for item in items:
        try:
            change(item)
        except TidelogError as error:
            found.append(to_wire(error))
        else:
            found.append(None)
    return found


def _partition(tables: Tables, topic_id: bytes, index: int) -> PartitionRecord:
    record = tables.partitions.get((topic_id, index))
    if record is None:
        raise NotFound(f"there is no partition {index} of topic {topic_id.hex()}")
    return record


def streams_of(tables: Tables, partition: PartitionRecord) -> list[StreamRecord]:
    """Return the partition's four streams, in order."""
    found = [tables.streams.get(partition.first_stream + step) for step in range(STREAMS_PER_PARTITION)]
    assert all(found), partition
    return [each for each in found if each is not None]


def live_replica_set(tables: Tables, replica_set_id: int) -> ReplicaSetRecord | None:
    """Return the replica set if its master is alive."""
    record = tables.replica_sets.get(replica_set_id)
    master = tables.brokers.get(record.master) if record is not None else None
    return record if master is not None and master.alive else None


def takes_partitions(tables: Tables, record: ReplicaSetRecord) -> bool:
    """Return whether a replica set may be given partitions: its master is alive and does not drain.

    Nor is its home broker drained by an operator, which empties the set, whoever leads it.
    """
    master, home = tables.brokers.get(record.master), tables.brokers.get(record.id)
    if home is not None and home.draining == DrainMode.OPERATOR:
        return False
    return master is not None and master.alive and not master.draining


def set_replicas(tables: Tables, replica_set_id: int) -> int:
    """Return how many replicas a set has, or gets; 0 for an unknown one."""
    record = tables.replica_sets.get(replica_set_id)
    if record is None:
        return 0
    return replica_count(record, tables.replication.get(replica_set_id), len(tables.brokers))


class NeededReplicas:
    """How many replicas a set must have to take a partition, while the sets and brokers are as they are now."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        open_sets = (each.id for each in tables.replica_sets.values() if takes_partitions(tables, each))
        self._largest = max((set_replicas(tables, each) for each in open_sets), default=0)

    def of(self, topic_id: bytes) -> int:
        """Return as many as the topic was created with, or as the largest set has that takes partitions."""
        return min(topic_replicas(self._tables.kv, topic_id), self._largest)


def _check_replicas(tables: Tables, topic_id: bytes, replica_set_id: int, needed: int) -> None:
    count, topic = set_replicas(tables, replica_set_id), tables.topics.get(topic_id)
    if topic is not None and count < needed:
        raise InvalidReplicationFactor(
            f"topic '{topic.name}' has replication factor {topic_replicas(tables.kv, topic_id)}; replica set"
            f" {replica_set_id} has {count}",
            hint=f"move it to a set with {needed}, as `tidelog replica-set list` shows; or `tidelog replica-set"
            f" set-policy {replica_set_id} --total-replicas {needed}` makes this one larger",
        )


def move_partitions(tables: Tables, command: MovePartitions) -> list[ErrorInfo | None]:
    """See `MovePartitions`.

    For a partition: `NotFound`, `InvalidReplicaAssignment`, `InvalidReplicationFactor`, `NoReassignmentInProgress`.
    """
    needed = NeededReplicas(tables)

    def move(wanted: PartitionMove) -> None:
        record = _partition(tables, wanted.topic_id, wanted.index)
        if wanted.replica_set == NO_REPLICA_SET:
            if record.target == NO_REPLICA_SET:
                raise NoReassignmentInProgress(f"partition {wanted.index} is not being moved")
        elif wanted.replica_set == record.target:
            return
        elif wanted.replica_set != record.replica_set:
            to = live_replica_set(tables, wanted.replica_set)
            if to is None:
                raise InvalidReplicaAssignment(f"replica set {wanted.replica_set} does not exist or has no live master")
            if not takes_partitions(tables, to):
                raise InvalidReplicaAssignment(f"broker {wanted.replica_set} is being drained and takes no partitions")
            _check_replicas(tables, record.topic_id, to.id, needed.of(record.topic_id))
        target = NO_REPLICA_SET if wanted.replica_set == record.replica_set else wanted.replica_set
        since_ms = 0 if target == NO_REPLICA_SET else tables.now_ms
        moved = msgspec.structs.replace(record, target=target, moving_since_ms=since_ms)
        tables.partitions.put((record.topic_id, record.index), moved)

    return _each(command.moves, move)


def hand_over(tables: Tables, command: HandOver) -> list[ErrorInfo | None]:
    """See `HandOver`. Raises `Fenced`, `NotFound`.

    For a partition: `NotFound`, `Fenced`, `NoReassignmentInProgress` (cancelled), `TargetNotAlive`, `NotHandedOver`.
    """
    require_master_epoch(tables, command.replica_set_id, command.master_epoch)

    def close(closed: ClosedPartition) -> None:
        record = _partition(tables, closed.topic_id, closed.index)
        if record.replica_set != command.replica_set_id:
            raise Fenced(f"the partition belongs to replica set {record.replica_set}")
        target = _target(tables, record)
        streams = streams_of(tables, record)
        for stream, end_offset in zip(streams, closed.end_offsets, strict=True):
            if (stream.replica_set, stream.epoch) != (command.replica_set_id, closed.epoch):
                raise Fenced(
                    f"stream {stream.id} has epoch {stream.epoch} at replica set {stream.replica_set}, "
                    f"not {closed.epoch} at {command.replica_set_id}"
                )
            if stream.end_offset != end_offset:
                raise NotHandedOver(
                    f"stream {stream.id} ends at {end_offset}, but is committed up to {stream.end_offset}"
                    + (f" (quarantined: {stream.quarantined})" if stream.quarantined else "")
                )
        meta_start = min(max(closed.meta_start, streams[0].start_offset), streams[0].end_offset)
        streams[0] = msgspec.structs.replace(streams[0], start_offset=meta_start)
        for stream in streams:
            tables.streams.put(stream.id, msgspec.structs.replace(stream, state=StreamState.CLOSED))
        epoch = change_owner(tables, record, target)
        if (closed.ready_replica_set, closed.ready_master_epoch) == (target.id, target.master_epoch):
            for stream in streams:
                open_stream(tables, stream.id, epoch, target.id)

    return _each(command.partitions, close)


def elect_partitions(tables: Tables, command: ElectPartitions) -> list[ErrorInfo | None]:
    """See `ElectPartitions`. For a partition: the errors of `hand_over` except `Fenced`."""

    def elect(key: tuple[bytes, int]) -> None:
        record = _partition(tables, *key)
        target = _target(tables, record)
        still_open = [each.id for each in streams_of(tables, record) if each.state == StreamState.OPENED]
        if still_open:
            raise NotHandedOver(f"streams {still_open} are still open by replica set {record.replica_set}")
        change_owner(tables, record, target)

    return _each(command.partitions, elect)


def reclaim_partitions(tables: Tables, command: ReclaimPartitions) -> list[ErrorInfo | None]:
    """See `ReclaimPartitions`. Raises `Fenced`, `NotFound`. For a partition: `NotFound`, `Fenced`."""
    require_master_epoch(tables, command.replica_set_id, command.master_epoch)

    def reclaim(key: tuple[bytes, int]) -> None:
        record = _partition(tables, *key)
        if record.replica_set != command.replica_set_id:
            raise Fenced(f"the partition belongs to replica set {record.replica_set}")
        tables.partitions.put(key, msgspec.structs.replace(record, epoch_base=record.epoch_base + 1))

    return _each(command.partitions, reclaim)


def _target(tables: Tables, record: PartitionRecord) -> ReplicaSetRecord:
    if record.target == NO_REPLICA_SET:
        raise NoReassignmentInProgress(f"partition {record.index} is not being moved")
    target = live_replica_set(tables, record.target)
    if target is None:
        raise TargetNotAlive(f"replica set {record.target} has no live master")
    return target


def change_owner(tables: Tables, record: PartitionRecord, target: ReplicaSetRecord) -> int:
    """Make the target the owner. All streams must be CLOSED. Returns the new leader epoch."""
    streams = streams_of(tables, record)
    assert all(each.state == StreamState.CLOSED for each in streams), record
    old = tables.replica_sets.get(record.replica_set)
    old_epoch = record.epoch_base + (old.master_epoch if old is not None else 0)
    epoch = max(old_epoch, *(each.epoch for each in streams)) + 1
    elected = msgspec.structs.replace(
        record,
        replica_set=target.id,
        epoch_base=epoch - target.master_epoch,
        target=NO_REPLICA_SET,
        moving_since_ms=0,
    )
    tables.partitions.put((record.topic_id, record.index), elected)
    return epoch

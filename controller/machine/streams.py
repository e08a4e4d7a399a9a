"""Commands about streams: open, close, trim (docs/rules.md, rule 4).

A stream has at most one open owner. An open requires the replica set's current master epoch, and a stream that is
CLOSED, or OPENED by the same replica set with an epoch that is not larger. Epochs and start offsets never decrease. A
repeated request succeeds.
"""

from __future__ import annotations

import msgspec

from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.commands import (
    MAX_STREAMS_PER_COMMAND,
    CloseStreams,
    OpenStreams,
    QuarantineStream,
    ReleaseStream,
    TrimStream,
)
from tidelog.controller.model.records import NO_REPLICA_SET, ReplicaSetRecord, StreamRecord, StreamState
from tidelog.runtime.errors import Fenced, InvalidInput, NotFound
from tidelog.stream.opened import OpenedStream

MAX_REASON_CHARS = 500
"""Characters kept of the reason of a quarantine."""


def require_master_epoch(tables: Tables, replica_set_id: int, master_epoch: int) -> ReplicaSetRecord:
    """Return the replica set if `master_epoch` is current. Raises `NotFound`, `Fenced`."""
    record = tables.replica_sets.get(replica_set_id)
    if record is None:
        raise NotFound(f"there is no replica set {replica_set_id}")
    if record.master_epoch != master_epoch:
        raise Fenced(
            f"master epoch {master_epoch} of replica set {replica_set_id} is stale; it is {record.master_epoch}"
        )
    return record


def _check_count(count: int) -> None:
    if not 0 < count <= MAX_STREAMS_PER_COMMAND:
        raise InvalidInput(f"a command names 1 to {MAX_STREAMS_PER_COMMAND} streams, not {count}")


def open_streams(tables: Tables, command: OpenStreams) -> list[OpenedStream]:
    """See `tidelog.stream.managers.StreamManager.open_streams`. Atomic."""
    _check_count(len(command.streams))
    require_master_epoch(tables, command.replica_set_id, command.master_epoch)
    return [open_stream(tables, stream_id, epoch, command.replica_set_id) for stream_id, epoch in command.streams]


def open_stream(tables: Tables, stream_id: int, epoch: int, replica_set_id: int) -> OpenedStream:
    """Open one stream for a replica set whose master epoch was checked. Raises `NotFound`, `Fenced`."""
    record = tables.streams.get(stream_id)
    if record is None:
        raise NotFound(f"there is no stream {stream_id}")
    key = tables.index.partition_key(stream_id)
    partition = tables.partitions.get(key) if key is not None else None
    if partition is None or partition.replica_set != replica_set_id:
        raise Fenced(f"stream {stream_id} is not placed on replica set {replica_set_id}")
    if epoch < max(record.epoch, 0):
        raise Fenced(f"epoch {epoch} of stream {stream_id} is stale; it is {record.epoch}")
    if record.state == StreamState.OPENED and record.replica_set != replica_set_id:
        raise Fenced(f"stream {stream_id} is open with epoch {record.epoch} by replica set {record.replica_set}")
    changes_owner = record.epoch < 0 or record.replica_set != replica_set_id
    opened = msgspec.structs.replace(
        record,
        epoch=epoch,
        state=StreamState.OPENED,
        replica_set=replica_set_id,
        owner_since_epoch=epoch if changes_owner else record.owner_since_epoch,
    )
    assert opened.epoch >= record.epoch
    tables.streams.put(stream_id, opened)
    return opened.as_opened()


def _require_epoch(record: StreamRecord, epoch: int) -> None:
    if record.epoch != epoch:
        raise Fenced(f"epoch {epoch} of stream {record.id} is stale; it is {record.epoch}")


def close_streams(tables: Tables, command: CloseStreams) -> None:
    """See `tidelog.stream.managers.StreamManager.close_streams`. Atomic; deleted streams count as closed."""
    _check_count(len(command.streams))
    require_master_epoch(tables, command.replica_set_id, command.master_epoch)
    for stream_id, epoch in command.streams:
        record = tables.streams.get(stream_id)
        if record is None:
            continue
        _require_epoch(record, epoch)
        if record.replica_set != command.replica_set_id:
            raise Fenced(f"stream {stream_id} belongs to replica set {record.replica_set}")
        tables.streams.put(stream_id, msgspec.structs.replace(record, state=StreamState.CLOSED))


def trim_stream(tables: Tables, command: TrimStream) -> None:
    """See `tidelog.stream.managers.StreamManager.trim_stream`.

    The start may pass the committed end: the records in between are still in the WAL, and are garbage once committed.
    """
    owner = command.replica_set_id if tables.level >= 1 else NO_REPLICA_SET
    if owner != NO_REPLICA_SET:
        require_master_epoch(tables, command.replica_set_id, command.master_epoch)
    record = tables.streams.get(command.stream_id)
    if record is None:
        raise NotFound(f"there is no stream {command.stream_id}")
    _require_epoch(record, command.epoch)
    if owner not in (NO_REPLICA_SET, record.replica_set):
        raise Fenced(f"stream {record.id} belongs to replica set {record.replica_set}")
    if command.start_offset > record.start_offset:
        tables.streams.put(record.id, msgspec.structs.replace(record, start_offset=command.start_offset))


def quarantine_stream(tables: Tables, command: QuarantineStream) -> None:
    """See `tidelog.storage.managers.ObjectManager.quarantine_stream`. The first reason is kept.

    Raises `NotFound`, `Fenced`.
    """
    require_master_epoch(tables, command.replica_set_id, command.master_epoch)
    record = tables.streams.get(command.stream_id)
    if record is not None and record.replica_set == command.replica_set_id and not record.quarantined:
        reason = command.reason[:MAX_REASON_CHARS] or "no reason was given"
        tables.streams.put(record.id, msgspec.structs.replace(record, quarantined=reason))


def release_stream(tables: Tables, command: ReleaseStream) -> None:
    """Release a quarantined stream. Raises `NotFound`.

    The partition begins a new leader epoch: its owner opens it again at the committed end.
    """
    record = tables.streams.get(command.stream_id)
    if record is None:
        raise NotFound(f"there is no stream {command.stream_id}")
    if not record.quarantined:
        return
    tables.streams.put(record.id, msgspec.structs.replace(record, quarantined="", released_at=record.end_offset))
    key = tables.index.partition_key(record.id)
    partition = tables.partitions.get(key) if key is not None else None
    if key is not None and partition is not None:
        tables.partitions.put(key, msgspec.structs.replace(partition, epoch_base=partition.epoch_base + 1))

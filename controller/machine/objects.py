"""Commands about objects: prepare, commit, expire, forget (docs/rules.md, rules 3, 5, 6).

States of an object id: PREPARED (allocated, no metadata names it) → COMMITTED (readers may find it) → DESTROYED (no
metadata names it) → removed (deleted from the bucket after the delay, when every reader has newer metadata).
Transitions are never reversed and ids never reused.

A commit is atomic. Its WAL range starts at the replica set's committed WAL offset; each stream range starts at the
stream's committed end; ranges of streams that no longer exist are left out. A gap refuses the commit and quarantines
the stream. A repeated commit succeeds.

A commit names every stream that was written to, so the work for each stream is kept to a few microseconds: the new rows
of the streams are staged together (`Tables.advance`), and no mutation carries them because they follow from the ranges
of the committed object (`tidelog.controller.image.image`).
"""

from __future__ import annotations

import msgspec

from tidelog.controller.machine.streams import require_master_epoch
from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.commands import (
    MAX_OBJECTS_PER_COMMAND,
    MAX_RANGES_PER_COMMIT,
    Commit,
    ExpireObjects,
    ForgetObjects,
    PrepareObjects,
)
from tidelog.controller.model.leases import held_version
from tidelog.controller.model.records import NO_RANGES, ObjectRecord, ObjectState, StreamRecord, StreamState
from tidelog.runtime.errors import Fenced, InvalidInput
from tidelog.storage.commits import (
    CommitGap,
    CommitObjects,
    CommitRefused,
    NewObject,
    NotPrepared,
    ObjectKind,
    pack_ranges,
    unpack_ranges,
)

MAX_TTL_MS = 24 * 3_600_000
_KINDS = frozenset(int(kind) for kind in ObjectKind)
_Ranges = list[tuple[int, int, int]]
"""Stream id, start and end offset."""


def prepare_objects(tables: Tables, command: PrepareObjects) -> int:
    """Allocate object ids. Raises `InvalidInput`."""
    if not 0 < command.count <= MAX_OBJECTS_PER_COMMAND or not 0 < command.ttl_ms <= MAX_TTL_MS:
        raise InvalidInput(
            f"prepare 1 to {MAX_OBJECTS_PER_COMMAND} ids for 1 to {MAX_TTL_MS} ms, "
            f"not {command.count} for {command.ttl_ms}"
        )
    first = tables.take_ids("object", command.count, 1)
    expires_ms = tables.time_ms + command.ttl_ms
    for object_id in range(first, first + command.count):
        tables.objects.put(
            object_id, ObjectRecord(object_id, ObjectState.PREPARED, 0, 0, NO_RANGES, tables.now_ms, expires_ms)
        )
    return first


def _check_shape(request: CommitObjects) -> list[_Ranges]:
    """Return the ranges of each object. Raises `InvalidInput`."""
    if len(request.objects) > MAX_OBJECTS_PER_COMMAND:
        raise InvalidInput(f"a commit has at most {MAX_OBJECTS_PER_COMMAND} objects, not {len(request.objects)}")
    ranges = [unpack_ranges(new.packed) for new in request.objects]
    if sum(map(len, ranges)) > MAX_RANGES_PER_COMMIT:
        raise InvalidInput(f"a commit has at most {MAX_RANGES_PER_COMMIT} stream ranges")
    if not 0 <= request.wal_start <= request.wal_end:
        raise InvalidInput(f"WAL range {request.wal_start}..{request.wal_end} is reversed")
    if len({new.object_id for new in request.objects}) != len(request.objects):
        raise InvalidInput("a commit names an object twice")
    for new, pieces in zip(request.objects, ranges, strict=True):
        if new.kind not in _KINDS or new.size < 0:
            raise InvalidInput(f"object {new.object_id} has kind {new.kind} and {new.size} bytes")
        for stream_id, start, end in pieces:
            if not 0 <= start < end:
                raise InvalidInput(
                    f"object {new.object_id}: range {start}..{end} of stream {stream_id} is empty or reversed"
                )
    return ranges


def _is_repeat(tables: Tables, request: CommitObjects, committed_wal_offset: int) -> bool:
    """Whether this commit has already been applied. Ids are never reused, so the states of the objects show it."""
    if not request.objects:
        return request.wal_end <= committed_wal_offset
    known = [tables.objects.get(new.object_id) for new in request.objects]
    return all(row is not None and row.state != ObjectState.PREPARED and row.kind != 0 for row in known)


def commit_objects(tables: Tables, command: Commit) -> None:
    """See `tidelog.storage.managers.ObjectManager.commit_objects`. Raises `CommitRefused`, `CommitGap`,
    `NotPrepared`, `InvalidInput`."""
    request = command.request
    ranges = _check_shape(request)
    try:
        replica_set = require_master_epoch(tables, request.replica_set_id, request.master_epoch)
    except Fenced as error:
        raise CommitRefused(error.message) from error
    if _is_repeat(tables, request, replica_set.committed_wal_offset):
        return
    if request.wal_start != replica_set.committed_wal_offset:
        raise CommitGap(
            f"the commit covers WAL {request.wal_start}..{request.wal_end} of replica set {replica_set.id}; "
            f"committed is {replica_set.committed_wal_offset}"
        )
    ends: dict[int, StreamRecord] = {}
    for new, pieces in zip(request.objects, ranges, strict=True):
        _commit_one(tables, new, pieces, replica_set.id, ends)
    tables.advance(ends)
    tables.replica_sets.put(replica_set.id, msgspec.structs.replace(replica_set, committed_wal_offset=request.wal_end))


def _commit_one(
    tables: Tables, new: NewObject, pieces: _Ranges, replica_set_id: int, ends: dict[int, StreamRecord]
) -> None:
    """Commit one object. `ends` holds the streams that earlier objects of this commit advanced, and is extended."""
    row = tables.objects.get(new.object_id)
    if row is None or row.state != ObjectState.PREPARED:
        kind = NotPrepared if tables.level >= 1 else CommitRefused  # older brokers know the latter, and would retry
        raise kind(f"object {new.object_id} is not prepared: it expired or was never prepared")
    kept = _move_ends(tables, new.object_id, pieces, replica_set_id, ends)
    now = tables.now_ms
    if kept:
        packed = new.packed.copy() if len(kept) == len(pieces) else pack_ranges(kept)
        record = ObjectRecord(new.object_id, ObjectState.COMMITTED, new.kind, new.size, packed, now, 0)
    else:
        expires_ms = tables.time_ms + tables.delete_delay_ms()
        record = ObjectRecord(
            new.object_id, ObjectState.DESTROYED, new.kind, new.size, NO_RANGES, now, expires_ms, _destroyed_at(tables)
        )
    tables.objects.put(new.object_id, record)


def _move_ends(
    tables: Tables, object_id: int, pieces: _Ranges, replica_set_id: int, ends: dict[int, StreamRecord]
) -> _Ranges:
    """Check the ranges of the streams that exist, return them, and add the new rows of the streams to `ends`."""
    rows = tables.streams.rows
    kept: _Ranges = []
    for piece in pieces:
        stream_id, start, end = piece
        stream = ends.get(stream_id) or rows.get(stream_id)
        if stream is None:
            continue
        if (
            stream.end_offset != start
            or stream.replica_set != replica_set_id
            or stream.state != StreamState.OPENED
            or stream.quarantined
        ):
            raise _range_error(stream, piece, object_id, replica_set_id)
        ends[stream_id] = stream.ending_at(end)
        kept.append(piece)
    return kept


def _range_error(
    stream: StreamRecord, piece: tuple[int, int, int], object_id: int, replica_set_id: int
) -> CommitRefused | CommitGap:
    if stream.replica_set != replica_set_id or stream.state != StreamState.OPENED:
        return CommitRefused(
            f"object {object_id}: stream {stream.id} is not open by replica set {replica_set_id} "
            f"(owner {stream.replica_set}, {StreamState(stream.state).name})"
        )
    _, start, end = piece
    where = f"object {object_id}: stream {stream.id} range {start}..{end}"
    if stream.quarantined:
        return CommitGap(f"{where}: the stream is quarantined: {stream.quarantined}", stream_id=stream.id)
    return CommitGap(f"{where} does not start at the committed end {stream.end_offset}", stream_id=stream.id)


def quarantine(tables: Tables, stream_id: int, reason: str) -> None:
    """Quarantine a stream, so that it takes no commits. The first reason is kept."""
    stream = tables.streams.get(stream_id)
    if stream is not None and not stream.quarantined:
        tables.streams.put(stream_id, msgspec.structs.replace(stream, quarantined=reason))


def _destroyed_at(tables: Tables) -> int:
    return tables.log_index if tables.level >= 1 else 0


def destroy(tables: Tables, object_id: int) -> None:
    """Mark an unreferenced object (or an unused id) for deletion, after the delay and when every reader knows it."""
    row = tables.objects.get(object_id)
    assert row is not None and row.state != ObjectState.DESTROYED, object_id
    tables.objects.put(
        object_id,
        msgspec.structs.replace(
            row,
            state=ObjectState.DESTROYED,
            since_ms=tables.now_ms,
            expires_ms=tables.time_ms + tables.delete_delay_ms(),
            destroyed_at=_destroyed_at(tables),
        ),
    )


def expire_objects(tables: Tables, command: ExpireObjects) -> None:
    """Destroy prepared ids that have expired."""
    for object_id in command.object_ids[:MAX_OBJECTS_PER_COMMAND]:
        row = tables.objects.get(object_id)
        if row is not None and row.state == ObjectState.PREPARED and row.expires_ms <= tables.time_ms:
            destroy(tables, object_id)


def forget_objects(tables: Tables, command: ForgetObjects) -> None:
    """Remove objects that were deleted from the bucket from the metadata; none that a lease holds (rule 6)."""
    held = held_version(tables.leases.values())
    for object_id in command.object_ids[:MAX_OBJECTS_PER_COMMAND]:
        row = tables.objects.get(object_id)
        if row is None or row.state != ObjectState.DESTROYED or row.destroyed_at > held:
            continue
        if row.expires_ms <= tables.time_ms:
            tables.objects.delete(object_id)

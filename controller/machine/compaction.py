"""The command that replaces objects by compacted ones (docs/rules.md, rules 6 and 7).

The command is atomic: either every input is destroyed (and deleted after the delay) and every output is committed, or
nothing changes. A reader's image changes in one step. No committed end of a stream moves, so the owners of the streams
are not involved. An input that a snapshot or a branch holds is refused: those find their offsets in it.

Inputs are written before outputs, and an output's id is larger than any input's. Replaying the changes in order, or by
id, therefore frees an offset before it is assigned again (`tidelog.controller.machine.index` keeps one live slice for
each offset).
"""

from __future__ import annotations

from tidelog.controller.machine.objects import destroy
from tidelog.controller.machine.pins import described
from tidelog.controller.machine.streams import require_master_epoch
from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.commands import MAX_OBJECTS_PER_COMMAND, MAX_RANGES_PER_COMMIT, Compact
from tidelog.controller.model.levels import SNAPSHOTS_LEVEL
from tidelog.controller.model.records import ObjectRecord, ObjectState
from tidelog.runtime.errors import Fenced, InvalidInput
from tidelog.storage.commits import (
    CommitRefused,
    CompactionRefused,
    CompactObjects,
    NewObject,
    ObjectKind,
    pack_ranges,
    unpack_ranges,
)
from tidelog.storage.compaction.check import check_conserved

_KINDS = frozenset(int(kind) for kind in ObjectKind)


def _check_shape(request: CompactObjects) -> list[list[tuple[int, int, int]]]:
    """Stream id, start and end of the ranges of each output. Raises `InvalidInput`."""
    if (
        not 0 < len(request.inputs) <= MAX_OBJECTS_PER_COMMAND
        or not 0 < len(request.outputs) <= MAX_OBJECTS_PER_COMMAND
    ):
        raise InvalidInput(
            f"a compaction has 1 to {MAX_OBJECTS_PER_COMMAND} inputs and outputs, "
            f"not {len(request.inputs)} and {len(request.outputs)}"
        )
    ranges = [unpack_ranges(new.packed) for new in request.outputs]
    if sum(map(len, ranges)) > MAX_RANGES_PER_COMMIT:
        raise InvalidInput(f"a compaction has at most {MAX_RANGES_PER_COMMIT} stream ranges")
    outputs = {new.object_id for new in request.outputs}
    if len(outputs) != len(request.outputs) or len(set(request.inputs)) != len(request.inputs):
        raise InvalidInput("a compaction names an object twice")
    if min(outputs) <= max(request.inputs):
        raise InvalidInput("an output has a smaller id than an input", hint="prepare ids after choosing the inputs")
    for new, pieces in zip(request.outputs, ranges, strict=True):
        streams = {stream_id for stream_id, _, _ in pieces}
        one_stream = new.kind != ObjectKind.STREAM or len(streams) == 1
        if new.kind not in _KINDS or new.size < 0 or not streams or len(streams) != len(pieces) or not one_stream:
            raise InvalidInput(f"object {new.object_id} has kind {new.kind}, {new.size} bytes and {len(pieces)} ranges")
    return ranges


def _is_repeat(tables: Tables, request: CompactObjects) -> bool:
    """Whether this compaction has already been applied. Ids are never reused, so the states of the outputs show it."""
    known = [tables.objects.get(new.object_id) for new in request.outputs]
    return all(row is not None and row.state != ObjectState.PREPARED and row.kind != 0 for row in known)


def _start_of(tables: Tables, stream_id: int) -> int | None:
    stream = tables.streams.get(stream_id)
    return stream.start_offset if stream is not None else None


def compact_objects(tables: Tables, command: Compact) -> None:
    """See `tidelog.storage.commits.CompactObjects`. Raises `CommitRefused`, `CompactionRefused`, `InvalidInput`."""
    request = command.request
    ranges = _check_shape(request)
    try:
        require_master_epoch(tables, request.replica_set_id, request.master_epoch)
    except Fenced as error:
        raise CommitRefused(error.message) from error
    if _is_repeat(tables, request):
        return
    inputs = [_input(tables, object_id) for object_id in request.inputs]
    check_conserved(
        (piece for row in inputs for piece in row.ranges),
        (piece for new in request.outputs for piece in new.ranges),
        lambda stream_id: _start_of(tables, stream_id),
    )
    for object_id in request.inputs:
        destroy(tables, object_id)
    for new, pieces in zip(request.outputs, ranges, strict=True):
        _commit_output(tables, new, pieces)


def _input(tables: Tables, object_id: int) -> ObjectRecord:
    row = tables.objects.get(object_id)
    if row is None or row.state != ObjectState.COMMITTED:
        state = "gone" if row is None else ObjectState(row.state).name
        raise CompactionRefused(f"input object {object_id} is no longer committed: it is {state}")
    if tables.level >= SNAPSHOTS_LEVEL:
        holder = tables.index.pins.holder_of(unpack_ranges(row.packed))
        if holder is not None:
            raise CompactionRefused(f"input object {object_id} is held by {described(holder)}: it stays as it is")
    return row


def _commit_output(tables: Tables, new: NewObject, pieces: list[tuple[int, int, int]]) -> None:
    row = tables.objects.get(new.object_id)
    if row is None or row.state != ObjectState.PREPARED:
        raise CompactionRefused(f"output object {new.object_id} is not prepared: it expired or was never prepared")
    kept = [piece for piece in pieces if piece[0] in tables.streams]
    packed = pack_ranges(kept)
    record = ObjectRecord(new.object_id, ObjectState.COMMITTED, new.kind, new.size, packed, tables.now_ms, 0)
    tables.objects.put(new.object_id, record)
    if not kept:
        destroy(tables, new.object_id)

"""Value types of objects and their commits, and the errors of a refused commit.

The controller's commands contain these types, so their field order is a wire format (docs/formats/controller.md).
Ranges
are half-open, offsets are int64 (rule 9). The requests that storage sends are in `tidelog.storage.managers`.

Entry: `CommitObjects`, `CompactObjects`, `ObjectSlice`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Annotated

import msgspec

from tidelog.runtime.errors import Fenced, InvalidInput, NotFound, TidelogError
from tidelog.runtime.msgpack import DECODE_ERRORS


class ObjectKind(IntEnum):
    """The kind of an object in the bucket (uint8 on disk and wire)."""

    STREAM_SET = 1
    """Data blocks of many streams, sorted by stream id then offset."""
    STREAM = 2
    """Data blocks of one stream."""


class StreamRange(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Offsets `[start_offset, end_offset)` of one stream. All int64."""

    stream_id: int
    start_offset: int
    end_offset: int


_Int64 = Annotated[int, msgspec.Meta(le=(1 << 63) - 1)]
_pack = msgspec.msgpack.Encoder().encode
_unpack_ranges: msgspec.msgpack.Decoder[tuple[StreamRange, ...]] = msgspec.msgpack.Decoder(tuple[StreamRange, ...])
_unpack_numbers: msgspec.msgpack.Decoder[list[tuple[int, int, int]]] = msgspec.msgpack.Decoder(
    list[tuple[_Int64, _Int64, _Int64]]
)


def pack_ranges(ranges: Iterable[StreamRange | tuple[int, int, int]]) -> msgspec.Raw:
    """Encode stream ranges for storage and transfer: about 10 bytes each, where an object for each takes 150.

    An object of an upload has as many ranges as there are partitions written to; few of them are read individually.
    """
    return msgspec.Raw(_pack(list(ranges)))


def unpack_ranges(packed: msgspec.Raw) -> list[tuple[int, int, int]]:
    """Return stream id, start and end offset of each range. Raises `InvalidInput` for malformed bytes."""
    try:
        return _unpack_numbers.decode(packed)
    except DECODE_ERRORS as error:
        raise InvalidInput(f"the stream ranges of an object do not decode: {error}") from error


class NewObject(msgspec.Struct, frozen=True, array_like=True):
    """An object that was written under a prepared id and is to be committed."""

    object_id: int
    kind: int
    """An `ObjectKind`."""
    size: int
    """Bytes."""
    packed: msgspec.Raw
    """Stream ranges by `pack_ranges`, sorted by stream id; contiguous within a stream."""

    @property
    def ranges(self) -> tuple[StreamRange, ...]:
        """Return the decoded ranges. Raises `msgspec.DecodeError`."""
        return _unpack_ranges.decode(self.packed)


class CommitObjects(msgspec.Struct, frozen=True, array_like=True):
    """One upload: the objects that carry a WAL range of a replica set to the bucket.

    The controller refuses it unless the master epoch is current, `wal_start` is the replica set's committed WAL offset
    and every stream range starts at the stream's committed end. The same commit twice is success.
    """

    replica_set_id: int
    master_epoch: int
    wal_start: int
    wal_end: int
    objects: tuple[NewObject, ...]


class CompactObjects(msgspec.Struct, frozen=True, array_like=True):
    """One compaction: committed objects are replaced atomically by new ones that hold the same offsets.

    The controller refuses it unless the master epoch is current, every input is committed, every output is prepared and
    has a larger id than every input, and the outputs' ranges are the inputs' less what is trimmed (rule 7,
    `tidelog.storage.compaction.check`). Ranges of deleted streams are dropped. The same compaction twice is success.
    The inputs stay in the bucket for the delete delay (rule 6).
    """

    replica_set_id: int
    """The replica set whose master compacts. It need not own the streams: their owners' state does not change."""
    master_epoch: int
    inputs: tuple[int, ...]
    """Object ids, 1 to 1,024."""
    outputs: tuple[NewObject, ...]
    """1 to 1,024."""


class ObjectSlice(msgspec.Struct, frozen=True, array_like=True):
    """The part of a committed object that belongs to one stream."""

    object_id: int
    kind: int
    size: int
    start_offset: int
    end_offset: int


class CommitRefused(Fenced):
    """The controller refused a commit permanently: a stale master epoch, or a stream with another owner."""


class NotPrepared(NotFound):
    """An object of a commit has no prepared id: it expired. Nothing has changed; put the object under a new id.

    Unlike `CommitRefused` it says nothing about who owns the WAL.
    """


class CommitGap(TidelogError):
    """A commit does not start at the committed end of a stream or WAL. The stream is quarantined (rule 5)."""

    kafka_code = 56

    def __init__(self, message: str, *, stream_id: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.stream_id = stream_id


class CompactionRefused(TidelogError):
    """A compaction cannot be committed: an input is gone, or it does not conserve what they hold (rule 7).

    Nothing has changed; the objects written for it are deleted when their prepared ids expire.
    """

    kafka_code = 56

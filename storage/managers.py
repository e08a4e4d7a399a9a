"""What storage needs of a controller, as a protocol of its own (imports go down, never up).

The controller's client implements `ObjectManager`; tests use a small in-memory one. Commit is where rules 3, 4, 5 and 7
of DESIGN.md are enforced by the controller; storage asserts the same before it asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Annotated, Protocol

import msgspec

from runtime.errors import Fenced, InvalidInput, TidelogError
from runtime.msgpack import DECODE_ERRORS


class ObjectKind(IntEnum):
    """What an object in the bucket holds (uint8 on disk and wire)."""

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
    """Stream ranges as they are kept and sent: encoded, about 10 bytes each, where an object for each takes 150.

    An object of an upload has as many ranges as there are partitions written to; few of them are looked at one by one.
    """
    return msgspec.Raw(_pack(list(ranges)))


def unpack_ranges(packed: msgspec.Raw) -> list[tuple[int, int, int]]:
    """Stream id, start and end offset of each range. Raises `InvalidInput` for what `pack_ranges` cannot have given."""
    try:
        return _unpack_numbers.decode(packed)
    except DECODE_ERRORS as error:
        raise InvalidInput(f"the stream ranges of an object do not decode: {error}") from error


class NewObject(msgspec.Struct, frozen=True, array_like=True):
    """An object that was written under a prepared id and now asks to be committed."""

    object_id: int
    kind: int
    """An `ObjectKind`."""
    size: int
    """Bytes."""
    packed: msgspec.Raw
    """Stream ranges by `pack_ranges`, sorted by stream id; contiguous within a stream."""

    @property
    def ranges(self) -> tuple[StreamRange, ...]:
        """What is packed. Raises `msgspec.DecodeError`."""
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
    """One compaction: committed objects are replaced, all at once, by new ones that hold the same offsets.

    The controller refuses it unless the master epoch is current, every input is committed, every output is prepared and
    has a larger id than every input, and the outputs' ranges are the inputs' less what is trimmed (rule 7,
    `storage.compaction_check`). Ranges of deleted streams are dropped. The same compaction twice is success. The inputs
    stay in the bucket for the delete delay (rule 6).
    """

    replica_set_id: int
    """Whose master compacts. It need not own the streams: nothing a stream's owner decides is changed."""
    master_epoch: int
    inputs: tuple[int, ...]
    """Object ids, 1 to 1,024."""
    outputs: tuple[NewObject, ...]
    """1 to 1,024."""


class ObjectSlice(msgspec.Struct, frozen=True, array_like=True):
    """A committed object's part of one stream."""

    object_id: int
    kind: int
    size: int
    start_offset: int
    end_offset: int


class CommitRefused(Fenced):
    """The controller refused a commit for good: a stale master epoch or a stream owned by somebody else."""


class CommitGap(TidelogError):
    """A commit does not start at the committed end of a stream or WAL. The stream is quarantined (rule 5)."""

    kafka_code = 56

    def __init__(self, message: str, *, stream_id: int | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.stream_id = stream_id


class CompactionRefused(TidelogError):
    """A compaction cannot be committed as it is: an input is gone, or it does not conserve what they hold (rule 7).

    Nothing has changed; what was written for it is given up when its prepared ids expire.
    """

    kafka_code = 56


class ObjectManager(Protocol):
    """The controller, as storage sees it."""

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        """Reserve `count` (1–1,024) consecutive object ids and return the first.

        Ids not committed within `ttl_ms` milliseconds are given up: their objects become orphans and are deleted.
        Raises `Unavailable`.
        """
        ...

    async def commit_objects(self, commit: CommitObjects) -> None:
        """Make the objects part of the metadata. When it returns, `find_objects` here knows them.

        Raises `CommitRefused`, `CommitGap`, and `Unavailable` (outcome unknown: ask again with the same commit).
        """
        ...

    def find_objects(self, stream_id: int, start_offset: int, end_offset: int, limit: int) -> Sequence[ObjectSlice]:
        """At most `limit` slices that hold offsets of `[start_offset, end_offset)`, in order, from local memory."""
        ...

    def committed_wal_offset(self, replica_set_id: int) -> int:
        """The WAL offset up to which committed objects cover the replica set's WAL (int64 bytes)."""
        ...

    async def quarantine_stream(self, replica_set_id: int, master_epoch: int, stream_id: int, reason: str) -> None:
        """Note durably that a stream's records do not meet its committed range (rule 5): it takes no commits any more.

        Returns when `quarantined` here says so, too; for whoever opens the stream from now on. The same again is
        success, and so is a stream that was deleted or belongs to another replica set. Raises `Fenced`, `Unavailable`.
        """
        ...

    def quarantined(self, stream_id: int) -> str:
        """Why a stream is quarantined, from local memory; empty if it is not."""
        ...

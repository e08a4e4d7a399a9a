"""Record types for appends to and reads from a stream, and the errors of reads and appends.

A *stream append* is the unit of everything above the WAL: it is appended, cached, stored in a data block and read back
as a whole. It covers the stream offsets `[base_offset, base_offset + count)`.

Entry: `StreamAppend` for writes; `StreamEntry`, `CheckedBatch` for reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tidelog.runtime.errors import CorruptData, NotFound
from tidelog.runtime.types import Buffer


class StreamAppend(msgspec.Struct, gc=False):
    """One stream append to be written to a WAL, or to several. It holds no state of a WAL.

    Whoever is given one owns it: the storage puts the form of the payload that it keeps in place of the caller's.
    A msgspec struct because one is created for every append, and msgspec structs are the cheapest kind of object.
    """

    stream_id: int
    stream_epoch: int
    base_offset: int
    """First stream offset (int64)."""
    count: int
    """Number of offsets that the payload covers (1 to 2³²−1)."""
    payload: Sequence[Buffer]
    """The bytes of the append, as a sequence of buffers. They must never change again."""
    batch_crc: int | None = None
    """If not None, the payload is one buffer with one record batch (v2) that was verified against this CRC32C
    (uint32): other checksums of the payload can be derived from it (`tidelog.batch.checksum`)."""


class StreamEntry(NamedTuple):
    """One stream append as read back."""

    base_offset: int
    """First stream offset (int64)."""
    count: int  # type: ignore[assignment]  # the field shadows tuple.count, which is not needed here
    """Number of offsets that the payload covers (1 to 2³²−1)."""
    payload: bytes | memoryview
    """The bytes of the append; a view keeps its whole block alive. Empty: a hole, of which log compaction removed what
    it held (docs/design/0025). Only objects have holes."""

    @property
    def is_hole(self) -> bool:
        """Return whether log compaction left nothing of it."""
        return not self.payload


class CheckedBatch(StreamEntry):
    """An entry whose payload is one record batch (v2) that passed its CRC32C when it was appended in this process.

    Its CRC32C is trusted from then on, so the checksum of a block can be derived from it.
    """

    __slots__ = ()


class OffsetTrimmed(NotFound):
    """The offset lies before the stream's start: it was trimmed. Kafka: OFFSET_OUT_OF_RANGE (1)."""

    kafka_code = 1


class StreamQuarantined(CorruptData):
    """The stream's committed range is not followed by its next records (rule 5). It takes no appends any more.

    Committed records can still be read. The others are kept in the bucket under `{cluster id}/quarantine/`, in the
    object format, for an operator to examine. Kafka: KAFKA_STORAGE_ERROR (56).
    """

    kafka_code = 56

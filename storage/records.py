"""What a reader of a stream gets, and the ways in which it can be told no.

A *stream append* is the unit of everything above the WAL: it is appended whole, cached whole, put into one data block
whole and read back whole. It covers the stream offsets `[base_offset, base_offset + count)`.

Entry: `StreamRecord`, `CheckedBatch`.
"""

from __future__ import annotations

from typing import NamedTuple

from runtime.errors import CorruptData, NotFound


class StreamRecord(NamedTuple):
    """One stream append as read back."""

    base_offset: int
    """First stream offset (int64)."""
    count: int  # type: ignore[assignment]  # the field shadows tuple.count, which nobody needs here
    """How many offsets the payload covers (1 to 2³²−1)."""
    payload: bytes | memoryview
    """The bytes of the append; a view keeps the block it lies in alive."""


class CheckedBatch(StreamRecord):
    """One whose payload is one record batch (v2) that passed its CRC32C when it was appended in this process.

    The CRC32C in it vouches for its bytes from then on, so the checksum of a block may follow from it.
    """

    __slots__ = ()


class OffsetTrimmed(NotFound):
    """The offset lies before the stream's start: it was trimmed. Kafka: OFFSET_OUT_OF_RANGE (1)."""

    kafka_code = 1


class StreamQuarantined(CorruptData):
    """The stream's committed range and what should follow it do not meet (rule 5). It takes no appends any more.

    What was committed can still be read. What was not is kept in the bucket under `{cluster id}/quarantine/`, in the
    object format, for a person to look at. Kafka: KAFKA_STORAGE_ERROR (56).
    """

    kafka_code = 56

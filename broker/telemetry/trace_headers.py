"""Reads the W3C trace context of records: their headers `traceparent` and `tracestate`. Sans-IO.

It runs on the event loop for each Produce request while traces are on, so what it reads is bounded: the first record of
a batch, and of one whose first record names a trace the following ones, `MAX_RECORDS` in all of a request; the first
`MAX_HEADERS` headers of a record; `MAX_UNPACKED_BYTES` of compressed batches of a request. Lengths are checked before
they are used. What does not parse ends the reading of its batch: whether a batch is sound is decided elsewhere.

Of several headers with the same name the last one counts, as for Kafka's `Headers.lastHeader`. Names are lower case.

Entry: `TraceHeaderReader`.
"""

from __future__ import annotations

from typing import NamedTuple, cast

from tidelog.batch.batch import HEADER_BYTES
from tidelog.batch.codec import get_varint
from tidelog.batch.compression import Compression, decompress_start
from tidelog.batch.errors import CorruptRecord
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.types import Buffer

MAX_RECORDS = 32
"""Records read of one request, whatever it has; also the bound on the links of a span."""
MAX_HEADERS = 32
MAX_UNPACKED_BYTES = 64 << 10
MAX_PARENT_BYTES = 128
"""A `traceparent` has 55 bytes; those of later versions may have more."""
MAX_STATE_BYTES = 512
"""What the W3C asks for at least; a longer `tracestate` is left out as a whole."""

SMALL_BATCH_BYTES = 4 << 10
"""To search so many bytes takes less than to parse a record."""

_PARENT, _STATE = b"traceparent", b"tracestate"
_MAGIC_AT, _ATTRIBUTES_LOW, _CODEC_MASK = 16, 22, 0x07


def may_name_traces(batch: Buffer) -> bool:
    """Return False, quickly, for most small batches that name none."""
    if len(batch) <= HEADER_BYTES:
        return False
    is_compressed = batch[_ATTRIBUTES_LOW] & _CODEC_MASK != Compression.NONE
    return is_compressed or len(batch) > SMALL_BATCH_BYTES or _PARENT in bytes(batch)


class TraceHeaders(NamedTuple):
    """What a record says of its trace, unchecked."""

    parent: bytes
    state: bytes
    """Empty: none, or too long."""


class TraceHeaderReader:
    """Reads the headers of the batches of one request, within the bounds of a request."""

    def __init__(self, *, unpacks: bool = True) -> None:
        """`unpacks`: read compressed batches, too."""
        self._records_left = MAX_RECORDS
        self._bytes_left = MAX_UNPACKED_BYTES if unpacks else 0
        self.found: dict[TraceHeaders, None] = {}
        """Each once, in the order of the records."""

    @property
    def is_full(self) -> bool:
        """Whether nothing more is read."""
        return self._records_left <= 0

    def read(self, batch: Buffer, limit: int = MAX_RECORDS) -> None:
        """Read a batch, at most `limit` of its records. One that is not of format 2 has no headers. Never raises."""
        if self._records_left <= 0 or len(batch) <= HEADER_BYTES or batch[_MAGIC_AT] != 2:
            return
        codec = batch[_ATTRIBUTES_LOW] & _CODEC_MASK
        if codec == Compression.NONE:
            self._read_records(batch, HEADER_BYTES, limit)
        elif self._bytes_left > 0:
            try:
                start = decompress_start(memoryview(batch)[HEADER_BYTES:], codec, self._bytes_left)
            except TidelogError:  # a batch that does not unpack is refused by who checks it
                self._bytes_left = 0
                return
            self._bytes_left -= len(start)
            self._read_records(start, 0, limit)

    def _read_records(self, data: Buffer, at: int, limit: int) -> None:
        size = len(data)
        try:
            for _ in range(min(limit, self._records_left)):
                if at >= size:
                    return
                self._records_left -= 1
                found, at = _read_record(data, at)
                if found is None:
                    return
                self.found[found] = None
        except (IndexError, CorruptRecord):  # it ends within what was unpacked, or is malformed
            return


def _read_record(data: Buffer, start: int) -> tuple[TraceHeaders | None, int]:
    """Return what the record at `start` says, and where the next one begins. Raises `IndexError`, `CorruptRecord`."""
    source = cast(bytes, data)  # any buffer will do
    length, at = get_varint(source, start)
    end = at + length
    if length < 6 or end > len(data):
        raise CorruptRecord("a record does not fit")
    _, at = get_varint(source, at + 1)
    _, at = get_varint(source, at)
    for _ in range(2):  # key and value
        length, at = get_varint(source, at)
        at += max(length, 0)
    if at >= end:
        raise CorruptRecord("a record ends before its headers")
    count, at = get_varint(source, at)
    parent, state = b"", b""
    for _ in range(min(count, MAX_HEADERS)):
        length, at = get_varint(source, at)
        name_at, at = at, at + max(length, 0)
        value_length, at = get_varint(source, at)
        value_end = at + max(value_length, 0)
        if value_end > end:
            raise CorruptRecord("a header does not fit its record")
        if length == len(_PARENT) and data[name_at : name_at + length] == _PARENT:
            parent = bytes(data[at : min(value_end, at + MAX_PARENT_BYTES + 1)]) or b"-"
        elif length == len(_STATE) and data[name_at : name_at + length] == _STATE:
            state = bytes(data[at:value_end]) if value_end - at <= MAX_STATE_BYTES else b""
        at = value_end
    return (TraceHeaders(parent, state) if parent else None), end

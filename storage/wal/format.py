"""The bytes of a WAL record: a fixed header of 64 bytes, then the payload. All numbers are big-endian.

| offset | bytes | field | meaning |
|---|---|---|---|
| 0 | 4 | magic | `TLWR` |
| 4 | 4 | crc32c | uint32, over bytes 8 to the end of the payload |
| 8 | 1 | version | uint8, 1. A later version keeps the first 16 bytes unchanged |
| 9 | 1 | type | uint8, a `WalRecordType` |
| 10 | 2 | flags | uint16, 0 |
| 12 | 4 | payload length | uint32 |
| 16 | 8 | wal offset | int64, where this record begins in the WAL |
| 24 | 8 | confirm offset | int64, ≤ wal offset; see below |
| 32 | 8 | stream id | int64 |
| 40 | 8 | stream epoch | int64 |
| 48 | 8 | base offset | int64, the first stream offset in the payload |
| 56 | 4 | master epoch | int32, never decreases along the WAL |
| 60 | 4 | count | int32, stream offsets covered (0 for EPOCH_START) |

The record's own WAL offset distinguishes it from stale bytes of a recycled file, whose records all have other offsets.
The confirm offset is what was both confirmed and durable *on this disk* when the record was
written: everything before it must be intact at every recovery, which distinguishes damage from a torn tail.

Entry: `encode_header`, `read_header` and `record_of`. They copy no payload.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from crc32c import crc32c

from tidelog.batch.checksum import batch_crc_onward
from tidelog.runtime.types import Buffer
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import WalRecord, WalRecordType

MAGIC_BYTES = b"TLWR"
MAGIC = int.from_bytes(MAGIC_BYTES, "big")
VERSION = 1
HEADER_BYTES = 64
MAX_PAYLOAD_BYTES = (1 << 32) - 1

_PREFIX = struct.Struct(">II")
_REST = struct.Struct(">BBHIqqqqqii")
_HEADER = struct.Struct(">IIBBHIqqqqqii")
assert _HEADER.size == HEADER_BYTES
_CRC_FROM = _PREFIX.size
_DATA = int(WalRecordType.DATA)
EPOCH_START: Final = StreamAppend(0, 0, 0, 0, ())
"""The record that begins an epoch: it belongs to no stream and has no payload."""


class WalHeader(NamedTuple):
    """A decoded header; the table above names the fields."""

    magic: int
    crc: int
    version: int
    type: int
    flags: int
    payload_length: int
    wal_offset: int
    confirm_offset: int
    stream_id: int
    stream_epoch: int
    base_offset: int
    master_epoch: int
    offset_count: int

    @property
    def end_offset(self) -> int:
        """Return the WAL offset after the record."""
        return self.wal_offset + HEADER_BYTES + self.payload_length


def encode_header(
    type: int,
    payload_length: int,
    wal_offset: int,
    confirm_offset: int,
    master_epoch: int,
    record: StreamAppend,
) -> bytes:
    """Return the 64 bytes to write before the record's payload, whose buffers have `payload_length` bytes in all."""
    rest = _REST.pack(
        VERSION,
        type,
        0,
        payload_length,
        wal_offset,
        confirm_offset,
        record.stream_id,
        record.stream_epoch,
        record.base_offset,
        master_epoch,
        record.count,
    )
    batch_crc = record.batch_crc
    crc = crc32c(rest)
    for buffer in record.payload:
        crc = crc32c(buffer, crc) if batch_crc is None else batch_crc_onward(crc, buffer, batch_crc)
    return _PREFIX.pack(MAGIC, crc) + rest


def read_header(buffer: Buffer, position: int) -> WalHeader:
    """Unpack the 64 bytes at `position` without checking them."""
    return WalHeader._make(_HEADER.unpack_from(buffer, position))


def misplaced(header: WalHeader, wal_offset: int) -> str:
    """Return why this cannot be the header of a record at `wal_offset`; empty if it can."""
    if header.magic != MAGIC:
        return "no record begins here"
    if header.wal_offset != wal_offset:
        return f"a record of WAL offset {header.wal_offset} is here"
    return ""


def crc_matches(header: WalHeader, buffer: memoryview, position: int) -> bool:
    """Return whether header and payload, wholly in `buffer` from `position`, match the CRC."""
    end = position + HEADER_BYTES + header.payload_length
    assert end <= len(buffer)
    return bool(crc32c(buffer[position + _CRC_FROM : end]) == header.crc)


def unsupported(header: WalHeader) -> str:
    """Return why a record with a valid CRC is not supported; empty if it is."""
    if header.version != VERSION:
        return f"record version {header.version}, this Tidelog reads version {VERSION}"
    if header.type not in _TYPES:
        return f"record type {header.type} is unknown to this Tidelog"
    return ""


def record_of(header: WalHeader, buffer: memoryview, position: int) -> WalRecord:
    """Return the verified record at `position` of `buffer`; its payload is a view into `buffer`."""
    payload_at = position + HEADER_BYTES
    return WalRecord(
        offset=header.wal_offset,
        end_offset=header.wal_offset + HEADER_BYTES + header.payload_length,
        type=_TYPES[header.type],
        master_epoch=header.master_epoch,
        stream_id=header.stream_id,
        stream_epoch=header.stream_epoch,
        base_offset=header.base_offset,
        count=header.offset_count,
        payload=buffer[payload_at : payload_at + header.payload_length],
    )


_TYPES = {int(type): type for type in WalRecordType}

"""The objects of the diskless WAL: one header of 96 bytes, then WAL records or the body of a fence. Big-endian.

| offset | bytes | field | meaning |
|---|---|---|---|
| 0 | 4 | magic | `TLWO` |
| 4 | 4 | crc32c | uint32, over bytes 8 to the end of the object |
| 8 | 1 | version | uint8, 1. A later version keeps the first 16 bytes unchanged |
| 9 | 1 | kind | uint8: 1 DATA, 2 FENCE |
| 10 | 2 | flags | uint16, 0 |
| 12 | 4 | replica set | uint32 |
| 16 | 8 | seq | int64, the place in the order of objects; the same as in the key |
| 24 | 8 | first seq | int64, the oldest object that the log still needs, as the writer knew it |
| 32 | 8 | wal start | int64, WAL offset of the first record; -1 in a FENCE |
| 40 | 8 | wal end | int64, WAL offset after the last record; -1 in a FENCE |
| 48 | 8 | durable offset | int64, every WAL byte before it was in the bucket when this was built |
| 56 | 4 | master epoch | int32, of the writer |
| 60 | 4 | records | uint32 |
| 64 | 16 | writer id | drawn by every process when it opens the log |
| 80 | 8 | body length | uint64; DATA: wal end - wal start, FENCE: 16 |
| 88 | 8 | reserved | 0 |

The body of DATA is the records of `wal_format`, byte for byte; it may be empty. The body of a FENCE is two int64: the
seq at which its writer continues, and the WAL offset at which the log restarts, -1 if it continues. No
DATA object has the size of a FENCE, so a listing distinguishes them.

Entry: `wal_key`, `encode_data`, `encode_fence`, `decode`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from crc32c import crc32c

from tidelog.runtime.errors import CorruptData
from tidelog.runtime.types import Buffer
from tidelog.storage.wal.format import HEADER_BYTES as RECORD_HEADER_BYTES
from tidelog.storage.wal.format import WalHeader, crc_matches, misplaced, read_header, unsupported

MAGIC = int.from_bytes(b"TLWO", "big")
VERSION = 1
HEADER_BYTES = 96
WRITER_ID_BYTES = 16

_PREFIX = struct.Struct(">II")
_REST = struct.Struct(">BBHIqqqqqiI16sQ8x")
_FENCE = struct.Struct(">qq")
assert _PREFIX.size + _REST.size == HEADER_BYTES
FENCE_BYTES = HEADER_BYTES + _FENCE.size
"""Size of every FENCE object; between that of a DATA object without a record and of one with the shortest."""
assert HEADER_BYTES < FENCE_BYTES < HEADER_BYTES + RECORD_HEADER_BYTES
_SEQ = re.compile("[0-9a-f]{16}")


class ObjectType(IntEnum):
    """The kind of a WAL object (uint8)."""

    DATA = 1
    FENCE = 2


@dataclass(frozen=True, slots=True)
class WalObject:
    """One object as read and checked; the table above names the fields."""

    key: str
    kind: ObjectType
    replica_set_id: int
    seq: int
    first_seq: int
    wal_start: int
    wal_end: int
    durable_offset: int
    master_epoch: int
    records: int
    writer_id: bytes
    next_seq: int
    """The place of the next object: `seq` + 1, or the one in a FENCE."""
    reset_offset: int
    """FENCE: the WAL offset at which the log restarts; -1 otherwise."""
    body: memoryview

    def headers(self) -> Iterator[tuple[WalHeader, int]]:
        """Yield the header of every record, checked, and its position in `body`. Raises `CorruptData`."""
        position, expected = 0, self.wal_start
        for _ in range(self.records):
            if position + RECORD_HEADER_BYTES > len(self.body):
                raise self.damage(expected, "the records end before their number is reached")
            header = read_header(self.body, position)
            reason = misplaced(header, expected)
            if not reason and position + RECORD_HEADER_BYTES + header.payload_length > len(self.body):
                reason = "the record is longer than the object"
            if not reason and not crc_matches(header, self.body, position):
                reason = "the record fails its CRC32C check"
            reason = reason or unsupported(header)
            if not reason and header.master_epoch != self.master_epoch:
                reason = f"the record is of master epoch {header.master_epoch}, the object of {self.master_epoch}"
            if reason:
                raise self.damage(expected, reason)
            yield header, position
            position += RECORD_HEADER_BYTES + header.payload_length
            expected = header.end_offset
        if position != len(self.body):
            raise self.damage(expected, "bytes follow the last record")

    def damage(self, wal_offset: int, reason: str) -> CorruptData:
        """Return the error for damage inside this object."""
        at = HEADER_BYTES + wal_offset - self.wal_start
        return damaged(self.key, at, f"WAL offset {wal_offset}: {reason}")


class DamagedWalObject(CorruptData):
    """An object of the WAL whose byte `position` differs from what was written."""

    def __init__(self, key: str, position: int, reason: str) -> None:
        super().__init__(
            f"WAL object {key} is damaged at byte {position}: {reason}",
            hint="`tidelog wal verify --wal s3` finds all of them. Restore this object from a version or a copy of the"
            " bucket; the broker does not start without it, because that would lose acknowledged records silently",
        )
        self.key = key
        self.position = position
        self.reason = reason


def damaged(key: str, position: int, reason: str) -> DamagedWalObject:
    """Return the error for an object whose byte `position` differs from what was written."""
    return DamagedWalObject(key, position, reason)


def wal_prefix(cluster_id: str, replica_set_id: int) -> str:
    """Return the prefix of the keys of a replica set's WAL objects."""
    assert 0 <= replica_set_id < 1 << 32
    return f"{cluster_id}/wal/{replica_set_id:08x}/"


def wal_key(prefix: str, seq: int) -> str:
    """Return the key of the object at place `seq` (int64 ≥ 0); keys sort as the numbers do."""
    assert 0 <= seq < 1 << 63
    return f"{prefix}{seq:016x}"


def parse_seq(prefix: str, key: str) -> int | None:
    """Return the place of an object by its key; None if it is not of this log."""
    name = key[len(prefix) :]
    return int(name, 16) if key.startswith(prefix) and _SEQ.fullmatch(name) else None


@dataclass(frozen=True, slots=True)
class Origin:
    """The fields shared by all objects of one writer."""

    replica_set_id: int
    master_epoch: int
    writer_id: bytes


def encode_data(
    origin: Origin,
    *,
    seq: int,
    first_seq: int,
    wal_start: int,
    wal_end: int,
    durable_offset: int,
    records: int,
    body: Sequence[Buffer],
) -> bytes:
    """Return a DATA object with the records of `[wal_start, wal_end)`, whose bytes are `body`. Copies them once."""
    fields = (seq, first_seq, wal_start, wal_end, durable_offset)
    return _encode(ObjectType.DATA, origin, fields, records, wal_end - wal_start, body)


def encode_fence(
    origin: Origin, *, seq: int, first_seq: int, durable_offset: int, next_seq: int, reset_offset: int = -1
) -> bytes:
    """Return a FENCE: the log of older epochs ends before `seq`, and that of `origin` continues at `next_seq`."""
    assert next_seq > seq and (reset_offset < 0 or first_seq == seq)
    body = _FENCE.pack(next_seq, reset_offset)
    return _encode(ObjectType.FENCE, origin, (seq, first_seq, -1, -1, durable_offset), 0, len(body), (body,))


def _encode(
    kind: ObjectType,
    origin: Origin,
    fields: tuple[int, int, int, int, int],
    records: int,
    length: int,
    body: Sequence[Buffer],
) -> bytes:
    assert len(origin.writer_id) == WRITER_ID_BYTES
    who = (origin.master_epoch, records, origin.writer_id)
    rest = _REST.pack(VERSION, kind, 0, origin.replica_set_id, *fields, *who, length)
    crc = crc32c(rest)
    for buffer in body:
        crc = crc32c(buffer, crc)
    data = b"".join((_PREFIX.pack(MAGIC, crc), rest, *body))
    assert len(data) == HEADER_BYTES + length
    return data


def decode(prefix: str, key: str, data: bytes, replica_set_id: int) -> WalObject:
    """Check and decode the object `key`. `WalObject.headers` checks the records in it. Raises `CorruptData`."""
    view = memoryview(data)
    if len(data) < HEADER_BYTES:
        raise damaged(key, len(data), f"it ends inside its header of {HEADER_BYTES} bytes")
    magic, crc = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise damaged(key, 0, "no WAL object begins here")
    if crc32c(view[_PREFIX.size :]) != crc:
        raise damaged(key, 4, "it fails its CRC32C check")
    version, kind, _flags, replica_set, seq, first_seq, wal_start, wal_end, durable, epoch, records, writer, length = (
        _REST.unpack_from(data, _PREFIX.size)
    )
    check = _checker(key)
    check(8, version == VERSION, f"version {version}, this Tidelog reads version {VERSION}")
    check(9, kind in (ObjectType.DATA, ObjectType.FENCE), f"kind {kind} is unknown to this Tidelog")
    check(12, replica_set == replica_set_id, f"it is of replica set {replica_set}, not {replica_set_id}")
    check(16, seq == parse_seq(prefix, key), f"it is number {seq}, which is not what its key says")
    check(24, 0 <= first_seq <= seq, f"its first seq is {first_seq}")
    check(80, length == len(data) - HEADER_BYTES, f"its body is {len(data) - HEADER_BYTES} bytes long, not {length}")
    next_seq, reset_offset = seq + 1, -1
    if kind == ObjectType.FENCE:
        check(80, len(data) == FENCE_BYTES, f"a fence has {FENCE_BYTES} bytes, not {len(data)}")
        next_seq, reset_offset = _FENCE.unpack_from(data, HEADER_BYTES)
        check(HEADER_BYTES, next_seq > seq, f"it continues at {next_seq}, before itself")
    else:
        check(40, 0 <= wal_start <= wal_end == wal_start + length, f"its WAL range is [{wal_start}, {wal_end})")
    return WalObject(
        key=key,
        kind=ObjectType(kind),
        replica_set_id=replica_set,
        seq=seq,
        first_seq=first_seq,
        wal_start=wal_start,
        wal_end=wal_end,
        durable_offset=durable,
        master_epoch=epoch,
        records=records,
        writer_id=writer,
        next_seq=next_seq,
        reset_offset=reset_offset,
        body=view[HEADER_BYTES:],
    )


def _checker(key: str) -> Callable[[int, bool, str], None]:
    def check(position: int, holds: bool, otherwise: str) -> None:
        if not holds:
            raise damaged(key, position, otherwise)

    return check

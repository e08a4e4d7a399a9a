"""The frames on a replication connection. All numbers are big-endian.

Every frame begins with the same 16 bytes:

| offset | bytes | field | meaning |
|---|---|---|---|
| 0 | 2 | magic | `TR` |
| 2 | 1 | version | uint8, 1 |
| 3 | 1 | type | uint8, below |
| 4 | 4 | head length | uint32, bytes of the head that follows, at most `MAX_HEAD_BYTES` |
| 8 | 4 | body length | uint32, bytes of WAL records after the head, at most `MAX_BODY_BYTES`; 0 except in RECORDS |
| 12 | 4 | crc32c | uint32, over bytes 0 to 11 and the head. WAL records carry their own |

| type | name | sent by | head, in this order |
|---|---|---|---|
| 1 | HELLO | follower | replica set int32, broker int32, registration int64, flags uint16 (1: learner), |
| | | | promised epoch int32, start int64, end int64, confirm int64, |
| | | | WAL id (uint16 length, UTF-8), epochs |
| 2 | WELCOME | master | master epoch int32, start int64, end int64, confirm int64, committed int64, epochs |
| 3 | RECORDS | master | master epoch int32, offset int64, epoch int32, epoch start int64, confirm int64, |
| | | | committed int64; the body is the WAL from `offset` on, of one epoch |
| 4 | ACK | follower | master epoch int32, end int64: durable up to here, of this master's WAL |
| 5 | GOODBYE | both | code uint16, text (uint16 length, UTF-8) |

`epochs` is a uint16 count and as many `<epoch int32, start offset int64>`, oldest first. RECORDS without a body is a
heartbeat, and so is an ACK that repeats the last one. These are HANDSHAKE, TRANSFER and ACK of RocketMQ's protocol
(RIP-44), with the fields that fence a stale connection: RECORDS and ACK name the master epoch they belong to.

Entry: `encode`, `read_prefix`, `decode`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from crc32c import crc32c

from tidelog.runtime.errors import CorruptData
from tidelog.runtime.types import Buffer
from tidelog.storage.wal.epochs import EpochEntry, EpochHistory

VERSION = 1
MAX_HEAD_BYTES = 256 << 10
"""Enough for `MAX_EPOCHS` epochs."""
MAX_BODY_BYTES = 128 << 20
"""A batch of records; one record of `wal.max_record_bytes` fits."""
MAX_EPOCHS = 16_384
"""Epochs in a handshake. A longer history is cut at the front: what it tells of was trimmed long ago."""
MAX_TEXT_BYTES = 4_096
PREFIX_BYTES = 16

_MAGIC = 0x5452
_PREFIX = struct.Struct(">HBBIII")
_CHECKED = 12
_HELLO = struct.Struct(">iiqHiqqq")
_WELCOME = struct.Struct(">iqqqq")
_RECORDS = struct.Struct(">iqiqqq")
_ACK = struct.Struct(">iq")
_COUNT = struct.Struct(">H")
_EPOCH = struct.Struct(">iq")
_LEARNER = 1


class FrameType(IntEnum):
    """The type of a frame (uint8)."""

    HELLO = 1
    WELCOME = 2
    RECORDS = 3
    ACK = 4
    GOODBYE = 5


class GoodbyeCode(IntEnum):
    """Why a connection ends (uint16)."""

    CLOSING = 0
    """The process stops, or the replica set has another master."""
    NOT_MASTER = 1
    """The other side is not master of that replica set, or not known yet: try again."""
    STALE_EPOCH = 2
    """The other side has promised a newer epoch."""
    NOT_MEMBER = 3
    """The broker is no member of that replica set, or is registered anew."""
    DIVERGED = 4
    """The two WALs have no common point although there is data to keep: an operator must look."""
    PROTOCOL = 5
    """A frame that does not fit here."""


class FollowerHello(NamedTuple):
    """A follower's introduction."""

    replica_set_id: int
    broker_id: int
    registration_epoch: int
    learner: bool
    promised_epoch: int
    start_offset: int
    end_offset: int
    """Durable."""
    confirm_offset: int
    wal_id: str
    epochs: tuple[EpochEntry, ...]


class Welcome(NamedTuple):
    """A master's answer: its WAL, to which the follower's must be cut."""

    master_epoch: int
    start_offset: int
    end_offset: int
    confirm_offset: int
    committed_offset: int
    epochs: tuple[EpochEntry, ...]


class Records(NamedTuple):
    """A piece of the WAL, or a heartbeat."""

    master_epoch: int
    offset: int
    epoch: int
    """That of every record in the body; of the last byte before `offset` in a heartbeat."""
    epoch_start: int
    confirm_offset: int
    committed_offset: int
    """Everything before it is in committed objects: the follower may trim it."""
    body: Buffer = b""


class Ack(NamedTuple):
    """What a follower has durably."""

    master_epoch: int
    end_offset: int


class Goodbye(NamedTuple):
    """The last frame of a connection."""

    code: int
    text: str


Frame = FollowerHello | Welcome | Records | Ack | Goodbye


class BadFrame(CorruptData):
    """The bytes are no frame of this protocol: the connection ends, and nothing of it was used."""


def encode(frame: Frame) -> bytes:
    """Return the frame's bytes but for the body of `Records`, which follows them on the wire."""
    body_length = 0
    if isinstance(frame, Records):
        kind, head, body_length = FrameType.RECORDS, _RECORDS.pack(*frame[:6]), len(frame.body)
        assert body_length <= MAX_BODY_BYTES
    elif isinstance(frame, Ack):
        kind, head = FrameType.ACK, _ACK.pack(*frame)
    elif isinstance(frame, FollowerHello):
        fixed = _HELLO.pack(
            frame.replica_set_id,
            frame.broker_id,
            frame.registration_epoch,
            _LEARNER if frame.learner else 0,
            frame.promised_epoch,
            frame.start_offset,
            frame.end_offset,
            frame.confirm_offset,
        )
        kind, head = FrameType.HELLO, fixed + _pack_text(frame.wal_id) + _pack_epochs(frame.epochs)
    elif isinstance(frame, Welcome):
        kind, head = FrameType.WELCOME, _WELCOME.pack(*frame[:5]) + _pack_epochs(frame.epochs)
    else:
        kind, head = FrameType.GOODBYE, _COUNT.pack(frame.code) + _pack_text(frame.text)
    return _sealed(kind, head, body_length)


def _sealed(kind: FrameType, head: bytes, body_length: int) -> bytes:
    assert len(head) <= MAX_HEAD_BYTES
    checked = _PREFIX.pack(_MAGIC, VERSION, kind, len(head), body_length, 0)[:_CHECKED]
    return checked + crc32c(head, crc32c(checked)).to_bytes(4, "big") + head


def encode_records(head: Records, body_bytes: int) -> bytes:
    """Return what precedes `body_bytes` bytes of WAL records, which the caller sends after it; `head` has no body."""
    assert not head.body and 0 <= body_bytes <= MAX_BODY_BYTES
    packed = _RECORDS.pack(*head[:6])
    return _sealed(FrameType.RECORDS, packed, body_bytes)


class Prefix(NamedTuple):
    """The first 16 bytes of a frame: how many follow."""

    type: FrameType
    head_bytes: int
    body_bytes: int
    crc: int
    checked: bytes


def read_prefix(data: Buffer) -> Prefix:
    """Decode the `PREFIX_BYTES` at the start of a frame, before anything is read for it. Raises `BadFrame`."""
    assert len(data) == PREFIX_BYTES
    magic, version, kind, head_bytes, body_bytes, crc = _PREFIX.unpack(data)
    if magic != _MAGIC:
        raise BadFrame("no replication frame begins here", hint="is this the replication port of a Tidelog broker?")
    if version != VERSION:
        raise BadFrame(f"a replication frame of version {version}; this Tidelog speaks version {VERSION}")
    if kind not in _TYPES:
        raise BadFrame(f"a replication frame of the unknown type {kind}")
    if head_bytes > MAX_HEAD_BYTES or body_bytes > (MAX_BODY_BYTES if kind == FrameType.RECORDS else 0):
        raise BadFrame(f"a replication frame of {head_bytes} and {body_bytes} bytes is over the limit")
    return Prefix(_TYPES[kind], head_bytes, body_bytes, crc, bytes(memoryview(data)[:_CHECKED]))


def decode(prefix: Prefix, head: Buffer, body: Buffer = b"") -> Frame:
    """Decode a frame. Raises `BadFrame`. The records in `body` are not looked at: the WAL checks them."""
    assert len(head) == prefix.head_bytes and len(body) == prefix.body_bytes
    if crc32c(head, crc32c(prefix.checked)) != prefix.crc:
        raise BadFrame(f"a {prefix.type.name} frame fails its CRC32C check")
    try:
        return _decode(prefix.type, memoryview(head), body)
    except (struct.error, UnicodeDecodeError) as error:
        raise BadFrame(f"a {prefix.type.name} frame is malformed: {error}") from error


def trimmed_history(history: EpochHistory) -> tuple[EpochEntry, ...]:
    """Return the newest `MAX_EPOCHS` epochs, for a handshake."""
    return history.entries[-MAX_EPOCHS:]


def _decode(kind: FrameType, head: memoryview, body: Buffer) -> Frame:
    if kind is FrameType.RECORDS:
        _expect(head, _RECORDS.size)
        master_epoch, offset, epoch, epoch_start, confirm, committed = _RECORDS.unpack(head)
        return Records(master_epoch, offset, epoch, epoch_start, confirm, committed, body)
    if kind is FrameType.ACK:
        _expect(head, _ACK.size)
        return Ack(*_ACK.unpack(head))
    if kind is FrameType.GOODBYE:
        text, end = _unpack_text(head, _COUNT.size)
        _expect(head, end)
        return Goodbye(_COUNT.unpack_from(head)[0], text)
    if kind is FrameType.WELCOME:
        epochs, end = _unpack_epochs(head, _WELCOME.size)
        _expect(head, end)
        master_epoch, start, ended, confirm, committed = _WELCOME.unpack_from(head)
        return Welcome(master_epoch, start, ended, confirm, committed, epochs)
    set_id, broker_id, registration, flags, promised, start, ended, confirm = _HELLO.unpack_from(head)
    wal_id, at = _unpack_text(head, _HELLO.size)
    epochs, end = _unpack_epochs(head, at)
    _expect(head, end)
    learner = bool(flags & _LEARNER)
    return FollowerHello(set_id, broker_id, registration, learner, promised, start, ended, confirm, wal_id, epochs)


def _expect(head: memoryview, size: int) -> None:
    if len(head) != size:
        raise BadFrame(f"a frame's head has {len(head)} bytes, not {size}")


def _pack_text(text: str) -> bytes:
    data = text.encode()[:MAX_TEXT_BYTES]
    return _COUNT.pack(len(data)) + data


def _unpack_text(head: memoryview, at: int) -> tuple[str, int]:
    size = _COUNT.unpack_from(head, at)[0]
    end = at + _COUNT.size + size
    if size > MAX_TEXT_BYTES or end > len(head):
        raise BadFrame(f"a text of {size} bytes in a frame is over the limit")
    return bytes(head[at + _COUNT.size : end]).decode(), end


def _pack_epochs(epochs: tuple[EpochEntry, ...]) -> bytes:
    assert len(epochs) <= MAX_EPOCHS
    return _COUNT.pack(len(epochs)) + b"".join(_EPOCH.pack(*entry) for entry in epochs)


def _unpack_epochs(head: memoryview, at: int) -> tuple[tuple[EpochEntry, ...], int]:
    count = _COUNT.unpack_from(head, at)[0]
    at += _COUNT.size
    end = at + count * _EPOCH.size
    if count > MAX_EPOCHS or end > len(head):
        raise BadFrame(f"{count} epochs in a frame are over the limit")
    entries = tuple(EpochEntry(*entry) for entry in _EPOCH.iter_unpack(head[at:end]))
    last = EpochEntry(-1, -1)
    for entry in entries:
        if entry.epoch <= last.epoch or entry.start_offset <= last.start_offset:
            raise BadFrame(f"the epoch <{entry.epoch}, {entry.start_offset}> in a frame is out of order")
        last = entry
    return entries, end


_TYPES = {int(kind): kind for kind in FrameType}

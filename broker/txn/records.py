"""The records of `__transaction_state`, in Kafka's format. Described in docs/formats/transaction_state.md.

A key is an int16 type, 0, and the transactional id. A value begins with an int16 version; a null value is a tombstone.
Written: values v1 (flexible). Read: v0 and v1. Integers are big-endian, strings UTF-8. Two tagged fields, with numbers
that Kafka does not use, are of Tidelog; a tag that is not known here is kept and written back.

Invariants: `parse_*(encode_*(x)) == x`; invalid bytes raise only `CorruptRecord`, before more memory is used than they
have themselves, times a constant. An unknown key type parses to `UnknownTxnKey`.

Entry: `parse_txn_key`, `parse_txn_value` and the encoders.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from tidelog.batch.errors import CorruptRecord
from tidelog.runtime.errors import InvalidInput

KEY_VERSION = 0
VALUE_VERSION = 1
PREVIOUS_PRODUCER_ID_TAG = 0
NEXT_PRODUCER_ID_TAG = 1
CLIENT_VERSION_TAG = 2
LAST_EPOCH_TAG = 10_000
"""Tidelog's: `TxnValue.last_epoch`, int16."""
NEXT_EPOCH_TAG = 10_001
"""Tidelog's: `TxnValue.next_epoch`, int16."""
BEHIND_TAG = 10_002
"""Tidelog's: `TxnValue.is_behind`, without data."""
NO_PRODUCER_ID = -1
NO_EPOCH = -1
NO_TIMESTAMP = -1
MAX_ID_BYTES = 0x7FFF
"""Maximum size of a transactional id: its length is an int16."""
MAX_TAG = 0xFFFF_FFFF
"""Largest number of a tag: an unsigned varint of at most five bytes that fits in 32 bits."""

_INT8 = Struct(">b")
_INT16 = Struct(">h")
_INT32 = Struct(">i")
_INT64 = Struct(">q")

TxnPartition = tuple[str, int]
"""The name of a topic and the index of a partition."""


class TxnState(IntEnum):
    """The states, with the numbers of the records (int8)."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6


class TxnKey(NamedTuple):
    """Key of a transactional id."""

    transactional_id: str


class UnknownTxnKey(NamedTuple):
    """Key of an unknown type; its record is kept unchanged."""

    version: int


class TxnValue(NamedTuple):
    """The state of a transactional id."""

    producer_id: int
    epoch: int
    timeout_ms: int
    """INT32_MAX: no time-out (KIP-939)."""
    state: TxnState
    partitions: frozenset[TxnPartition] = frozenset()
    """The partitions of a transaction that is Ongoing or prepared."""
    updated_ms: int = NO_TIMESTAMP
    """Time of the last change, milliseconds since the Unix epoch; -1: unknown."""
    started_ms: int = NO_TIMESTAMP
    """When the newest transaction began; -1: there was none since the last InitProducerId."""
    previous_producer_id: int = NO_PRODUCER_ID
    """The producer id before the current one, if that had no epochs left; -1: none."""
    next_producer_id: int = NO_PRODUCER_ID
    """The producer id of the next transaction, while this one has another pair of id and epoch; -1: the same pair."""
    client_version: int = 0
    """The transaction version of the client, `transaction.version` (int16)."""
    last_epoch: int = NO_EPOCH
    """Epoch of the request that made the current pair, if its retry is to get the same answer; -1: none."""
    next_epoch: int = NO_EPOCH
    """The epoch that belongs to `next_producer_id`; -1: 0, as in Kafka's records."""
    unknown_tags: tuple[tuple[int, bytes], ...] = ()
    """Tagged fields that are not known here: numbers, ascending, and data."""
    is_behind: bool = False
    """Later records of the id may have been lost: epochs after this one may have been given to clients."""


def encode_txn_key(transactional_id: str) -> bytes:
    """TransactionLogKey v0. Raises `InvalidInput` for an id over 32,767 bytes."""
    data = transactional_id.encode()
    if len(data) > MAX_ID_BYTES:
        raise InvalidInput(f"a transactional id of {len(data)} bytes does not fit in a record: limit {MAX_ID_BYTES}")
    return _INT16.pack(KEY_VERSION) + _INT16.pack(len(data)) + data


def encode_txn_value(value: TxnValue) -> bytes:
    """TransactionLogValue v1, topics and partitions in ascending order."""
    parts = [
        _INT16.pack(VALUE_VERSION),
        _INT64.pack(value.producer_id),
        _INT16.pack(value.epoch),
        _INT32.pack(value.timeout_ms),
        _INT8.pack(value.state),
        _partitions(value),
        _INT64.pack(value.updated_ms),
        _INT64.pack(value.started_ms),
    ]
    tags = dict(value.unknown_tags)
    if value.previous_producer_id != NO_PRODUCER_ID:
        tags[PREVIOUS_PRODUCER_ID_TAG] = _INT64.pack(value.previous_producer_id)
    if value.next_producer_id != NO_PRODUCER_ID:
        tags[NEXT_PRODUCER_ID_TAG] = _INT64.pack(value.next_producer_id)
    if value.client_version:
        tags[CLIENT_VERSION_TAG] = _INT16.pack(value.client_version)
    if value.last_epoch != NO_EPOCH:
        tags[LAST_EPOCH_TAG] = _INT16.pack(value.last_epoch)
    if value.next_epoch != NO_EPOCH:
        tags[NEXT_EPOCH_TAG] = _INT16.pack(value.next_epoch)
    if value.is_behind:
        tags[BEHIND_TAG] = b""
    parts.append(_varint(len(tags)))
    for tag, data in sorted(tags.items()):
        parts += (_varint(tag), _varint(len(data)), data)
    return b"".join(parts)


def _partitions(value: TxnValue) -> bytes:
    if value.state is TxnState.EMPTY and not value.partitions:
        return b"\0"  # null, as Kafka writes it
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(value.partitions):
        topics.setdefault(topic, []).append(partition)
    parts = [_varint(len(topics) + 1)]
    for topic, indexes in topics.items():
        name = topic.encode()
        parts += (_varint(len(name) + 1), name, _varint(len(indexes) + 1))
        parts += (_INT32.pack(index) for index in indexes)
        parts.append(b"\0")
    return b"".join(parts)


def parse_txn_key(data: bytes) -> TxnKey | UnknownTxnKey:
    """Parse the key of a record. Raises `CorruptRecord`."""
    reader = _TxnFieldReader(data)
    version = reader.int16()
    if version != KEY_VERSION:
        return UnknownTxnKey(version)
    key = TxnKey(reader.string())
    reader.end()
    return key


def parse_txn_value(data: bytes) -> TxnValue:
    """TransactionLogValue v0 or v1. Raises `CorruptRecord`."""
    reader = _TxnFieldReader(data)
    reader.version()
    producer_id = reader.int64()
    epoch = reader.int16()
    timeout_ms = reader.int32()
    state = reader.state()
    partitions = reader.partitions()
    updated_ms = reader.int64()
    started_ms = reader.int64()
    tags = reader.tags()
    reader.end()
    return TxnValue(
        producer_id,
        epoch,
        timeout_ms,
        state,
        partitions,
        updated_ms,
        started_ms,
        previous_producer_id=_number(tags, PREVIOUS_PRODUCER_ID_TAG, _INT64, NO_PRODUCER_ID),
        next_producer_id=_number(tags, NEXT_PRODUCER_ID_TAG, _INT64, NO_PRODUCER_ID),
        client_version=_number(tags, CLIENT_VERSION_TAG, _INT16, 0),
        last_epoch=_number(tags, LAST_EPOCH_TAG, _INT16, NO_EPOCH),
        next_epoch=_number(tags, NEXT_EPOCH_TAG, _INT16, NO_EPOCH),
        is_behind=tags.pop(BEHIND_TAG, None) is not None,
        unknown_tags=tuple(tags.items()),
    )


def _number(tags: dict[int, bytes], tag: int, form: Struct, default: int) -> int:
    data = tags.pop(tag, None)
    if data is None:
        return default
    if len(data) != form.size:
        raise CorruptRecord(f"tag {tag} of a transaction's record has {len(data)} bytes, not {form.size}")
    (value,) = form.unpack(data)
    return int(value)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


class _TxnFieldReader:
    """Reads Kafka's primitives sequentially; uses compact encodings after `version` read a flexible version."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._flexible = False

    def version(self) -> None:
        version = self.int16()
        if not 0 <= version <= VALUE_VERSION:
            raise CorruptRecord(f"a transaction's record has value version {version}, which is unknown")
        self._flexible = version >= 1

    def int16(self) -> int:
        return self._unpack(_INT16)

    def int32(self) -> int:
        return self._unpack(_INT32)

    def int64(self) -> int:
        return self._unpack(_INT64)

    def state(self) -> TxnState:
        number = self._unpack(_INT8)
        try:
            return TxnState(number)
        except ValueError as error:
            raise CorruptRecord(f"a transaction's record has state {number}, which is unknown") from error

    def string(self) -> str:
        length = self._uvarint() - 1 if self._flexible else self.int16()
        if length < 0:
            raise CorruptRecord("a transaction's record has a null string where null is not allowed")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise CorruptRecord("a string in a transaction's record is not UTF-8") from error

    def partitions(self) -> frozenset[TxnPartition]:
        """The partitions by topic; null is none. Each is named once."""
        found: set[TxnPartition] = set()
        named = 0
        for _ in range(self._count(3 if self._flexible else 6, "topics", nullable=True)):
            topic = self.string()
            indexes = [self.int32() for _ in range(self._count(4, "partitions"))]
            if indexes and min(indexes) < 0:
                raise CorruptRecord(f"a transaction's record has the partition {min(indexes)} of a topic")
            found.update((topic, index) for index in indexes)
            named += len(indexes)
            self.tags()
        if named != len(found):
            raise CorruptRecord("a transaction's record names a partition twice")
        return frozenset(found)

    def tags(self) -> dict[int, bytes]:
        """The tagged fields of a flexible version, ascending."""
        found: dict[int, bytes] = {}
        if self._flexible:
            newest = -1
            for _ in range(self._uvarint()):
                tag = self._uvarint()
                if not newest < tag <= MAX_TAG:
                    raise CorruptRecord(f"a transaction's record has tag {tag} after tag {newest}")
                newest = tag
                found[tag] = self._take(self._uvarint())
        return found

    def end(self) -> None:
        if self._at != len(self._data):
            raise CorruptRecord(f"a transaction's record has {len(self._data) - self._at} bytes too many")

    def _count(self, least_bytes: int, what: str, *, nullable: bool = False) -> int:
        count = self._uvarint() - 1 if self._flexible else self.int32()
        if count == -1 and nullable:
            return 0
        if not 0 <= count <= (len(self._data) - self._at) // least_bytes:
            raise CorruptRecord(f"a transaction's record has an invalid number of {what}: {count}")
        return count

    def _unpack(self, form: Struct) -> int:
        try:
            (value,) = form.unpack_from(self._data, self._at)
        except struct.error as error:
            raise CorruptRecord("a transaction's record is truncated") from error
        self._at += form.size
        return int(value)

    def _take(self, length: int) -> bytes:
        end = self._at + length
        if length < 0 or end > len(self._data):
            raise CorruptRecord("a transaction's record is truncated")
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def _uvarint(self) -> int:
        value = 0
        for shift in range(0, 35, 7):
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise CorruptRecord("a transaction's record has a length of more than five bytes")

"""The records of `__consumer_offsets`, byte-identical to Kafka's. Described in docs/formats/consumer_offsets.md.

A key begins with an int16 type: 0 and 1 an offset commit, 2 a group's metadata. A value begins with an int16 version; a
null value is a tombstone. Written here: offset values v4 (v3 if the topic's id is not known, v1 with an expire
timestamp, as Kafka does) and group values v3. Read: all of v0–v4. Integers are big-endian, strings UTF-8.

Invariants: `parse_*(encode_*(x)) == x`; invalid bytes raise only `CorruptRecord`. An unknown key type (Kafka's newer
group types use 3 and up) parses to `UnknownKey`.

Entry: `parse_key`, `parse_offset_value`, `parse_group_value` and the encoders.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import NamedTuple

from tidelog.batch.errors import CorruptRecord
from tidelog.runtime.errors import InvalidInput

OFFSET_KEY_VERSION = 1
GROUP_KEY_VERSION = 2
OFFSET_VALUE_VERSION = 3
OFFSET_VALUE_VERSION_WITH_TOPIC_ID = 4
OFFSET_VALUE_VERSION_WITH_EXPIRY = 1
GROUP_VALUE_VERSION = 3
NEWEST_VALUE_VERSION = 4
FIRST_FLEXIBLE_VERSION = 4
TOPIC_ID_TAG = 0
NO_TOPIC_ID = bytes(16)
MAX_STRING_BYTES = 0x7FFF
"""Maximum size of a string: its length is an int16."""
NO_TIMESTAMP = -1

_INT16 = Struct(">h")
_INT32 = Struct(">i")
_INT64 = Struct(">q")


class OffsetKey(NamedTuple):
    """Key of a committed offset."""

    group: str
    topic: str
    partition: int


class GroupKey(NamedTuple):
    """Key of a group's metadata."""

    group: str


class UnknownKey(NamedTuple):
    """Key of an unknown type; its record is kept unchanged."""

    version: int


class OffsetValue(NamedTuple):
    """A committed offset."""

    offset: int
    leader_epoch: int
    """-1: unknown."""
    metadata: str
    commit_ms: int
    expire_ms: int = NO_TIMESTAMP
    """Expire time requested by a client of OffsetCommit v2–v4; -1: the group's retention applies."""
    topic_id: bytes = b""
    """Topic id at the time of the commit, 16 bytes; empty: unknown."""


class MemberValue(NamedTuple):
    """A member in a group's metadata. `subscription` and `assignment` are opaque."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


class GroupValue(NamedTuple):
    """A generation of a group: with members the group is Stable, without members Empty."""

    protocol_type: str
    generation: int
    protocol: str | None
    leader: str | None
    state_since_ms: int
    """When the group entered its state; -1: unknown."""
    members: tuple[MemberValue, ...]


def encode_offset_key(key: OffsetKey) -> bytes:
    """OffsetCommitKey v1. Raises `InvalidInput` for a string over 32,767 bytes."""
    return _INT16.pack(OFFSET_KEY_VERSION) + _string(key.group) + _string(key.topic) + _INT32.pack(key.partition)


def encode_group_key(group: str) -> bytes:
    """GroupMetadataKey v2. Raises `InvalidInput` for a string over 32,767 bytes."""
    return _INT16.pack(GROUP_KEY_VERSION) + _string(group)


def encode_offset_value(value: OffsetValue) -> bytes:
    """OffsetCommitValue v4, v3 (no topic id), or v1 (neither that nor a leader epoch) if there is an expire timestamp.

    Raises `InvalidInput`.
    """
    if value.expire_ms != NO_TIMESTAMP:
        return b"".join(
            (
                _INT16.pack(OFFSET_VALUE_VERSION_WITH_EXPIRY),
                _INT64.pack(value.offset),
                _string(value.metadata),
                _INT64.pack(value.commit_ms),
                _INT64.pack(value.expire_ms),
            )
        )
    if value.topic_id:
        metadata = value.metadata.encode()
        return b"".join(
            (
                _INT16.pack(OFFSET_VALUE_VERSION_WITH_TOPIC_ID),
                _INT64.pack(value.offset),
                _INT32.pack(value.leader_epoch),
                _varint(len(metadata) + 1),
                metadata,
                _INT64.pack(value.commit_ms),
                bytes((1, TOPIC_ID_TAG, len(NO_TOPIC_ID))),
                value.topic_id,
            )
        )
    return b"".join(
        (
            _INT16.pack(OFFSET_VALUE_VERSION),
            _INT64.pack(value.offset),
            _INT32.pack(value.leader_epoch),
            _string(value.metadata),
            _INT64.pack(value.commit_ms),
        )
    )


def encode_group_value(value: GroupValue) -> bytes:
    """GroupMetadataValue v3. Raises `InvalidInput` for a string over 32,767 bytes."""
    parts = [
        _INT16.pack(GROUP_VALUE_VERSION),
        _string(value.protocol_type),
        _INT32.pack(value.generation),
        _nullable_string(value.protocol),
        _nullable_string(value.leader),
        _INT64.pack(value.state_since_ms),
        _INT32.pack(len(value.members)),
    ]
    for member in value.members:
        parts += (
            _string(member.member_id),
            _nullable_string(member.instance_id),
            _string(member.client_id),
            _string(member.client_host),
            _INT32.pack(member.rebalance_timeout_ms),
            _INT32.pack(member.session_timeout_ms),
            _bytes(member.subscription),
            _bytes(member.assignment),
        )
    return b"".join(parts)


def parse_key(data: bytes) -> OffsetKey | GroupKey | UnknownKey:
    """Parse the key of a record. Raises `CorruptRecord`."""
    reader = _FieldReader(data)
    version = reader.int16()
    if version in (0, OFFSET_KEY_VERSION):
        key: OffsetKey | GroupKey = OffsetKey(reader.string(), reader.string(), reader.int32())
    elif version == GROUP_KEY_VERSION:
        key = GroupKey(reader.string())
    else:
        return UnknownKey(version)
    reader.end()
    return key


def parse_offset_value(data: bytes) -> OffsetValue:
    """OffsetCommitValue v0–v4. Raises `CorruptRecord`."""
    reader = _FieldReader(data)
    version = reader.version()
    offset = reader.int64()
    leader_epoch = reader.int32() if version >= 3 else -1
    metadata = reader.string()
    commit_ms = reader.int64()
    expire_ms = reader.int64() if version == OFFSET_VALUE_VERSION_WITH_EXPIRY else NO_TIMESTAMP
    topic_id = reader.tags().get(TOPIC_ID_TAG, NO_TOPIC_ID)
    reader.end()
    if len(topic_id) != len(NO_TOPIC_ID):
        raise CorruptRecord(f"a record of the offsets topic has a topic id of {len(topic_id)} bytes")
    return OffsetValue(offset, leader_epoch, metadata, commit_ms, expire_ms, topic_id if any(topic_id) else b"")


def parse_group_value(data: bytes) -> GroupValue:
    """GroupMetadataValue v0–v4. Raises `CorruptRecord`."""
    reader = _FieldReader(data)
    version = reader.version()
    protocol_type = reader.string()
    generation = reader.int32()
    protocol = reader.nullable_string()
    leader = reader.nullable_string()
    state_since_ms = reader.int64() if version >= 2 else NO_TIMESTAMP
    members = tuple(_member(reader, version) for _ in range(reader.count()))
    reader.tags()
    reader.end()
    return GroupValue(protocol_type, generation, protocol, leader, state_since_ms, members)


def _member(reader: _FieldReader, version: int) -> MemberValue:
    member_id = reader.string()
    instance_id = reader.nullable_string() if version >= 3 else None
    client_id = reader.string()
    client_host = reader.string()
    rebalance_timeout_ms = reader.int32() if version >= 1 else -1
    session_timeout_ms = reader.int32()
    subscription = reader.data()
    assignment = reader.data()
    reader.tags()
    if rebalance_timeout_ms < 0:
        rebalance_timeout_ms = session_timeout_ms  # as for JoinGroup v0, which has one time-out for both
    return MemberValue(
        member_id,
        instance_id,
        client_id,
        client_host,
        rebalance_timeout_ms,
        session_timeout_ms,
        subscription,
        assignment,
    )


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _string(text: str) -> bytes:
    data = text.encode()
    if len(data) > MAX_STRING_BYTES:
        raise InvalidInput(f"a string of {len(data)} bytes does not fit in a record of the offsets topic")
    return _INT16.pack(len(data)) + data


def _nullable_string(text: str | None) -> bytes:
    return _INT16.pack(-1) if text is None else _string(text)


def _bytes(data: bytes) -> bytes:
    return _INT32.pack(len(data)) + data


class _FieldReader:
    """Reads Kafka's primitives sequentially; uses compact encodings after `version` read a flexible version."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._flexible = False

    def version(self) -> int:
        version = self.int16()
        if not 0 <= version <= NEWEST_VALUE_VERSION:
            raise CorruptRecord(f"a record of the offsets topic has value version {version}, which is unknown")
        self._flexible = version >= FIRST_FLEXIBLE_VERSION
        return version

    def int16(self) -> int:
        return self._unpack(_INT16)

    def int32(self) -> int:
        return self._unpack(_INT32)

    def int64(self) -> int:
        return self._unpack(_INT64)

    def string(self) -> str:
        text = self.nullable_string()
        if text is None:
            raise CorruptRecord("a record of the offsets topic has a null string where null is not allowed")
        return text

    def nullable_string(self) -> str | None:
        length = self._uvarint() - 1 if self._flexible else self.int16()
        if length == -1:
            return None
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise CorruptRecord("a string in a record of the offsets topic is not UTF-8") from error

    def data(self) -> bytes:
        return self._take(self._uvarint() - 1 if self._flexible else self.int32())

    def count(self) -> int:
        count = self._uvarint() - 1 if self._flexible else self.int32()
        if not 0 <= count <= len(self._data) - self._at:
            raise CorruptRecord(f"a record of the offsets topic has an invalid number of members: {count}")
        return count

    def tags(self) -> dict[int, bytes]:
        """The tagged fields of a flexible version, optional by definition."""
        found: dict[int, bytes] = {}
        if self._flexible:
            for _ in range(self._uvarint()):
                tag = self._uvarint()
                found[tag] = self._take(self._uvarint())
        return found

    def end(self) -> None:
        if self._at != len(self._data):
            raise CorruptRecord(f"a record of the offsets topic has {len(self._data) - self._at} bytes too many")

    def _unpack(self, form: Struct) -> int:
        try:
            (value,) = form.unpack_from(self._data, self._at)
        except struct.error as error:
            raise CorruptRecord("a record of the offsets topic is truncated") from error
        self._at += form.size
        return int(value)

    def _take(self, length: int) -> bytes:
        end = self._at + length
        if length < 0 or end > len(self._data):
            raise CorruptRecord("a record of the offsets topic is truncated")
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
        raise CorruptRecord("a record of the offsets topic has a length of more than five bytes")

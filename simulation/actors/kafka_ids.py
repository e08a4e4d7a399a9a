"""The requests of `tidelog.simulation.actors.kafka` with topic ids: a request for a deleted topic does not reach a new
one of the same name (KIP-516).

The versions are the first with ids, or later; all are flexible (KIP-482): compact lengths, tagged fields. Entry: the
functions named as the APIs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tidelog.simulation.actors.kafka import Fetched, FieldReader, Leader, PartitionInfo, Produced, Request

UNKNOWN_TOPIC_ID = 100
NO_ID = bytes(16)
_NO_TAGS = b"\0"
_LEADER = struct.Struct(">ii")
_PRODUCE_LEADER_TAG = 0
_FETCH_LEADER_TAG = 1


class _Reader(FieldReader):
    """Also reads flexible fields."""

    def varint(self) -> int:
        """Read an unsigned varint."""
        value = shift = 0
        while True:
            byte = self.i8() & 0xFF
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def take(self, size: int) -> bytes:
        """Read raw bytes."""
        raw = self.data[self.at : self.at + size]
        self.at += size
        return raw

    def compact(self) -> bytes:
        """Read a string or bytes; null as empty."""
        return self.take(max(0, self.varint() - 1))

    def rows(self, read: Callable[[], Any], leader_tag: int = -1) -> list[Any]:
        """Read an array of structures; null as empty. `leader_tag`: the tag of their `leader`."""
        found = []
        for _ in range(max(0, self.varint() - 1)):
            one = read()
            told = self.tags().get(leader_tag)
            found.append(one if told is None else one._replace(leader=Leader(*_LEADER.unpack_from(told))))
        return found

    def numbers(self) -> None:
        """Skip an array of int32."""
        self.take(4 * max(0, self.varint() - 1))

    def tags(self) -> dict[int, bytes]:
        """Read tagged fields."""
        return {self.varint(): self.take(self.varint()) for _ in range(self.varint())}


def _varint(value: int) -> bytes:
    raw = bytearray()
    while value >= 0x80:
        raw.append(value & 0x7F | 0x80)
        value >>= 7
    raw.append(value)
    return bytes(raw)


def _compact(value: bytes | None) -> bytes:
    return b"\0" if value is None else _varint(len(value) + 1) + value


def _rows(items: Iterable[bytes]) -> bytes:
    rows = list(items)
    return _varint(len(rows) + 1) + b"".join(row + _NO_TAGS for row in rows)


def _request(api_key: int, version: int, body: bytes, read: Callable[[_Reader], Any]) -> Request:
    def skip_header(r: FieldReader) -> Any:
        flexible = _Reader(r.data, r.at)
        flexible.tags()
        return read(flexible)

    return Request(api_key, version, body + _NO_TAGS, skip_header, _NO_TAGS)


def metadata(topic_id: bytes, name: str = "") -> Request:
    """Request one topic by id, or by name if the id is `NO_ID`.

    Returns (brokers as {id: (host, port)}, error, topic id, [`PartitionInfo`]).
    """
    topic = topic_id + _compact(name.encode() if name else None)

    def read(r: _Reader) -> tuple[dict[int, tuple[str, int]], int, bytes, list[PartitionInfo]]:
        r.i32()

        def broker() -> tuple[int, tuple[str, int]]:
            node_id, host, port = r.i32(), r.compact().decode(), r.i32()
            r.compact()
            return node_id, (host, port)

        brokers = dict(r.rows(broker))
        r.compact()
        r.i32()

        def partition() -> PartitionInfo:
            found = PartitionInfo(r.i16(), r.i32(), r.i32(), r.i32())
            for _ in range(3):
                r.numbers()
            return found

        def one() -> tuple[int, bytes, list[PartitionInfo]]:
            error, _name, found, _internal = r.i16(), r.compact(), r.take(16), r.i8()
            partitions = r.rows(partition)
            r.i32()
            return error, found, partitions

        return brokers, *r.rows(one)[0]

    return _request(3, 12, _rows([topic]) + b"\0\0", read)


def produce(topic_id: bytes, partition: int, batch: bytes, acks: int, timeout_ms: int) -> Request:
    """Returns `Produced`."""
    part = struct.pack(">i", partition) + _compact(batch)
    body = _compact(None) + struct.pack(">hi", acks, timeout_ms) + _rows([topic_id + _rows([part])])

    def read(r: _Reader) -> Produced:
        def one() -> Produced:
            r.i32()
            error, offset, _time, start = r.i16(), r.i64(), r.i64(), r.i64()
            r.rows(lambda: (r.i32(), r.compact()))
            r.compact()
            return Produced(error, offset, start)

        def per_topic() -> list[Produced]:
            r.take(16)
            return r.rows(one, _PRODUCE_LEADER_TAG)

        found: Produced = r.rows(per_topic)[0][0]
        return found

    return _request(0, 13, body, read)


def fetch(
    wanted: Mapping[tuple[str, int], int], ids: Mapping[str, bytes], max_wait_ms: int, max_bytes: int, rack: str = ""
) -> Request:
    """As `kafka.fetch`; `ids` has the topics'."""
    topics: dict[str, list[bytes]] = {}
    for (topic, partition), offset in wanted.items():
        part = struct.pack(">iiqiqi", partition, -1, offset, -1, -1, max_bytes)
        topics.setdefault(topic, []).append(part)
    names = {ids[topic]: topic for topic in topics}
    body = struct.pack(">iiibii", max_wait_ms, 1, max_bytes, 0, 0, -1)
    body += _rows(ids[topic] + _rows(parts) for topic, parts in topics.items()) + _rows([])
    body += _compact(rack.encode())

    def read(r: _Reader) -> tuple[int, list[Fetched]]:
        r.i32()
        error = r.i16()
        r.i32()
        found: list[Fetched] = []

        def one(topic: str) -> Fetched:
            index, code, high, _stable, start = r.i32(), r.i16(), r.i64(), r.i64(), r.i64()
            r.rows(lambda: (r.i64(), r.i64()))
            preferred = r.i32()
            return Fetched(topic, index, code, high, start, r.compact(), preferred=preferred)

        def per_topic() -> None:
            topic = names[r.take(16)]
            found.extend(r.rows(lambda: one(topic), _FETCH_LEADER_TAG))

        r.rows(per_topic)
        return error, found

    return _request(1, 16, body, read)


def delete_topic(topic_id: bytes, timeout_ms: int) -> Request:
    """Returns the error."""
    body = _rows([_compact(None) + topic_id]) + struct.pack(">i", timeout_ms)

    def read(r: _Reader) -> int:
        r.i32()

        def one() -> int:
            r.compact()
            r.take(16)
            error = r.i16()
            r.compact()
            return error

        found: int = r.rows(one)[0]
        return found

    return _request(20, 6, body, read)

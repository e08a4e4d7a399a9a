"""A small sans-I/O Kafka client: the requests of the workloads, and the decoding of responses.

Written from the protocol's message definitions, independent of the broker's codecs, so that their errors do not cancel
out. Each API has its latest version before flexible fields, except where noted. A response is plain tuples. Entry: the
functions named as the APIs, each returning a `Request`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tidelog.simulation.actors.sessions import WITHOUT, InSession

EARLIEST = -2
LATEST = -1


class FieldReader:
    """Reads big-endian fields in order."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def _take(self, form: struct.Struct) -> int:
        value: int = form.unpack_from(self.data, self.at)[0]
        self.at += form.size
        return value

    def i8(self) -> int:
        """Read one byte."""
        return self._take(_I8)

    def i16(self) -> int:
        """Read two bytes."""
        return self._take(_I16)

    def i32(self) -> int:
        """Read four bytes."""
        return self._take(_I32)

    def i64(self) -> int:
        """Read eight bytes."""
        return self._take(_I64)

    def text(self) -> str:
        """Read a string; null as empty."""
        size = self.i16()
        raw = self.data[self.at : self.at + max(0, size)]
        self.at += max(0, size)
        return raw.decode()

    def blob(self) -> bytes:
        """Read bytes; null as empty."""
        size = max(0, self.i32())
        raw = self.data[self.at : self.at + size]
        self.at += size
        return raw

    def array(self, read: Callable[[], Any]) -> list[Any]:
        """Read an array; null as empty."""
        return [read() for _ in range(max(0, self.i32()))]


_I8, _I16, _I32, _I64 = (struct.Struct(form) for form in (">b", ">h", ">i", ">q"))


def text(value: str | None) -> bytes:
    """Encode a string."""
    if value is None:
        return b"\xff\xff"
    raw = value.encode()
    return _I16.pack(len(raw)) + raw


def _blob(value: bytes) -> bytes:
    return _I32.pack(len(value)) + value


def array(items: Iterable[bytes]) -> bytes:
    """Encode an array of structures."""
    rows = list(items)
    return _I32.pack(len(rows)) + b"".join(rows)


class Request(NamedTuple):
    """One request: its API, its body, and the decoder of its response."""

    api_key: int
    version: int
    body: bytes
    read: Callable[[FieldReader], Any]
    tags: bytes = b""
    """Tagged fields of the header, from the first flexible version on."""

    def frame(self, correlation_id: int, client_id: str) -> bytes:
        """Return the encoded request frame."""
        head = struct.pack(">hhi", self.api_key, self.version, correlation_id) + text(client_id) + self.tags
        return _I32.pack(len(head) + len(self.body)) + head + self.body


class PartitionInfo(NamedTuple):
    """A partition in a Metadata response."""

    error: int
    number: int
    leader: int
    leader_epoch: int


class TopicInfo(NamedTuple):
    """A topic in a Metadata response."""

    error: int
    name: str
    partitions: list[PartitionInfo]


def metadata(topics: Sequence[str]) -> Request:
    """Returns (brokers as {id: (host, port)}, [`TopicInfo`])."""

    def read(r: FieldReader) -> tuple[dict[int, tuple[str, int]], list[TopicInfo]]:
        r.i32()
        brokers = {}
        for _ in range(r.i32()):
            node_id, host, port = r.i32(), r.text(), r.i32()
            r.text()
            brokers[node_id] = (host, port)
        r.text()
        r.i32()

        def partition() -> PartitionInfo:
            found = PartitionInfo(r.i16(), r.i32(), r.i32(), r.i32())
            for _ in range(3):
                r.array(r.i32)
            return found

        def topic() -> TopicInfo:
            error, name, _internal = r.i16(), r.text(), r.i8()
            return TopicInfo(error, name, r.array(partition))

        return brokers, r.array(topic)

    return Request(3, 7, array(map(text, topics)) + b"\x00", read)


class Leader(NamedTuple):
    """The leader of a partition, from another broker's error response (KIP-951)."""

    broker: int
    epoch: int


class Produced(NamedTuple):
    """The result of Produce for one partition."""

    error: int
    offset: int
    log_start: int
    leader: Leader | None = None


def produce(topic: str, partition: int, batch: bytes, acks: int, timeout_ms: int) -> Request:
    """Returns `Produced`."""
    part = _I32.pack(partition) + _blob(batch)
    body = text(None) + struct.pack(">hi", acks, timeout_ms) + array([text(topic) + array([part])])

    def read(r: FieldReader) -> Produced:
        def one() -> Produced:
            r.i32()
            error, offset, _time, start = r.i16(), r.i64(), r.i64(), r.i64()
            return Produced(error, offset, start)

        def per_topic() -> list[Produced]:
            r.text()
            return r.array(one)

        found: Produced = r.array(per_topic)[0][0]
        return found

    return Request(0, 7, body, read)


class Fetched(NamedTuple):
    """The result of Fetch for one partition."""

    topic: str
    partition: int
    error: int
    high_watermark: int
    log_start: int
    records: bytes
    leader: Leader | None = None
    preferred: int = -1
    """The broker to fetch from instead (KIP-392); -1: this one."""
    stable: int = -1
    """The last stable offset."""
    aborted: tuple[tuple[int, int], ...] = ()
    """Producer id and first offset of aborted transactions, for a read_committed reader."""


class FetchAnswer(NamedTuple):
    """The result of Fetch."""

    error: int
    session: int
    """0: there is no session."""
    partitions: list[Fetched]


def by_topic(places: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Return the partitions of each topic."""
    found: dict[str, list[int]] = {}
    for topic, partition in places:
        found.setdefault(topic, []).append(partition)
    return found


def fetch(
    wanted: Mapping[tuple[str, int], int],
    max_wait_ms: int,
    max_bytes: int,
    rack: str = "",
    session: InSession = WITHOUT,
    *,
    committed: bool = False,
) -> Request:
    """From these offsets by (topic, partition), as a consumer in that rack, which may want `committed` records only.

    Returns `FetchAnswer`.
    """

    def part(partition: int, offset: int) -> bytes:
        return struct.pack(">iiqqi", partition, -1, offset, -1, max_bytes)

    topics: dict[str, list[bytes]] = {}
    for (topic, partition), offset in wanted.items():
        topics.setdefault(topic, []).append(part(partition, offset))
    body = struct.pack(">iiiibii", -1, max_wait_ms, 1, max_bytes, committed, session.session, session.epoch)
    body += array(text(topic) + array(parts) for topic, parts in topics.items())
    body += array(text(topic) + array(map(_I32.pack, found)) for topic, found in by_topic(session.forgotten).items())
    body += text(rack)

    def read(r: FieldReader) -> FetchAnswer:
        r.i32()
        error = r.i16()
        session_id = r.i32()
        found: list[Fetched] = []
        for _ in range(r.i32()):
            topic = r.text()
            for _ in range(r.i32()):
                index, code, high, stable, start = r.i32(), r.i16(), r.i64(), r.i64(), r.i64()
                aborted = r.array(lambda: (r.i64(), r.i64()))
                preferred = r.i32()
                records = r.blob()
                found.append(Fetched(topic, index, code, high, start, records, None, preferred, stable, tuple(aborted)))
        return FetchAnswer(error, session_id, found)

    return Request(1, 11, body, read)


def list_offsets(topic: str, partition: int, timestamp: int, *, committed: bool = False) -> Request:
    """Returns (error, offset)."""
    part = struct.pack(">iiq", partition, -1, timestamp)
    body = struct.pack(">ib", -1, committed) + array([text(topic) + array([part])])

    def read(r: FieldReader) -> tuple[int, int]:
        r.i32()

        def one() -> tuple[int, int]:
            r.i32()
            error, _time, offset, _epoch = r.i16(), r.i64(), r.i64(), r.i32()
            return error, offset

        def per_topic() -> list[tuple[int, int]]:
            r.text()
            return r.array(one)

        found: tuple[int, int] = r.array(per_topic)[0][0]
        return found

    return Request(2, 4, body, read)


def init_producer_id() -> Request:
    """Returns (error, producer id, epoch)."""

    def read(r: FieldReader) -> tuple[int, int, int]:
        r.i32()
        return r.i16(), r.i64(), r.i16()

    return Request(22, 1, text(None) + _I32.pack(60_000), read)


def create_topic(name: str, partitions: int, configs: Mapping[str, str], timeout_ms: int) -> Request:
    """Returns (error, message)."""
    rows = array(text(key) + text(value) for key, value in configs.items())
    topic = text(name) + struct.pack(">ih", partitions, 1) + array([]) + rows

    def read(r: FieldReader) -> tuple[int, str]:
        r.i32()
        r.i32()
        r.text()
        return r.i16(), r.text()

    return Request(19, 4, array([topic]) + struct.pack(">ib", timeout_ms, 0), read)


def delete_topic(name: str, timeout_ms: int) -> Request:
    """Returns the error."""

    def read(r: FieldReader) -> int:
        r.i32()
        r.i32()
        r.text()
        return r.i16()

    return Request(20, 3, array([text(name)]) + _I32.pack(timeout_ms), read)


def create_partitions(topic: str, total: int, timeout_ms: int) -> Request:
    """Returns the error."""
    one = text(topic) + _I32.pack(total) + _I32.pack(-1)

    def read(r: FieldReader) -> int:
        r.i32()
        r.i32()
        r.text()
        return r.i16()

    return Request(37, 1, array([one]) + struct.pack(">ib", timeout_ms, 0), read)


def delete_records(topic: str, partition: int, offset: int, timeout_ms: int) -> Request:
    """Returns (error, log start)."""
    part = struct.pack(">iq", partition, offset)
    body = array([text(topic) + array([part])]) + _I32.pack(timeout_ms)

    def read(r: FieldReader) -> tuple[int, int]:
        r.i32()
        r.i32()
        r.text()
        r.i32()
        r.i32()
        start = r.i64()
        return r.i16(), start

    return Request(21, 1, body, read)


def find_coordinator(key: str, *, of_transactions: bool = False) -> Request:
    """Of a group, or of a transactional id. Returns (error, (host, port))."""

    def read(r: FieldReader) -> tuple[int, tuple[str, int]]:
        r.i32()
        error = r.i16()
        r.text()
        r.i32()
        return error, (r.text(), r.i32())

    return Request(10, 2, text(key) + struct.pack(">b", of_transactions), read)


class Joined(NamedTuple):
    """The result of JoinGroup."""

    error: int
    generation: int
    leader: str
    member: str
    members: list[tuple[str, bytes]]


def join_group(group: str, member: str, session_ms: int, rebalance_ms: int, topics: Sequence[str]) -> Request:
    """Subscribe to `topics` with a single protocol. Returns `Joined`."""
    subscription = _I16.pack(0) + array(map(text, topics)) + _I32.pack(-1)
    body = text(group) + struct.pack(">ii", session_ms, rebalance_ms) + text(member) + text(None)
    body += text("consumer") + array([text("range") + _blob(subscription)])

    def read(r: FieldReader) -> Joined:
        r.i32()
        error, generation = r.i16(), r.i32()
        r.text()
        leader, name = r.text(), r.text()

        def one() -> tuple[str, bytes]:
            each = r.text()
            r.text()
            return each, r.blob()

        return Joined(error, generation, leader, name, r.array(one))

    return Request(11, 5, body, read)


Assignment = list[tuple[str, int]]


def sync_group(group: str, generation: int, member: str, assignments: Mapping[str, Assignment]) -> Request:
    """Returns (error, this member's assignment)."""

    def encode(assignment: Assignment) -> bytes:
        topics: dict[str, list[int]] = {}
        for topic, partition in assignment:
            topics.setdefault(topic, []).append(partition)
        rows = array(text(topic) + array(map(_I32.pack, indexes)) for topic, indexes in topics.items())
        return _I16.pack(0) + rows + _I32.pack(-1)

    body = text(group) + _I32.pack(generation) + text(member) + text(None)
    body += array(text(each) + _blob(encode(one)) for each, one in assignments.items())

    def read(r: FieldReader) -> tuple[int, Assignment]:
        r.i32()
        error = r.i16()
        raw = r.blob()
        found: Assignment = []
        if raw:
            inner = FieldReader(raw, 2)
            for _ in range(inner.i32()):
                topic = inner.text()
                found.extend((topic, index) for index in inner.array(inner.i32))
        return error, found

    return Request(14, 3, body, read)


def heartbeat(group: str, generation: int, member: str) -> Request:
    """Returns the error."""
    body = text(group) + _I32.pack(generation) + text(member) + text(None)

    def read(r: FieldReader) -> int:
        r.i32()
        return r.i16()

    return Request(12, 3, body, read)


def leave_group(group: str, member: str) -> Request:
    """Returns the error."""

    def read(r: FieldReader) -> int:
        r.i32()
        return r.i16()

    return Request(13, 2, text(group) + text(member), read)


def offset_commit(group: str, generation: int, member: str, topic: str, partition: int, offset: int) -> Request:
    """Returns the error."""
    part = struct.pack(">iqi", partition, offset, -1) + text(None)
    body = text(group) + _I32.pack(generation) + text(member) + text(None) + array([text(topic) + array([part])])

    def read(r: FieldReader) -> int:
        r.i32()
        r.i32()
        r.text()
        r.i32()
        r.i32()
        return r.i16()

    return Request(8, 7, body, read)


def offset_fetch(group: str, topic: str, partition: int) -> Request:
    """Returns (error, offset or -1)."""
    body = text(group) + array([text(topic) + array([_I32.pack(partition)])])

    def read(r: FieldReader) -> tuple[int, int]:
        r.i32()
        offset, error = -1, 0
        for _ in range(r.i32()):
            r.text()
            for _ in range(r.i32()):
                r.i32()
                offset = r.i64()
                r.i32()
                r.text()
                error = r.i16()
        return r.i16() or error, offset

    return Request(9, 5, body, read)

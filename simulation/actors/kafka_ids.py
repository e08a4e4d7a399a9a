"""The requests of `tidelog.simulation.actors.kafka` with topic ids: a request for a deleted topic does not reach a new
one of the same name (KIP-516).

The versions are the first with ids, or later; all are flexible (`tidelog.simulation.actors.kafka_flexible`). Entry: the
functions named as the APIs.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from tidelog.simulation.actors.kafka import FetchAnswer, Fetched, PartitionInfo, Produced, Request, by_topic
from tidelog.simulation.actors.kafka_flexible import FlexibleReader, compact, numbers, request, rows
from tidelog.simulation.actors.sessions import WITHOUT, InSession

UNKNOWN_TOPIC_ID = 100
NO_ID = bytes(16)
_PRODUCE_LEADER_TAG = 0
_FETCH_LEADER_TAG = 1


def metadata(topic_id: bytes, name: str = "") -> Request:
    """Request one topic by id, or by name if the id is `NO_ID`.

    Returns (brokers as {id: (host, port)}, error, topic id, [`PartitionInfo`]).
    """
    topic = topic_id + compact(name.encode() if name else None)

    def read(r: FlexibleReader) -> tuple[dict[int, tuple[str, int]], int, bytes, list[PartitionInfo]]:
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

    return request(3, 12, rows([topic]) + b"\0\0", read)


def produce(topic_id: bytes, partition: int, batch: bytes, acks: int, timeout_ms: int) -> Request:
    """Returns `Produced`."""
    part = struct.pack(">i", partition) + compact(batch)
    body = compact(None) + struct.pack(">hi", acks, timeout_ms) + rows([topic_id + rows([part])])

    def read(r: FlexibleReader) -> Produced:
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

    return request(0, 13, body, read)


def fetch(
    wanted: Mapping[tuple[str, int], int],
    ids: Mapping[str, bytes],
    max_wait_ms: int,
    max_bytes: int,
    rack: str = "",
    session: InSession = WITHOUT,
    *,
    committed: bool = False,
) -> Request:
    """As `kafka.fetch`; `ids` has the topics', and those of a session that are not in the request."""
    topics: dict[str, list[bytes]] = {}
    for (topic, partition), offset in wanted.items():
        part = struct.pack(">iiqiqi", partition, -1, offset, -1, -1, max_bytes)
        topics.setdefault(topic, []).append(part)
    names = {topic_id: topic for topic, topic_id in ids.items()}
    body = struct.pack(">iiibii", max_wait_ms, 1, max_bytes, committed, session.session, session.epoch)
    body += rows(ids[topic] + rows(parts) for topic, parts in topics.items())
    body += rows(ids[topic] + numbers(found) for topic, found in by_topic(session.forgotten).items())
    body += compact(rack.encode())

    def read(r: FlexibleReader) -> FetchAnswer:
        r.i32()
        error = r.i16()
        session_id = r.i32()
        found: list[Fetched] = []

        def one(topic: str) -> Fetched:
            index, code, high, stable, start = r.i32(), r.i16(), r.i64(), r.i64(), r.i64()
            aborted = r.rows(lambda: (r.i64(), r.i64()))
            preferred = r.i32()
            records = r.compact()
            return Fetched(topic, index, code, high, start, records, None, preferred, stable, tuple(aborted))

        def per_topic() -> None:
            topic = names[r.take(16)]
            found.extend(r.rows(lambda: one(topic), _FETCH_LEADER_TAG))

        r.rows(per_topic)
        return FetchAnswer(error, session_id, found)

    return request(1, 16, body, read)


def delete_topic(topic_id: bytes, timeout_ms: int) -> Request:
    """Returns the error."""
    body = rows([compact(None) + topic_id]) + struct.pack(">i", timeout_ms)

    def read(r: FlexibleReader) -> int:
        r.i32()

        def one() -> int:
            r.compact()
            r.take(16)
            error = r.i16()
            r.compact()
            return error

        found: int = r.rows(one)[0]
        return found

    return request(20, 6, body, read)

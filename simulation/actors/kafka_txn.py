"""The requests of transactional clients, by topic name; all are flexible (`tidelog.simulation.actors.kafka_flexible`).

A client is old or new: a new one (`transaction.version` 2, KIP-890) adds no partitions itself, and gets its next pair
of producer id and epoch with the answer of EndTxn. Entry: the functions named as the APIs.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidelog.simulation.actors.kafka import Produced, Request
from tidelog.simulation.actors.kafka_flexible import FlexibleReader, compact, numbers, request, rows

_LEADER_TAG = 0


class Pair(NamedTuple):
    """A producer id and its epoch."""

    producer: int
    epoch: int


NO_PAIR = Pair(-1, -1)


def _text(value: str) -> bytes:
    return compact(value.encode())


def _who(transactional_id: str, pair: Pair) -> bytes:
    return _text(transactional_id) + struct.pack(">qh", *pair)


def init_producer_id(transactional_id: str, timeout_ms: int, pair: Pair, *, new: bool) -> Request:
    """`pair`: the one that the client has, if any (KIP-360). Returns (error, `Pair`)."""

    def read(r: FlexibleReader) -> tuple[int, Pair]:
        r.i32()
        return r.i16(), Pair(r.i64(), r.i16())

    return request(22, 5 if new else 4, _text(transactional_id) + struct.pack(">iqh", timeout_ms, *pair), read)


def add_partitions(transactional_id: str, pair: Pair, partitions: Mapping[str, Sequence[int]]) -> Request:
    """Returns the first error."""
    topics = rows(_text(topic) + numbers(indexes) for topic, indexes in partitions.items())

    def read(r: FlexibleReader) -> int:
        r.i32()

        def one() -> int:
            r.i32()
            return r.i16()

        def per_topic() -> list[int]:
            r.compact()
            return r.rows(one)

        codes = [code for codes in r.rows(per_topic) for code in codes]
        return next((code for code in codes if code), 0)

    return request(24, 3, _who(transactional_id, pair) + topics, read)


def add_offsets(transactional_id: str, pair: Pair, group: str) -> Request:
    """Returns the error."""

    def read(r: FlexibleReader) -> int:
        r.i32()
        return r.i16()

    return request(25, 3, _who(transactional_id, pair) + _text(group), read)


def produce(transactional_id: str, topic: str, partition: int, batch: bytes, timeout_ms: int, *, new: bool) -> Request:
    """Returns `Produced`."""
    part = struct.pack(">i", partition) + compact(batch)
    body = _text(transactional_id) + struct.pack(">hi", -1, timeout_ms) + rows([_text(topic) + rows([part])])

    def read(r: FlexibleReader) -> Produced:
        def one() -> Produced:
            r.i32()
            error, offset, _time, start = r.i16(), r.i64(), r.i64(), r.i64()
            r.rows(lambda: (r.i32(), r.compact()))
            r.compact()
            return Produced(error, offset, start)

        def per_topic() -> list[Produced]:
            r.compact()
            return r.rows(one, _LEADER_TAG)

        found: Produced = r.rows(per_topic)[0][0]
        return found

    return request(0, 12 if new else 11, body, read)


def txn_offset_commit(
    transactional_id: str, pair: Pair, group: str, topic: str, partition: int, offset: int, *, new: bool
) -> Request:
    """As a consumer that is no member of the group. Returns the error."""
    part = struct.pack(">iqi", partition, offset, -1) + compact(None)
    body = _text(transactional_id) + _text(group) + struct.pack(">qhi", *pair, -1) + _text("") + compact(None)
    body += rows([_text(topic) + rows([part])])

    def read(r: FlexibleReader) -> int:
        r.i32()

        def one() -> int:
            r.i32()
            return r.i16()

        def per_topic() -> list[int]:
            r.compact()
            return r.rows(one)

        code: int = r.rows(per_topic)[0][0]
        return code

    return request(28, 5 if new else 3, body, read)


def end_txn(transactional_id: str, pair: Pair, *, commit: bool, new: bool) -> Request:
    """Returns (error, the next `Pair`, which is `pair` for old clients)."""

    def read(r: FlexibleReader) -> tuple[int, Pair]:
        r.i32()
        error = r.i16()
        return error, Pair(r.i64(), r.i16()) if new else pair

    return request(26, 5 if new else 4, _who(transactional_id, pair) + struct.pack(">b", commit), read)


def offset_fetch(group: str, topic: str, partition: int) -> Request:
    """Requires a stable offset (KIP-447). Returns (error, offset or -1)."""

    def read(r: FlexibleReader) -> tuple[int, int]:
        r.i32()

        def one() -> tuple[int, int]:
            r.i32()
            offset, _epoch = r.i64(), r.i32()
            r.compact()
            return r.i16(), offset

        def per_topic() -> list[tuple[int, int]]:
            r.compact()
            return r.rows(one)

        found = [each for topics in r.rows(per_topic) for each in topics]
        error = r.i16()
        code, offset = found[0] if found else (0, -1)
        return error or code, offset

    return request(9, 7, _text(group) + rows([_text(topic) + numbers([partition])]) + b"\1", read)


def describe_transactions(transactional_id: str) -> Request:
    """Returns (error, the name of the state)."""

    def read(r: FlexibleReader) -> tuple[int, str]:
        r.i32()

        def one() -> tuple[int, str]:
            error, _name, state = r.i16(), r.compact(), r.compact().decode()
            r.i32(), r.i64(), r.i64(), r.i16()
            r.rows(lambda: (r.compact(), r.numbers()))
            return error, state

        found: tuple[int, str] = r.rows(one)[0]
        return found

    return request(65, 0, b"\2" + _text(transactional_id), read)

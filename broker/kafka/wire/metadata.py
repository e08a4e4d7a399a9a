"""The topics of a Metadata response (API key 3), versions 0–13, hand-written.

A client of ten thousand partitions gets all of them in each response, and kio's writers take 25 µs per partition.

Topic: `error int16, name, topic id (16 bytes, v10+), is internal int8 (v1+), [partition], topic authorized operations
int32 (v8+)`. Partition: `error int16, index int32, leader id int32, leader epoch int32 (v7+), replicas [int32], in sync
[int32], offline [int32] (v5+)`. From v9 on the encoding is flexible (KIP-482).

The rest of the response is encoded by kio: `join` inserts the topics into a response encoded without topics. Tests
compare the result byte by byte with kio's.

Entry: `encode_topic`, `join`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple

from tidelog.broker.kafka.wire.primitives import write_count, write_string

FIRST_FLEXIBLE = 9
_ERROR = Struct(">h")
_INT32 = Struct(">i")
_HEAD = Struct(">hii")
_HEAD_WITH_EPOCH = Struct(">hiii")
_NO_TAGS = 0
_NO_TOPIC_ID = bytes(16)


class PartitionPart(NamedTuple):
    """One partition of a topic."""

    error_code: int
    partition_index: int
    leader_id: int
    """-1: no leader."""
    leader_epoch: int
    replicas: Sequence[int]
    in_sync: Sequence[int]
    offline: Sequence[int]


def encode_topic(
    version: int,
    *,
    error_code: int,
    name: str | None,
    topic_id: bytes,
    is_internal: bool,
    partitions: Iterable[PartitionPart],
    authorized_operations: int,
) -> bytes:
    """Encode one element of the array of topics. `topic_id`: 16 bytes, or empty for none."""
    flexible = version >= FIRST_FLEXIBLE
    rows = list(partitions)
    out = bytearray(_ERROR.pack(error_code))
    write_string(out, name, flexible)
    if version >= 10:
        out += topic_id or _NO_TOPIC_ID
    if version >= 1:
        out.append(is_internal)
    write_count(out, len(rows), flexible)
    brokers: dict[tuple[Sequence[int], Sequence[int], Sequence[int]], bytes] = {}
    for row in rows:
        if version >= 7:
            out += _HEAD_WITH_EPOCH.pack(*row[:4])
        else:
            out += _HEAD.pack(*row[:3])
        tail = brokers.get(row[4:])
        if tail is None:  # most partitions have the same brokers as the previous one
            tail = brokers[row[4:]] = _brokers(version, row, flexible)
        out += tail
    if version >= 8:
        out += _INT32.pack(authorized_operations)
    if flexible:
        out.append(_NO_TAGS)
    return bytes(out)


def _brokers(version: int, row: PartitionPart, flexible: bool) -> bytes:
    out = bytearray()
    for ids in (row.replicas, row.in_sync, row.offline)[: 3 if version >= 5 else 2]:
        write_count(out, len(ids), flexible)
        for broker_id in ids:
            out += _INT32.pack(broker_id)
    if flexible:
        out.append(_NO_TAGS)
    return bytes(out)


def join(version: int, without_topics: bytes, topics: Sequence[bytes]) -> bytes:
    """Build the body of a response from `without_topics`, the same response with an empty array."""
    flexible = version >= FIRST_FLEXIBLE
    after = (4 if 8 <= version <= 10 else 0) + (2 if version >= 13 else 0) + (1 if flexible else 0)
    at = len(without_topics) - after
    out = bytearray(without_topics[: at - (1 if flexible else 4)])
    write_count(out, len(topics), flexible)
    return b"".join((out, *topics, without_topics[at:]))

"""Fetch (API key 1), versions 4–18, hand-written: a response is a list of buffers, and records are not copied.

Request: `replica id int32 (to v14), max wait int32, min bytes int32, max bytes int32, isolation int8, session id int32
and epoch int32 (v7+), [topic name (v13+: id 16 bytes), [partition int32, current leader epoch int32 (v9+), fetch offset
int64, last fetched epoch int32 (v12+), log start offset int64 (v5+), partition max bytes int32]], [forgotten topic,
[partition int32]] (v7+), rack (v11+)`, flexible from v12 with tags 0 cluster id, 1 replica state, and in a partition 0
replica directory (v17+), 1 high watermark of a follower (v18, KIP-1166). The last two are Kafka's brokers' own and
skipped.

Response: `throttle int32, error int16 and session id int32 (v7+), [topic, [partition int32, error int16, high watermark
int64, last stable offset int64, log start offset int64 (v5+), [producer id int64, first offset int64], preferred read
replica int32 (v11+), records, tags 0 diverging epoch, 1 current leader (v12+)]], tag 0: node endpoints (v16+)`.

Tests compare both directions byte by byte with kio for all versions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from struct import Struct
from typing import ClassVar, NamedTuple

import msgspec

from tidelog.broker.kafka.errors import MalformedRequest
from tidelog.broker.kafka.wire.endpoints import LeaderIdAndEpoch, NodeEndpoint, write_endpoints_tag
from tidelog.broker.kafka.wire.primitives import (
    DECODE_ERRORS,
    INT32,
    MAX_ELEMENTS,
    read_compact_count,
    read_compact_string,
    read_legacy_count,
    read_legacy_string,
    read_tags,
    required,
    skip_tags,
    too_many_elements,
    write_count,
    write_string,
    write_uvarint,
)
from tidelog.runtime.types import Buffer

MIN_VERSION = 4
MAX_VERSION = 18
FIRST_FLEXIBLE = 12
FIRST_WITH_TOPIC_ID = 13

_WAIT_TO_ISOLATION = Struct(">iiib")
_SESSION = Struct(">ii")
_REPLICA_STATE_TAG = 1
_PARTITION_REQUEST = {
    4: Struct(">iqi"),
    5: Struct(">iqqi"),
    9: Struct(">iiqqi"),
    12: Struct(">iiqiqi"),
}
_PARTITION_HEAD = Struct(">ihqq")
_USUAL_HEAD = Struct(">ihqqqBi")
"""In flexible versions, without aborted transactions: up to the preferred replica."""
_PAIR = Struct(">qq")
_ONE_START = {
    12: Struct(">4xiiibiiBB"),
    15: Struct(">iiibiiBB"),
}
"""Up to the isolation level, the session, one topic, the length of its name (or the first byte of its id)."""
_ONE_PARTITION = Struct(">BiiqiqiBBBB")
"""One partition and its fields, no tags of it and its topic, no forgotten topics, the length of the rack."""
_ONE_ANSWER = Struct(">iibihiB")
"""Size, correlation id, no tags; throttle time, error, session; one topic."""
_ONE_OUTCOME = Struct(">BihqqqBi")
"""One partition without an error, its offsets, no aborted transactions, no preferred replica."""
_ONE_END = bytes(3)
"""No tags of the partition, the topic and the response."""


class FetchPartition(NamedTuple):
    """The request for one partition."""

    partition: int
    fetch_offset: int
    partition_max_bytes: int
    current_leader_epoch: int = -1
    last_fetched_epoch: int = -1
    log_start_offset: int = -1


class FetchTopic(msgspec.Struct, gc=False):
    """The partitions of one topic; `name` up to v12, `topic_id` (16 bytes) from v13."""

    name: str
    topic_id: bytes
    partitions: list[FetchPartition]


class ForgottenTopic(msgspec.Struct, gc=False):
    """Partitions to drop from a fetch session."""

    name: str
    topic_id: bytes
    partitions: list[int]


class FetchRequest(msgspec.Struct, gc=False):
    """A decoded Fetch request."""

    API_KEY: ClassVar[int] = 1

    replica_id: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[FetchTopic]
    forgotten_topics: list[ForgottenTopic]
    rack_id: str


class PartitionData(msgspec.Struct, gc=False):
    """The response for one partition."""

    partition: int
    error_code: int = 0
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted_transactions: Sequence[tuple[int, int]] | None = None
    """(producer id, first offset); None unless the request is read_committed."""
    preferred_read_replica: int = -1
    records: Sequence[Buffer] = ()
    """Whole batches; empty is length 0, never null (librdkafka fails on null)."""
    diverging_epoch: tuple[int, int] | None = None
    """(epoch, end offset)."""
    current_leader: LeaderIdAndEpoch | None = None


class FetchTopicResponse(msgspec.Struct, gc=False):
    """The responses for one topic."""

    name: str
    topic_id: bytes
    partitions: list[PartitionData]


class FetchResponse(msgspec.Struct, gc=False):
    """A Fetch response to encode."""

    topics: list[FetchTopicResponse] = []
    error_code: int = 0
    session_id: int = 0
    throttle_time_ms: int = 0
    node_endpoints: Sequence[NodeEndpoint] = ()


def decode_request(version: int, frame: bytearray, at: int) -> FetchRequest:
    """Decode the body that starts at `at`. Raises only `MalformedRequest` for invalid input."""
    try:
        usual = decode_usual(version, frame, at) if version >= FIRST_FLEXIBLE else None
        return usual or decode_every(version, frame, at)
    except (struct.error, *DECODE_ERRORS) as error:
        raise MalformedRequest(f"cannot decode Fetch v{version}: {error}") from error


def decode_usual(version: int, frame: bytearray, at: int) -> FetchRequest | None:
    """Fast path for the requests that a consumer repeats; None for others, decoded by `decode_every`.

    They are for one partition, or, in a session, without changes. A response of a megabyte evicts the CPU caches, so
    each call costs several warm ones (as in `produce`).
    """
    layout, replica_id = _ONE_START[15 if version >= 15 else 12], -1
    start = at + layout.size
    if len(frame) <= start:
        return None
    if version < 15:
        (replica_id,) = INT32.unpack_from(frame, at)
    max_wait_ms, min_bytes, max_bytes, isolation_level, session, epoch, topics, size = layout.unpack_from(frame, at)
    if topics == 1:  # none, so what follows is the count of forgotten topics
        rack, end = frame[start], start + frame[start]
        if size != 1 or not 0 < rack < 0x80 or frame[end : end + 1] != b"\0":
            return None
        name = str(frame[start + 1 : end], "utf-8")
        return FetchRequest(
            replica_id, max_wait_ms, min_bytes, max_bytes, isolation_level, session, epoch, [], [], name
        )
    if topics != 2 or len(frame) < start + _ONE_PARTITION.size:
        return None
    name, topic_id = "", b""
    if version >= FIRST_WITH_TOPIC_ID:
        end = start + 15
        topic_id = bytes(frame[start - 1 : end])
    elif 1 < size < 0x80:
        end = start + size - 1
        name = str(frame[start:end], "utf-8")
    else:
        return None
    at = end + _ONE_PARTITION.size
    if at >= len(frame):
        return None
    count, index, leader_epoch, offset, last_epoch, log_start, limit, tags, topic_tags, forgotten, rack = (
        _ONE_PARTITION.unpack_from(frame, end)
    )
    end = at + rack - 1
    if (count, tags, topic_tags, forgotten) != (2, 0, 0, 1) or not 0 < rack < 0x80 or frame[end : end + 1] != b"\0":
        return None
    partition = FetchPartition(index, offset, limit, leader_epoch, last_epoch, log_start)
    return FetchRequest(
        replica_id,
        max_wait_ms,
        min_bytes,
        max_bytes,
        isolation_level,
        session,
        epoch,
        [FetchTopic(name, topic_id, [partition])],
        [],
        str(frame[at:end], "utf-8"),
    )


def decode_every(version: int, frame: bytearray, at: int) -> FetchRequest:
    """Decode any request, as `decode_request` but with the errors of what it reads; the fast path agrees with it."""
    flexible = version >= FIRST_FLEXIBLE
    replica_id = -1
    if version < 15:
        (replica_id,) = INT32.unpack_from(frame, at)
        at += 4
    max_wait_ms, min_bytes, max_bytes, isolation_level = _WAIT_TO_ISOLATION.unpack_from(frame, at)
    at += 13
    session_id, session_epoch = 0, -1
    if version >= 7:
        session_id, session_epoch = _SESSION.unpack_from(frame, at)
        at += 8
    topics, at = _read_topics(version, frame, at)
    forgotten: list[ForgottenTopic] = []
    if version >= 7:
        forgotten, at = _read_forgotten(version, frame, at)
    rack_id: str | None = ""
    if version >= 11:
        rack_id, at = (read_compact_string if flexible else read_legacy_string)(frame, at)
    if flexible:
        tags, at = read_tags(frame, at)
        if version >= 15 and _REPLICA_STATE_TAG in tags:
            start, end = tags[_REPLICA_STATE_TAG]
            if end - start < INT32.size:
                raise MalformedRequest("the replica state is too short")
            (replica_id,) = INT32.unpack_from(frame, start)
    return FetchRequest(
        replica_id,
        max_wait_ms,
        min_bytes,
        max_bytes,
        isolation_level,
        session_id,
        session_epoch,
        topics,
        forgotten,
        required(rack_id, "rack id"),
    )


def _read_topic_key(version: int, frame: bytearray, at: int) -> tuple[str, bytes, int]:
    if version >= FIRST_WITH_TOPIC_ID:
        return "", bytes(frame[at : at + 16]), at + 16
    name, at = (read_compact_string if version >= FIRST_FLEXIBLE else read_legacy_string)(frame, at)
    return required(name, "topic name"), b"", at


def _read_topics(version: int, frame: bytearray, at: int) -> tuple[list[FetchTopic], int]:
    flexible = version >= FIRST_FLEXIBLE
    read_count = read_compact_count if flexible else read_legacy_count
    layout = _PARTITION_REQUEST[12 if version >= 12 else 9 if version >= 9 else 5 if version >= 5 else 4]
    unpack, size = layout.unpack_from, layout.size
    topic_count, at = read_count(frame, at)
    if topic_count < 0:
        raise MalformedRequest("topics is null")
    elements = topic_count
    topics = []
    for _ in range(topic_count):
        name, topic_id, at = _read_topic_key(version, frame, at)
        partition_count, at = read_count(frame, at)
        if partition_count < 0:
            raise MalformedRequest("partitions is null")
        elements += partition_count
        if elements > MAX_ELEMENTS:
            raise too_many_elements()
        partitions = []
        for _ in range(partition_count):
            partitions.append(_partition(version, unpack(frame, at)))
            at += size
            if flexible:
                at = skip_tags(frame, at) if frame[at] else at + 1
        if flexible:
            at = skip_tags(frame, at)
        topics.append(FetchTopic(name, topic_id, partitions))
    return topics, at


def _partition(version: int, fields: tuple[int, ...]) -> FetchPartition:
    if version >= 12:
        index, leader_epoch, offset, last_epoch, start, max_bytes = fields
        return FetchPartition(index, offset, max_bytes, leader_epoch, last_epoch, start)
    if version >= 9:
        index, leader_epoch, offset, start, max_bytes = fields
        return FetchPartition(index, offset, max_bytes, leader_epoch, -1, start)
    if version >= 5:
        index, offset, start, max_bytes = fields
        return FetchPartition(index, offset, max_bytes, -1, -1, start)
    return FetchPartition(*fields)


def _read_forgotten(version: int, frame: bytearray, at: int) -> tuple[list[ForgottenTopic], int]:
    flexible = version >= FIRST_FLEXIBLE
    read_count = read_compact_count if flexible else read_legacy_count
    topic_count, at = read_count(frame, at)
    if topic_count < 0:
        raise MalformedRequest("forgotten topics is null")
    elements = topic_count
    forgotten = []
    for _ in range(topic_count):
        name, topic_id, at = _read_topic_key(version, frame, at)
        count, at = read_count(frame, at)
        if count < 0:
            raise MalformedRequest("forgotten partitions is null")
        elements += count
        if elements > MAX_ELEMENTS:
            raise too_many_elements()
        partitions = list(struct.unpack_from(f">{count}i", frame, at))
        at += 4 * count
        if flexible:
            at = skip_tags(frame, at)
        forgotten.append(ForgottenTopic(name, topic_id, partitions))
    return forgotten, at


def encode_one(version: int, correlation_id: int, response: FetchResponse) -> list[Buffer] | None:
    """Fast path: the whole frame with records of one partition, in flexible versions; None for other responses."""
    topic = response.topics[0] if len(response.topics) == 1 else None
    if topic is None or len(topic.partitions) != 1 or version < FIRST_FLEXIBLE or response.node_endpoints:
        return None
    p = topic.partitions[0]
    records = p.records
    if not records or p.error_code or p.aborted_transactions or p.diverging_epoch or p.current_leader:
        return None
    if version >= FIRST_WITH_TOPIC_ID:
        name = topic.topic_id
    else:
        name = topic.name.encode()
        if len(name) >= 0x7F:
            return None
        name = bytes((len(name) + 1,)) + name
    size = sum(map(len, records))
    length = bytearray()
    write_uvarint(length, size + 1)
    size += _ONE_ANSWER.size - 4 + len(name) + _ONE_OUTCOME.size + len(length) + len(_ONE_END)
    head = (
        _ONE_ANSWER.pack(
            size, correlation_id, 0, response.throttle_time_ms, response.error_code, response.session_id, 2
        )
        + name
        + _ONE_OUTCOME.pack(
            2,
            p.partition,
            0,
            p.high_watermark,
            p.last_stable_offset,
            p.log_start_offset,
            0 if p.aborted_transactions is None else 1,
            p.preferred_read_replica,
        )
        + length
    )
    return [head, *records, _ONE_END]


def encode_response(version: int, response: FetchResponse, head: bytearray) -> list[Buffer]:
    """Encode the response as buffers to write in order; the first one begins with `head`, the response header."""
    flexible = version >= FIRST_FLEXIBLE
    buffers: list[Buffer] = []
    out = head
    out += INT32.pack(response.throttle_time_ms)
    if version >= 7:
        out += struct.pack(">hi", response.error_code, response.session_id)
    write_count(out, len(response.topics), flexible)
    for topic in response.topics:
        if version >= FIRST_WITH_TOPIC_ID:
            out += topic.topic_id
        else:
            write_string(out, topic.name, flexible)
        write_count(out, len(topic.partitions), flexible)
        for partition in topic.partitions:
            _write_partition_head(version, partition, out)
            if partition.records:
                buffers.append(out)
                buffers += partition.records
                out = bytearray()
            if flexible:
                _write_partition_tags(partition, out)
        if flexible:
            out.append(0)
    if flexible:
        if version >= 16 and response.node_endpoints:
            out.append(1)
            write_endpoints_tag(out, response.node_endpoints)
        else:
            out.append(0)
    if out:
        buffers.append(out)
    return buffers


def _write_partition_head(version: int, p: PartitionData, out: bytearray) -> None:
    flexible = version >= FIRST_FLEXIBLE
    if flexible and not p.aborted_transactions:
        out += _USUAL_HEAD.pack(
            p.partition,
            p.error_code,
            p.high_watermark,
            p.last_stable_offset,
            p.log_start_offset,
            0 if p.aborted_transactions is None else 1,
            p.preferred_read_replica,
        )
        write_uvarint(out, sum(map(len, p.records)) + 1)
        return
    out += _PARTITION_HEAD.pack(p.partition, p.error_code, p.high_watermark, p.last_stable_offset)
    if version >= 5:
        out += p.log_start_offset.to_bytes(8, "big", signed=True)
    aborted = p.aborted_transactions
    write_count(out, -1 if aborted is None else len(aborted), flexible)
    for pair in aborted or ():
        out += _PAIR.pack(*pair)
        if flexible:
            out.append(0)
    if version >= 11:
        out += INT32.pack(p.preferred_read_replica)
    size = sum(map(len, p.records))
    if flexible:
        write_uvarint(out, size + 1)
    else:
        out += INT32.pack(size)


def _write_partition_tags(p: PartitionData, out: bytearray) -> None:
    diverging, leader = p.diverging_epoch, p.current_leader
    out.append((diverging is not None) + (leader is not None))
    if diverging is not None:
        out += b"\x00\x0d" + struct.pack(">iqB", *diverging, 0)  # tag 0, 13 bytes
    if leader is not None:
        out += b"\x01\x09" + struct.pack(">iiB", *leader, 0)  # tag 1, 9 bytes

"""Produce (API key 0), versions 0–13, hand-written: the records are views of the request's frame and are not copied.

Request: `transactional id (v3+), acks int16, timeout int32, [topic name (v13: id 16 bytes), [partition int32,
records]]`. Response: `[topic, [partition int32, error int16, base offset int64, log append time int64 (v2+), log start
offset int64 (v5+), [batch index int32, message] (v8+), error message (v8+), tag 0: current leader (v10+)]], throttle
int32 (v1+), tag 0: node endpoints (v10+)`. From v9 on the encoding is flexible (KIP-482). Versions 0–2 are decoded only
to return an error response (KAFKA-18659).

Tests compare both directions byte by byte with kio for its versions (3–13).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from struct import Struct
from typing import ClassVar

import msgspec

from tidelog.broker.kafka.errors import MalformedRequest
from tidelog.broker.kafka.wire.endpoints import LeaderIdAndEpoch, NodeEndpoint, write_endpoints_tag
from tidelog.broker.kafka.wire.primitives import (
    DECODE_ERRORS,
    INT32,
    MAX_ELEMENTS,
    compact_bytes_span,
    legacy_bytes_span,
    read_compact_count,
    read_compact_string,
    read_legacy_count,
    read_legacy_string,
    read_uvarint,
    required,
    skip_tags,
    too_many_elements,
    write_count,
    write_string,
    write_uvarint,
)

MIN_VERSION = 0
MAX_VERSION = 13
FIRST_FLEXIBLE = 9

_ACKS_TIMEOUT = Struct(">hi")
_V0_PARTITION = Struct(">ihq")
_V2_PARTITION = Struct(">ihqq")
_V5_PARTITION = Struct(">ihqqq")
_V8_SUCCESS = Struct(">ihqqqih")
_V9_SUCCESS = Struct(">ihqqqBBB")
_LEADER = Struct(">ii")
_ONE_START = Struct(">BhiBB")
"""No transactional id, acks, timeout, one topic, the length of its name (or the first byte of its id)."""
_ONE_PARTITION = Struct(">BiB")
"""One partition, its index, the first byte of the records' length."""
_ONE_END = bytes(3)
"""No tags of the partition, the topic and the request."""
_ONE_LEAST_BYTES = _ONE_START.size + _ONE_PARTITION.size
_ONE_ANSWER = Struct(">iibBB")
"""Size, correlation id, no tags; one topic and the length of its name."""
_ONE_OUTCOME = Struct(">BihqqqBBBBiB")
"""One partition without an error, no tags of the topic, the throttle time, no tags."""
_NO_TAGS = 0
_NO_ERRORS = 1
"""The compact length of an empty array."""


class PartitionProduceData(msgspec.Struct, gc=False):
    """The records for one partition."""

    index: int
    records: memoryview | None
    """A writable view of the request's frame."""


class TopicProduceData(msgspec.Struct, gc=False):
    """The partitions of one topic; `name` up to v12, `topic_id` (16 bytes) from v13."""

    name: str
    topic_id: bytes
    partitions: list[PartitionProduceData]


class ProduceRequest(msgspec.Struct, gc=False):
    """A decoded Produce request."""

    API_KEY: ClassVar[int] = 0

    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[TopicProduceData]


class PartitionProduceResponse(msgspec.Struct, gc=False):
    """The result for one partition."""

    index: int
    error_code: int = 0
    base_offset: int = -1
    log_append_time_ms: int = -1
    """-1 unless the topic uses LogAppendTime."""
    log_start_offset: int = -1
    record_errors: Sequence[tuple[int, str | None]] = ()
    """(index in the batch, message)."""
    error_message: str | None = None
    current_leader: LeaderIdAndEpoch | None = None


class TopicProduceResponse(msgspec.Struct, gc=False):
    """The results for one topic."""

    name: str
    topic_id: bytes
    partitions: list[PartitionProduceResponse]


class ProduceResponse(msgspec.Struct, gc=False):
    """A Produce response to encode."""

    topics: list[TopicProduceResponse]
    throttle_time_ms: int = 0
    node_endpoints: Sequence[NodeEndpoint] = ()


def decode_request(version: int, frame: bytearray, at: int) -> ProduceRequest:
    """Decode the body that starts at `at`. Raises only `MalformedRequest` for invalid input."""
    try:
        if version < FIRST_FLEXIBLE:
            return _decode_legacy(version, frame, at)
        return decode_one_partition(version, frame, at) or decode_flexible(version, frame, at)
    except (struct.error, *DECODE_ERRORS) as error:
        raise MalformedRequest(f"cannot decode Produce v{version}: {error}") from error


def decode_one_partition(version: int, frame: bytearray, at: int) -> ProduceRequest | None:
    """Fast path for a request with one batch for one partition; None for others, decoded by `decode_flexible`.

    With a request every few milliseconds the CPU caches are cold: a call costs ten times as much as in a loop, and this
    path makes twenty fewer.
    """
    if len(frame) < at + _ONE_LEAST_BYTES:
        return None
    null, acks, timeout_ms, topics, name_bytes = _ONE_START.unpack_from(frame, at)
    if null or topics != 2:
        return None
    at += _ONE_START.size
    name, topic_id = "", b""
    if version >= 13:
        end = at + 15
        topic_id = bytes(frame[at - 1 : end])
    elif 1 < name_bytes < 0x80:
        end = at + name_bytes - 1
        name = str(frame[at:end], "utf-8")
    else:
        return None
    start = end + _ONE_PARTITION.size
    if start > len(frame):
        return None
    partitions, index, size = _ONE_PARTITION.unpack_from(frame, end)
    if partitions != 2 or size == 0:
        return None
    if size >= 0x80:
        size, start = read_uvarint(frame, start - 1)
        if size == 0:  # null, encoded in more bytes than necessary
            return None
    stop = start + size - 1
    if frame[stop : stop + 3] != _ONE_END:
        return None
    data = PartitionProduceData(index, memoryview(frame)[start:stop])
    return ProduceRequest(None, acks, timeout_ms, [TopicProduceData(name, topic_id, [data])])


def _decode_legacy(version: int, frame: bytearray, at: int) -> ProduceRequest:
    view = memoryview(frame)
    transactional_id = None
    if version >= 3:
        transactional_id, at = read_legacy_string(frame, at)
    acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(frame, at)
    topic_count, at = read_legacy_count(frame, at + 6)
    if topic_count < 0:
        raise MalformedRequest("topics is null")
    elements = topic_count
    topics = []
    for _ in range(topic_count):
        name, at = read_legacy_string(frame, at)
        partition_count, at = read_legacy_count(frame, at)
        if partition_count < 0:
            raise MalformedRequest("partitions is null")
        elements += partition_count
        if elements > MAX_ELEMENTS:
            raise too_many_elements()
        partitions = []
        for _ in range(partition_count):
            (index,) = INT32.unpack_from(frame, at)
            start, at_end = legacy_bytes_span(frame, at + 4)
            at = start if at_end < 0 else at_end
            partitions.append(PartitionProduceData(index, None if at_end < 0 else view[start:at_end]))
        topics.append(TopicProduceData(required(name, "topic name"), b"", partitions))
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def decode_flexible(version: int, frame: bytearray, at: int) -> ProduceRequest:
    """Decode any request of a flexible version, with the errors of what it reads; the fast path agrees with it."""
    view = memoryview(frame)
    transactional_id, at = read_compact_string(frame, at)
    acks, timeout_ms = _ACKS_TIMEOUT.unpack_from(frame, at)
    topic_count, at = read_compact_count(frame, at + 6)
    if topic_count < 0:
        raise MalformedRequest("topics is null")
    elements = topic_count
    topics = []
    for _ in range(topic_count):
        name: str | None = ""
        topic_id = b""
        if version >= 13:
            topic_id = bytes(frame[at : at + 16])
            at += 16
        else:
            name, at = read_compact_string(frame, at)
        partition_count, at = read_compact_count(frame, at)
        if partition_count < 0:
            raise MalformedRequest("partitions is null")
        elements += partition_count
        if elements > MAX_ELEMENTS:
            raise too_many_elements()
        partitions = []
        for _ in range(partition_count):
            (index,) = INT32.unpack_from(frame, at)
            start, at_end = compact_bytes_span(frame, at + 4)
            partitions.append(PartitionProduceData(index, None if at_end < 0 else view[start:at_end]))
            at = skip_tags(frame, start if at_end < 0 else at_end)
        at = skip_tags(frame, at)
        topics.append(TopicProduceData(required(name, "topic name"), topic_id, partitions))
    skip_tags(frame, at)
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def encode_one(version: int, correlation_id: int, response: ProduceResponse) -> bytes | None:
    """Fast path: the whole frame for one successful partition, in flexible versions with names; None for others."""
    topic = response.topics[0] if len(response.topics) == 1 else None
    if topic is None or len(topic.partitions) != 1 or not FIRST_FLEXIBLE <= version < 13 or response.node_endpoints:
        return None
    name, p = topic.name.encode(), topic.partitions[0]
    if p.error_code or p.record_errors or p.error_message is not None or p.current_leader or len(name) >= 0x7F:
        return None
    size = _ONE_ANSWER.size - 4 + len(name) + _ONE_OUTCOME.size
    return (
        _ONE_ANSWER.pack(size, correlation_id, 0, 2, len(name) + 1)
        + name
        + _ONE_OUTCOME.pack(
            2,
            p.index,
            0,
            p.base_offset,
            p.log_append_time_ms,
            p.log_start_offset,
            _NO_ERRORS,
            0,
            _NO_TAGS,
            _NO_TAGS,
            response.throttle_time_ms,
            _NO_TAGS,
        )
    )


def encode_response(version: int, response: ProduceResponse, out: bytearray) -> None:
    """Append the body to `out`, which holds the response header."""
    flexible = version >= FIRST_FLEXIBLE
    write_count(out, len(response.topics), flexible)
    for topic in response.topics:
        if version >= 13:
            out += topic.topic_id
        else:
            write_string(out, topic.name, flexible)
        write_count(out, len(topic.partitions), flexible)
        for partition in topic.partitions:
            _write_partition(version, partition, out)
        if flexible:
            out.append(_NO_TAGS)
    if version >= 1:
        out += INT32.pack(response.throttle_time_ms)
    if flexible:
        if version >= 10 and response.node_endpoints:
            out.append(1)
            write_endpoints_tag(out, response.node_endpoints)
        else:
            out.append(_NO_TAGS)


def _write_partition(version: int, p: PartitionProduceResponse, out: bytearray) -> None:
    error, base, time, start = p.error_code, p.base_offset, p.log_append_time_ms, p.log_start_offset
    plain = error == 0 and not p.record_errors and p.error_message is None and p.current_leader is None
    if version >= FIRST_FLEXIBLE:
        if plain:
            out += _V9_SUCCESS.pack(p.index, 0, base, time, start, _NO_ERRORS, 0, _NO_TAGS)
            return
        out += _V5_PARTITION.pack(p.index, error, base, time, start)
        _write_errors(p, out, flexible=True)
        if version >= 10 and p.current_leader is not None:
            out += b"\x01\x00\x09" + _LEADER.pack(*p.current_leader) + b"\x00"  # one tag, number 0, of 9 bytes
        else:
            out.append(_NO_TAGS)
    elif version == 8:
        if plain:
            out += _V8_SUCCESS.pack(p.index, 0, base, time, start, 0, -1)
            return
        out += _V5_PARTITION.pack(p.index, error, base, time, start)
        _write_errors(p, out, flexible=False)
    elif version >= 5:
        out += _V5_PARTITION.pack(p.index, error, base, time, start)
    elif version >= 2:
        out += _V2_PARTITION.pack(p.index, error, base, time)
    else:
        out += _V0_PARTITION.pack(p.index, error, base)


def _write_errors(p: PartitionProduceResponse, out: bytearray, *, flexible: bool) -> None:
    if flexible:
        write_uvarint(out, len(p.record_errors) + 1)
    else:
        out += INT32.pack(len(p.record_errors))
    for index, message in p.record_errors:
        out += INT32.pack(index)
        write_string(out, message, flexible)
        if flexible:
            out.append(_NO_TAGS)
    write_string(out, p.error_message, flexible)

"""The hand-written Produce and Fetch codecs are byte-identical to kio over all versions."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import struct
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from tests.support import schema
from tests.support.examples import examples
from tests.support.kafka_client import encode_request
from tests.support.kio_strategies import entities
from tidelog.broker.kafka.errors import MalformedRequest
from tidelog.broker.kafka.wire import fetch, produce
from tidelog.broker.kafka.wire.codec import message_codec
from tidelog.broker.kafka.wire.endpoints import LeaderIdAndEpoch, NodeEndpoint
from tidelog.broker.kafka.wire.primitives import DECODE_ERRORS
from tidelog.runtime.types import Buffer

PRODUCE_VERSIONS = range(3, produce.MAX_VERSION + 1)
FETCH_VERSIONS = range(fetch.MIN_VERSION, fetch.MAX_VERSION + 1)

int16 = st.integers(0, 100)
int32 = st.integers(-(1 << 31), (1 << 31) - 1)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)
text = st.text(st.characters(codec="utf-8"), max_size=200)
topic_ids = st.binary(min_size=16, max_size=16)
errors = st.sampled_from([-1, 0, 1, 3, 6, 10, 45, 87])
leaders = st.none() | st.builds(LeaderIdAndEpoch, st.integers(0, 9), st.integers(0, 9))
endpoints = st.lists(st.builds(NodeEndpoint, int32, text, int32, st.none() | text), max_size=2)


def _encode(entity: Any) -> bytes:
    out = io.BytesIO()
    entity_writer(type(entity))(out, entity)
    return out.getvalue()


def _id(value: uuid.UUID | None) -> bytes:
    return value.bytes if value is not None else bytes(16)


def _uuid(value: bytes) -> uuid.UUID | None:
    return uuid.UUID(bytes=value) if any(value) else None


# --- Produce -------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from([load_request_schema(0, v) for v in PRODUCE_VERSIONS]).flatmap(entities))
def test_a_produce_request_is_read_as_kio_wrote_it(entity: Any) -> None:
    frame = bytearray(encode_request(entity, 5)[4:])
    _, request = message_codec(0, entity.__version__).decode(frame)
    assert (request.transactional_id, request.acks) == (entity.transactional_id, entity.acks)
    assert request.timeout_ms == schema.to_ms(entity.timeout)
    if entity.__version__ >= 13:
        assert [topic.topic_id for topic in request.topics] == [_id(topic.topic_id) for topic in entity.topic_data]
    else:
        assert [topic.name for topic in request.topics] == [topic.name for topic in entity.topic_data]
    assert [[(p.index, p.records) for p in topic.partitions] for topic in request.topics] == [
        [(p.index, p.records) for p in topic.partition_data] for topic in entity.topic_data
    ]


def test_the_response_of_one_partition_is_the_same_both_ways() -> None:
    outcome = produce.PartitionProduceResponse(3, base_offset=1 << 40, log_append_time_ms=9, log_start_offset=7)
    for version in (9, 12):
        response = produce.ProduceResponse([produce.TopicProduceResponse("tä", b"", [outcome])], 5)
        body = bytearray(struct.pack(">ib", 77, 0))
        produce.encode_response(version, response, body)
        assert produce.encode_one(version, 77, response) == struct.pack(">i", len(body)) + body


def test_records_are_writable_views_of_the_frame() -> None:
    make = schema.request(0, 9).make
    partition = make("PartitionProduceData", index=0, records=b"abcdef")
    topics = [make("TopicProduceData", name="t", partition_data=[partition])]
    frame = bytearray(
        encode_request(make("ProduceRequest", acks=1, timeout=5, transactional_id=None, topic_data=topics), 1)[4:]
    )
    _, request = message_codec(0, 9).decode(frame)
    request.topics[0].partitions[0].records[:3] = b"xyz"
    assert b"xyzdef" in frame and b"abc" not in frame


def _outcome(decode: Any, version: int, body: bytearray) -> Any:
    try:
        return decode(version, body, 0)
    except MalformedRequest:
        return MalformedRequest
    except (struct.error, *DECODE_ERRORS):
        return MalformedRequest


def _broken(body: bytearray, last: int, data: st.DataObject) -> bytearray:
    """Up to three bytes up to number `last` changed, and perhaps cut short."""
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, min(len(body) - 1, last)))] = data.draw(st.integers(0, 255))
    return body[: data.draw(st.integers(0, len(body)))] if data.draw(st.booleans()) else body


@settings(max_examples=examples(500), deadline=None)
@given(st.sampled_from([9, 12, 13]), text, int16, st.binary(max_size=300), st.data())
def test_a_request_for_one_partition_reads_the_same_both_ways(
    version: int, name: str, index: int, records: bytes, data: st.DataObject
) -> None:
    """The short way takes what is usual and leaves the rest, broken frames above all, to the long one."""
    make = schema.request(0, version).make
    partition = make("PartitionProduceData", index=index, records=records)
    topic = {"topic_id": uuid.UUID(int=7)} if version >= 13 else {"name": name}
    topics = [make("TopicProduceData", **topic, partition_data=[partition])]
    entity = make("ProduceRequest", acks=-1, timeout=dt.timedelta(seconds=5), transactional_id=None, topic_data=topics)
    body = bytearray(_encode(entity))
    one = produce.decode_one_partition(version, body, 0)
    if version >= 13 or 0 < len(name.encode()) < 0x7F:
        assert one == produce.decode_flexible(version, body, 0)
    else:
        assert one is None
    body = _broken(body, 40, data)
    found = _outcome(produce.decode_request, version, body)
    assert found == _outcome(produce.decode_flexible, version, body)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_the_versions_before_three_are_decoded_to_be_refused(version: int) -> None:
    body = struct.pack(">hii", 1, 1000, 1) + struct.pack(">h1si", 1, b"t", 1) + struct.pack(">ii", 2, 3) + b"abc"
    header = struct.pack(">hhih", 0, version, 9, -1)
    client_id, request = message_codec(0, version).decode(bytearray(header + body))
    assert client_id is None and request.topics[0].name == "t" and request.topics[0].partitions[0].records == b"abc"
    outcome = produce.TopicProduceResponse("t", b"", [produce.PartitionProduceResponse(2, 35)])
    (frame,) = message_codec(0, version).encode(9, produce.ProduceResponse([outcome]))
    expected = struct.pack(">i", 9) + struct.pack(">ih1siihq", 1, 1, b"t", 1, 2, 35, -1)
    expected += struct.pack(">q", -1) if version == 2 else b""
    expected += struct.pack(">i", 0) if version >= 1 else b""
    assert bytes(frame) == struct.pack(">i", len(expected)) + expected


produce_partitions = st.builds(
    produce.PartitionProduceResponse,
    index=int32,
    error_code=errors,
    base_offset=int64,
    log_append_time_ms=st.just(-1) | st.integers(0, 1 << 32).map(lambda s: s * 1000),
    log_start_offset=int64,
    record_errors=st.just(()) | st.lists(st.tuples(int32, st.none() | text), max_size=2),
    error_message=st.none() | text,
    current_leader=leaders,
)
produce_responses = st.builds(
    produce.ProduceResponse,
    topics=st.lists(
        st.builds(produce.TopicProduceResponse, text, topic_ids, st.lists(produce_partitions, max_size=3)), max_size=3
    ),
    throttle_time_ms=int32,
    node_endpoints=endpoints,
)


def _kio_produce_response(version: int, response: produce.ProduceResponse) -> Any:
    make = schema.response(0, version).make

    def partition(p: produce.PartitionProduceResponse) -> Any:
        optional = {}
        if p.current_leader is not None:
            optional["current_leader"] = make("LeaderIdAndEpoch", **p.current_leader._asdict())
        return make(
            "PartitionProduceResponse",
            index=p.index,
            error_code=p.error_code,
            base_offset=p.base_offset,
            log_append_time=p.log_append_time_ms,
            log_start_offset=p.log_start_offset,
            record_errors=[
                make("BatchIndexAndErrorMessage", batch_index=index, batch_index_error_message=message)
                for index, message in p.record_errors
            ],
            error_message=p.error_message,
            **{key: value for key, value in optional.items() if value is not None},
        )

    return make(
        "ProduceResponse",
        throttle_time=response.throttle_time_ms,
        node_endpoints=[make("NodeEndpoint", **e._asdict()) for e in response.node_endpoints],
        responses=[
            make(
                "TopicProduceResponse",
                name=topic.name,
                topic_id=_uuid(topic.topic_id),
                partition_responses=[partition(p) for p in topic.partitions],
            )
            for topic in response.topics
        ],
    )


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(PRODUCE_VERSIONS), produce_responses)
def test_a_produce_response_is_byte_identical_to_kio(version: int, response: produce.ProduceResponse) -> None:
    expected = _encode(_kio_produce_response(version, response))
    tags = b"\x00" if version >= 9 else b""
    body = struct.pack(">i", 77) + tags + expected
    assert b"".join(message_codec(0, version).encode(77, response)) == struct.pack(">i", len(body)) + body


# --- Fetch ---------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from([load_request_schema(1, v) for v in FETCH_VERSIONS]).flatmap(entities))
def test_a_fetch_request_is_read_as_kio_wrote_it(entity: Any) -> None:
    version = entity.__version__
    _, request = message_codec(1, version).decode(bytearray(encode_request(entity, 5)[4:]))
    replica_id = entity.replica_id if version < 15 else entity.replica_state.replica_id
    assert request.replica_id == replica_id
    assert request.max_wait_ms == schema.to_ms(entity.max_wait)
    for name in ("min_bytes", "max_bytes", "isolation_level"):
        assert getattr(request, name) == getattr(entity, name)
    assert request.session_id == getattr(entity, "session_id", 0)
    assert request.session_epoch == getattr(entity, "session_epoch", -1)
    assert request.rack_id == getattr(entity, "rack_id", "")
    for topic, theirs in zip(request.topics, entity.topics, strict=True):
        assert (topic.topic_id == _id(theirs.topic_id)) if version >= 13 else (topic.name == theirs.topic)
        for partition, other in zip(topic.partitions, theirs.partitions, strict=True):
            for name in partition._fields:
                assert getattr(partition, name) == getattr(other, name, -1)
    forgotten = getattr(entity, "forgotten_topics_data", ())
    assert [topic.partitions for topic in request.forgotten_topics] == [list(topic.partitions) for topic in forgotten]


@settings(max_examples=examples(500), deadline=None)
@given(st.sampled_from([12, 13, 14, 15, 17]), text, text, int32, int64, st.booleans(), st.data())
def test_a_fetch_of_one_partition_or_of_what_is_known_reads_the_same_both_ways(
    version: int, name: str, rack: str, index: int, offset: int, lists: bool, data: st.DataObject
) -> None:
    """The short way takes what consumers repeat and leaves the rest, broken frames above all, to the long one."""
    make = schema.request(1, version).make
    limits = {"log_start_offset": -1, "partition_max_bytes": 1 << 20, "current_leader_epoch": 3}
    partition = make("FetchPartition", partition=index, fetch_offset=offset, last_fetched_epoch=-1, **limits)
    topic = {"topic_id": uuid.UUID(int=7)} if version >= 13 else {"topic": name}
    entity = make(
        "FetchRequest",
        **({"replica_id": data.draw(int32)} if version < 15 else {}),
        max_wait=dt.timedelta(milliseconds=500),
        min_bytes=1,
        max_bytes=1 << 24,
        isolation_level=1,
        session_id=data.draw(int32),
        session_epoch=data.draw(int32),
        topics=[make("FetchTopic", **topic, partitions=[partition])] if lists else [],
        forgotten_topics_data=[],
        rack_id=rack,
    )
    body = bytearray(_encode(entity))
    one = fetch.decode_usual(version, body, 0)
    if len(rack.encode()) < 0x7F and (not lists or version >= 13 or 0 < len(name.encode()) < 0x7F):
        assert one == fetch.decode_every(version, body, 0)
    else:
        assert one is None
    body = _broken(body, 99, data)
    found = _outcome(fetch.decode_request, version, body)
    assert found == _outcome(fetch.decode_every, version, body)


fetch_partitions = st.builds(
    fetch.PartitionData,
    partition=int32,
    error_code=errors,
    high_watermark=int64,
    last_stable_offset=int64,
    log_start_offset=int64,
    aborted_transactions=st.none() | st.lists(st.tuples(int64, int64), max_size=2),
    preferred_read_replica=int32,
    records=st.just(()) | st.lists(st.binary(min_size=1, max_size=200), max_size=3),
    diverging_epoch=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 1 << 40)),
    current_leader=leaders,
)
fetch_responses = st.builds(
    fetch.FetchResponse,
    topics=st.lists(
        st.builds(fetch.FetchTopicResponse, text, topic_ids, st.lists(fetch_partitions, max_size=3)), max_size=3
    ),
    error_code=errors,
    session_id=int32,
    throttle_time_ms=int32,
    node_endpoints=endpoints,
)


def _kio_fetch_response(version: int, response: fetch.FetchResponse) -> Any:
    make = schema.response(1, version).make

    def partition(p: fetch.PartitionData) -> Any:
        optional = {}
        if version >= 12 and p.current_leader is not None:
            optional["current_leader"] = make("LeaderIdAndEpoch", **p.current_leader._asdict())
        if version >= 12 and p.diverging_epoch is not None:
            epoch, end_offset = p.diverging_epoch
            optional["diverging_epoch"] = make("EpochEndOffset", epoch=epoch, end_offset=end_offset)
        aborted = p.aborted_transactions
        return make(
            "PartitionData",
            partition_index=p.partition,
            error_code=p.error_code,
            high_watermark=p.high_watermark,
            last_stable_offset=p.last_stable_offset,
            log_start_offset=p.log_start_offset,
            aborted_transactions=None
            if aborted is None
            else [make("AbortedTransaction", producer_id=a, first_offset=b) for a, b in aborted],
            preferred_read_replica=p.preferred_read_replica,
            records=b"".join(p.records),
            **optional,
        )

    return make(
        "FetchResponse",
        throttle_time=response.throttle_time_ms,
        error_code=response.error_code,
        session_id=response.session_id,
        node_endpoints=[make("NodeEndpoint", **e._asdict()) for e in response.node_endpoints],
        responses=[
            make(
                "FetchableTopicResponse",
                topic=topic.name,
                topic_id=_uuid(topic.topic_id),
                partitions=[partition(p) for p in topic.partitions],
            )
            for topic in response.topics
        ],
    )


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(FETCH_VERSIONS), fetch_responses)
def test_a_fetch_response_is_byte_identical_to_kio(version: int, response: fetch.FetchResponse) -> None:
    expected = _encode(_kio_fetch_response(version, response))
    tags = b"\x00" if version >= 12 else b""
    body = struct.pack(">i", 77) + tags + expected
    assert b"".join(message_codec(1, version).encode(77, response)) == struct.pack(">i", len(body)) + body


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(range(12, fetch.MAX_VERSION + 1)), text, topic_ids, fetch_partitions, int32)
def test_a_fetch_response_of_one_partition_is_the_same_both_ways(
    version: int, name: str, topic_id: bytes, partition: fetch.PartitionData, session_id: int
) -> None:
    partition.error_code, partition.diverging_epoch, partition.current_leader = 0, None, None
    partition.records = partition.records or [b"r"]
    response = fetch.FetchResponse([fetch.FetchTopicResponse(name, topic_id, [partition])], 0, session_id, 9)
    body = b"".join(fetch.encode_response(version, response, bytearray(struct.pack(">ib", 77, 0))))
    one = fetch.encode_one(version, 77, response)
    if partition.aborted_transactions or (version < 13 and len(name.encode()) >= 0x7F):
        assert one is None
    else:
        assert one is not None and b"".join(one) == struct.pack(">i", len(body)) + body


def test_records_go_out_as_the_very_buffers_that_came_in() -> None:
    batches: list[Buffer] = [memoryview(bytearray(b"one")), b"two"]
    partition = fetch.PartitionData(0, records=batches)
    buffers = message_codec(1, 18).encode(
        1, fetch.FetchResponse([fetch.FetchTopicResponse("", bytes(16), [partition])])
    )
    assert buffers[1] is batches[0] and buffers[2] is batches[1]


def test_empty_records_have_length_zero_and_are_never_null() -> None:
    for version in FETCH_VERSIONS:
        response = fetch.FetchResponse([fetch.FetchTopicResponse("t", bytes(16), [fetch.PartitionData(0)])])
        raw = b"".join(message_codec(1, version).encode(1, response))
        entity, _ = entity_reader(load_response_schema(1, version))(raw, 9 if version >= 12 else 8)
        assert entity.responses[0].partitions[0].records == b""


# --- both ----------------------------------------------------------------------------------------------------------

HOT_REQUESTS = [load_request_schema(0, v) for v in PRODUCE_VERSIONS] + [
    load_request_schema(1, v) for v in FETCH_VERSIONS
]


@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_garbage_raises_malformed_request_and_nothing_else(data: st.DataObject) -> None:
    entity = data.draw(st.sampled_from(HOT_REQUESTS).flatmap(entities))
    frame = bytearray(encode_request(entity, 1)[4:])
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(8, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frame = frame[: data.draw(st.integers(8, len(frame)))]
    with contextlib.suppress(MalformedRequest):
        message_codec(entity.__api_key__, entity.__version__).decode(frame)


@settings(max_examples=examples(50), deadline=None)
@given(st.sampled_from([load_request_schema(0, 12), load_request_schema(1, 18)]).flatmap(entities), st.data())
def test_a_truncated_request_is_never_taken_for_a_whole_one(entity: Any, data: st.DataObject) -> None:
    frame = bytearray(encode_request(entity, 1)[4:])
    cut = data.draw(st.integers(10, len(frame) - 1))
    with pytest.raises(MalformedRequest):
        message_codec(entity.__api_key__, entity.__version__).decode(frame[:cut])

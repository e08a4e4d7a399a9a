"""Our decoder of requests agrees with kio's, and survives what kio's does not."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema
from kio.schema.index import api_key_map, schema_name_map

from tests.support.examples import examples
from tests.support.kafka_client import encode_request
from tests.support.kio_strategies import entities
from tests.support.schema import as_message, body
from tidelog.broker.kafka.apis import all_apis
from tidelog.broker.kafka.errors import MalformedRequest
from tidelog.broker.kafka.wire.codec import message_codec, parse_header
from tidelog.broker.kafka.wire.messages import REQUESTS
from tidelog.broker.kafka.wire.messages.cluster import MetadataRequest
from tidelog.broker.kafka.wire.reader import request_reader
from tidelog.runtime.types import Buffer

GENERIC_KEYS = [2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 28, 29, 30, 31, 32, 33]
GENERIC_KEYS += [35, 36, 37, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 57, 60, 61, 65, 66, 68, 69, 74, 75]
LAYOUTS = [
    load_request_schema(key, version)
    for key in GENERIC_KEYS
    if key in api_key_map
    for version in schema_name_map[api_key_map[key]]
]
SERVED = [
    load_request_schema(api.api_key, version)
    for api in all_apis()
    if api.api_key in REQUESTS
    for version in range(api.min_version, api.max_version + 1)
]


def reader_of(entity: Any) -> Callable[[Buffer, int], Any]:
    layout: type = type(entity)
    return request_reader(layout, layout)


@settings(max_examples=examples(400), deadline=None)
@given(st.sampled_from(LAYOUTS).flatmap(entities))
def test_every_request_that_kio_writes_is_read_back_equal(entity: Any) -> None:
    assert reader_of(entity)(b"junk" + body(entity), 4) == entity


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(SERVED).flatmap(entities), st.text(max_size=10) | st.none())
def test_a_whole_frame_gives_its_header_client_id_and_request(entity: Any, client_id: str | None) -> None:
    frame = bytearray(encode_request(entity, -7, client_id)[4:])
    header = parse_header(frame)
    codec, message = message_codec(header.api_key, header.api_version), REQUESTS[header.api_key]
    assert header == (entity.__api_key__, entity.__version__, -7)
    assert codec.decode(frame) == (
        client_id,
        as_message(entity, message),
    )


@settings(max_examples=examples(400), deadline=None)
@given(st.data())
def test_garbage_raises_malformed_request_and_nothing_else(data: st.DataObject) -> None:
    entity = data.draw(st.sampled_from(LAYOUTS).flatmap(entities))
    raw = bytearray(body(entity))
    for _ in range(data.draw(st.integers(1, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    with contextlib.suppress(MalformedRequest):
        reader_of(entity)(raw, 0)


@pytest.mark.parametrize(
    ("key", "version", "raw"),
    [
        pytest.param(3, 1, struct.pack(">i", 2**31 - 1), id="an array of two thousand million"),
        pytest.param(3, 9, b"\xff\xff\xff\xff\x0f", id="a compact array of four thousand million"),
        pytest.param(3, 9, b"\xff\xff\xff\xff\xff\x0f", id="a varint of six bytes"),
        pytest.param(3, 1, struct.pack(">i", -2), id="a negative array length"),
        pytest.param(3, 1, struct.pack(">ih", 1, -2), id="a negative string length"),
        pytest.param(3, 1, struct.pack(">ih", 1, -1), id="null where it is not allowed"),
        pytest.param(3, 1, struct.pack(">ih", 1, 2) + b"\xff\xfe", id="a string that is not UTF-8"),
        pytest.param(3, 1, b"", id="nothing"),
    ],
)
def test_a_hostile_request_is_malformed_before_memory_is_spent(key: int, version: int, raw: bytes) -> None:
    with pytest.raises(MalformedRequest):
        request_reader(load_request_schema(key, version), REQUESTS[key])(raw, 0)


def test_unknown_tagged_fields_are_ignored() -> None:
    request = request_reader(load_request_schema(3, 12), MetadataRequest)(b"\x00\x00\x00\x01\x05\x03abc", 0)
    assert request.topics is None and request.allow_auto_topic_creation is False


def test_any_non_zero_byte_is_true() -> None:
    assert (
        request_reader(load_request_schema(3, 4), MetadataRequest)(b"\x00\x00\x00\x00\x02", 0).allow_auto_topic_creation
        is True
    )


def test_a_frame_too_short_for_a_header_is_malformed() -> None:
    with pytest.raises(MalformedRequest):
        parse_header(bytearray(b"\x00\x03\x00"))
    for frame in (b"\x00\x03\x00\x01\x00\x00\x00\x00", b"\x00\x03\x00\x01\x00\x00\x00\x00\x00\x05abc"):
        with pytest.raises(MalformedRequest):
            message_codec(3, 1).decode(bytearray(frame))

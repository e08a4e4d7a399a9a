"""Our decoder of requests agrees with kio's, and survives what kio's does not."""

from __future__ import annotations

import contextlib
import io
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema
from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_writer

from broker.errors import MalformedRequest
from broker.wire.codec import message_codec, parse_header
from broker.wire.reader import request_reader
from tests.support.kafka_client import encode_request
from tests.support.kio_strategies import entities

GENERIC_KEYS = [2, 3, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 28, 29, 30, 31, 32, 33]
GENERIC_KEYS += [35, 36, 37, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 57, 60, 61, 65, 66, 68, 69, 74, 75]
REQUESTS = [
    load_request_schema(key, version)
    for key in GENERIC_KEYS
    if key in api_key_map
    for version in schema_name_map[api_key_map[key]]
]


def _encode(entity: Any) -> bytes:
    out = io.BytesIO()
    entity_writer(type(entity))(out, entity)
    return out.getvalue()


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(REQUESTS).flatmap(entities))
def test_every_request_that_kio_writes_is_read_back_equal(entity: Any) -> None:
    assert request_reader(type(entity))(b"junk" + _encode(entity), 4) == entity


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(REQUESTS).flatmap(entities), st.text(max_size=10) | st.none())
def test_a_whole_frame_gives_its_header_client_id_and_request(entity: Any, client_id: str | None) -> None:
    frame = bytearray(encode_request(entity, -7, client_id)[4:])
    header = parse_header(frame)
    assert header == (entity.__api_key__, entity.__version__, -7)
    assert message_codec(header.api_key, header.api_version).decode(frame) == (client_id, entity)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_garbage_raises_malformed_request_and_nothing_else(data: st.DataObject) -> None:
    entity = data.draw(st.sampled_from(REQUESTS).flatmap(entities))
    raw = bytearray(_encode(entity))
    for _ in range(data.draw(st.integers(1, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    with contextlib.suppress(MalformedRequest):
        request_reader(type(entity))(raw, 0)


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
        request_reader(load_request_schema(key, version))(raw, 0)


def test_unknown_tagged_fields_are_ignored() -> None:
    request = request_reader(load_request_schema(3, 12))(b"\x00\x00\x00\x01\x05\x03abc", 0)
    assert request.topics is None and request.allow_auto_topic_creation is False


def test_any_non_zero_byte_is_true() -> None:
    assert request_reader(load_request_schema(3, 4))(b"\x00\x00\x00\x00\x02", 0).allow_auto_topic_creation is True


def test_a_frame_too_short_for_a_header_is_malformed() -> None:
    with pytest.raises(MalformedRequest):
        parse_header(bytearray(b"\x00\x03\x00"))
    for frame in (b"\x00\x03\x00\x01\x00\x00\x00\x00", b"\x00\x03\x00\x01\x00\x00\x00\x00\x00\x05abc"):
        with pytest.raises(MalformedRequest):
            message_codec(3, 1).decode(bytearray(frame))

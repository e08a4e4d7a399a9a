"""Decode frames to requests, and encode responses to buffers.

A frame is what follows the int32 size on the socket. It begins with the request header: `api key int16, api version
int16, correlation id int32, client id (int16 length, also in flexible versions)`, then a tagged-field section in
flexible versions (header v2; otherwise v1). A response begins with its size and the correlation id, and one empty tag
section in flexible versions, except for ApiVersions, whose response header is always v0: a client must be able to read
it before it knows the broker's versions (KIP-511).

Produce and Fetch go through their own codecs, everything else through `tidelog.broker.kafka.wire.reader` and
`tidelog.broker.kafka.wire.writer`, into and out of the classes of `tidelog.broker.kafka.wire.messages`. Nothing here
raises anything but `MalformedRequest` on what a client sent.

Entry: `parse_header`, `message_codec`.
"""

from __future__ import annotations

import functools
from struct import Struct, error
from typing import Any, NamedTuple, Protocol, TypeVar

from kio.index import load_request_schema, load_response_schema

from tidelog.broker.kafka.errors import MalformedRequest
from tidelog.broker.kafka.wire import fetch, produce
from tidelog.broker.kafka.wire.messages import REQUESTS
from tidelog.broker.kafka.wire.messages.base import KafkaRequest, KafkaResponse, Message
from tidelog.broker.kafka.wire.primitives import DECODE_ERRORS, read_legacy_string, skip_tags
from tidelog.broker.kafka.wire.reader import request_reader
from tidelog.broker.kafka.wire.writer import body_writer
from tidelog.runtime.types import Buffer

API_VERSIONS = 18

_FIXED_HEADER = Struct(">hhi")
_RESPONSE_HEAD = Struct(">ii")
_FLEXIBLE_RESPONSE_HEAD = Struct(">iib")
_SIZE = Struct(">i")
SIZE_BYTES = 4
LONG_ELEMENTS = 2048
"""Each takes some 15 µs to encode."""


class RequestHeader(NamedTuple):
    """The part of the header with the same layout in all versions."""

    api_key: int
    api_version: int
    correlation_id: int


class EncodedBody(NamedTuple):
    """A response body that its handler has encoded (and may have cached)."""

    body: bytes


AnyResponse = KafkaResponse | EncodedBody | produce.ProduceResponse | fetch.FetchResponse
"""What a handler may answer."""

Q = TypeVar("Q", covariant=True)
A = TypeVar("A", contravariant=True)


class MessageCodec(Protocol[Q, A]):
    """How one version of one API is read (requests `Q`) and written (responses `A`)."""

    def decode(self, frame: bytearray) -> tuple[str | None, Q]:
        """The client id and the request. Raises `MalformedRequest`."""
        ...

    def encode(self, correlation_id: int, response: A) -> list[Buffer]:
        """The whole response, its size included, as buffers to write in order."""
        ...


def parse_header(frame: bytearray) -> RequestHeader:
    """Parse API key, version and correlation id of a frame. Raises `MalformedRequest` if it is too short."""
    try:
        return RequestHeader(*_FIXED_HEADER.unpack_from(frame, 0))
    except error:
        raise MalformedRequest(f"a request of {len(frame)} bytes is shorter than its header") from None


@functools.lru_cache(maxsize=64)
def _client_id(raw: bytes) -> str:
    return raw.decode()


def _read_client_id(frame: bytearray, flexible: bool) -> tuple[str | None, int]:
    """Return the client id and the position of the body."""
    try:
        size = (frame[8] << 8) | frame[9]
        end = 10 + size
        if size >= 0x8000 or end > len(frame):
            client_id, end = read_legacy_string(frame, 8)
        else:
            client_id = _client_id(bytes(frame[10:end]))
        return client_id, skip_tags(frame, end) if flexible else end
    except (error, *DECODE_ERRORS) as problem:
        raise MalformedRequest(f"the request header does not parse: {problem}") from problem


def _frame(buffers: list[Buffer]) -> list[Buffer]:
    """Write the size into the first four bytes of the first buffer, a bytearray, which are reserved for it."""
    size = -SIZE_BYTES
    for buffer in buffers:
        size += len(buffer)
    head = buffers[0]
    assert isinstance(head, bytearray)
    _SIZE.pack_into(head, 0, size)
    return buffers


def _response_head(correlation_id: int, flexible: bool) -> bytearray:
    if flexible:
        return bytearray(_FLEXIBLE_RESPONSE_HEAD.pack(0, correlation_id, 0))
    return bytearray(_RESPONSE_HEAD.pack(0, correlation_id))


class _ProduceCodec:
    def __init__(self, version: int) -> None:
        self._version = version
        self._flexible = version >= produce.FIRST_FLEXIBLE

    def decode(self, frame: bytearray) -> tuple[str | None, produce.ProduceRequest]:
        client_id, at = _read_client_id(frame, self._flexible)
        return client_id, produce.decode_request(self._version, frame, at)

    def encode(self, correlation_id: int, response: produce.ProduceResponse) -> list[Buffer]:
        one = produce.encode_one(self._version, correlation_id, response)
        if one is not None:
            return [one]
        head = _response_head(correlation_id, self._flexible)
        produce.encode_response(self._version, response, head)
        return _frame([head])


class _FetchCodec:
    def __init__(self, version: int) -> None:
        self._version = version
        self._flexible = version >= fetch.FIRST_FLEXIBLE

    def decode(self, frame: bytearray) -> tuple[str | None, fetch.FetchRequest]:
        client_id, at = _read_client_id(frame, self._flexible)
        return client_id, fetch.decode_request(self._version, frame, at)

    def encode(self, correlation_id: int, response: fetch.FetchResponse) -> list[Buffer]:
        one = fetch.encode_one(self._version, correlation_id, response)
        if one is not None:
            return one
        return _frame(fetch.encode_response(self._version, response, _response_head(correlation_id, self._flexible)))


class _GenericCodec:
    def __init__(self, api_key: int, version: int) -> None:
        layout = load_request_schema(api_key, version)
        self._flexible_request: bool = layout.__flexible__
        self._read = request_reader(layout, REQUESTS[api_key])
        self._response = load_response_schema(api_key, version)
        self._flexible_response: bool = self._response.__flexible__ and api_key != API_VERSIONS

    def decode(self, frame: bytearray) -> tuple[str | None, KafkaRequest]:
        client_id, at = _read_client_id(frame, self._flexible_request)
        return client_id, self._read(frame, at)

    def encode(self, correlation_id: int, response: KafkaResponse | EncodedBody) -> list[Buffer]:
        head = _response_head(correlation_id, self._flexible_response)
        if isinstance(response, EncodedBody):
            head += response.body
        else:
            head += body_writer(self._response, type(response))(response)
        return _frame([head])


def encode_body(api_key: int, version: int, response: KafkaResponse) -> bytes:
    """A response without its header."""
    return body_writer(load_response_schema(api_key, version), type(response))(response)


def is_long(response: KafkaResponse) -> bool:
    """Whether a response has more than `LONG_ELEMENTS` elements: its encoding holds up an event loop for too long."""
    left, elements = LONG_ELEMENTS, [response]
    for message in elements:  # which grows
        for name in message.__struct_fields__:
            value = getattr(message, name)
            if isinstance(value, (list, tuple)) and value:
                left -= len(value)
                if left < 0:
                    return True
                if isinstance(value[0], Message):
                    elements += value
    return False


@functools.cache
def message_codec(api_key: int, version: int) -> MessageCodec[Any, Any]:
    """The codec of an API version, built at its first use. Raises `KioIndexError` for one that does not exist.

    Which classes it reads and writes depends on the key, so they are not known here; that an API's handler has the same
    is checked by `tidelog.broker.kafka.services.serve` and the tests.
    """
    if api_key == produce.ProduceRequest.API_KEY:
        return _ProduceCodec(version)
    if api_key == fetch.FetchRequest.API_KEY:
        return _FetchCodec(version)
    return _GenericCodec(api_key, version)

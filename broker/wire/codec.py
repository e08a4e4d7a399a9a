"""From a frame to a request, and from a response to buffers.

A frame is what follows the int32 size on the socket. It begins with the request header: `api key int16, api version
int16, correlation id int32, client id (int16 length, also in flexible versions)`, then a tagged-field section in
flexible versions (header v2; otherwise v1). A response begins with its size and the correlation id, and one empty tag
section in flexible versions, except for ApiVersions, whose response header is always v0: a client must be able to read
it before it knows anything of the broker (KIP-511).

Produce and Fetch go through their own codecs, everything else through kio's classes. Nothing here raises anything but
`MalformedRequest` on what a client sent.

Entry: `parse_header`, `message_codec`.
"""

from __future__ import annotations

import functools
import io
from struct import Struct, error
from typing import Any, NamedTuple, Protocol

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_writer

from broker.errors import MalformedRequest
from broker.wire import fetch, produce
from broker.wire.primitives import DECODE_ERRORS, Buffer, read_legacy_string, skip_tags
from broker.wire.reader import request_reader

API_VERSIONS = 18

_FIXED_HEADER = Struct(">hhi")
_RESPONSE_HEAD = Struct(">ii")
_FLEXIBLE_RESPONSE_HEAD = Struct(">iib")
_SIZE = Struct(">i")
SIZE_BYTES = 4


class RequestHeader(NamedTuple):
    """The part of the header that has the same place in all versions."""

    api_key: int
    api_version: int
    correlation_id: int


class EncodedBody(NamedTuple):
    """A response body that its handler has encoded before (and perhaps cached)."""

    body: bytes


class MessageCodec(Protocol):
    """How one version of one API is read and written."""

    def decode(self, frame: bytearray) -> tuple[str | None, Any]:
        """The client id and the request. Raises `MalformedRequest`."""
        ...

    def encode(self, correlation_id: int, response: Any) -> list[Buffer]:
        """The whole response, its size included, as buffers to write in order."""
        ...


def parse_header(frame: bytearray) -> RequestHeader:
    """API key, version and correlation id of a frame. Raises `MalformedRequest` if it is too short."""
    try:
        return RequestHeader(*_FIXED_HEADER.unpack_from(frame, 0))
    except error:
        raise MalformedRequest(f"a request of {len(frame)} bytes is shorter than its header") from None


@functools.lru_cache(maxsize=64)
def _client_id(raw: bytes) -> str:
    return raw.decode()


def _read_client_id(frame: bytearray, flexible: bool) -> tuple[str | None, int]:
    """The client id, and where the body begins."""
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
    """Write the size into the first buffer, a bytearray that left four bytes for it."""
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

    def decode(self, frame: bytearray) -> tuple[str | None, Any]:
        client_id, at = _read_client_id(frame, self._flexible)
        return client_id, produce.decode_request(self._version, frame, at)

    def encode(self, correlation_id: int, response: Any) -> list[Buffer]:
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

    def decode(self, frame: bytearray) -> tuple[str | None, Any]:
        client_id, at = _read_client_id(frame, self._flexible)
        return client_id, fetch.decode_request(self._version, frame, at)

    def encode(self, correlation_id: int, response: Any) -> list[Buffer]:
        one = fetch.encode_one(self._version, correlation_id, response)
        if one is not None:
            return one
        return _frame(fetch.encode_response(self._version, response, _response_head(correlation_id, self._flexible)))


class _KioCodec:
    def __init__(self, api_key: int, version: int) -> None:
        request_class = load_request_schema(api_key, version)
        self._flexible_request: bool = request_class.__flexible__
        self._flexible_response: bool = load_response_schema(api_key, version).__flexible__ and api_key != API_VERSIONS
        self._read = request_reader(request_class)

    def decode(self, frame: bytearray) -> tuple[str | None, Any]:
        client_id, at = _read_client_id(frame, self._flexible_request)
        return client_id, self._read(frame, at)

    def encode(self, correlation_id: int, response: Any) -> list[Buffer]:
        head = _response_head(correlation_id, self._flexible_response)
        head += response.body if isinstance(response, EncodedBody) else encode_body(response)
        return _frame([head])


def encode_body(response: Any) -> bytes:
    """The body of one of kio's response entities."""
    with io.BytesIO() as out:
        entity_writer(type(response))(out, response)
        return out.getvalue()


@functools.cache
def message_codec(api_key: int, version: int) -> MessageCodec:
    """The codec of an API version, built at its first use. Raises `KioIndexError` for one that does not exist."""
    if api_key == produce.API_KEY:
        return _ProduceCodec(version)
    if api_key == fetch.API_KEY:
        return _FetchCodec(version)
    return _KioCodec(api_key, version)

"""A small raw Kafka client for protocol tests: one connection, kio's classes, nothing hidden.

    async with KafkaClient(*server.address) as client:
        response = await client.send(3, 12, topics=None)

`send` builds the request class of that API and version from keyword arguments (see `request_entity`) and returns the
response entity. `post` and `receive` are its halves, for pipelining.
"""

from __future__ import annotations

import asyncio
import io
import struct
from types import TracebackType
from typing import Any, Self

from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from tests.support import schema
from tidelog.broker.kafka.wire.reader import request_reader

API_VERSIONS = 18
DESCRIBE_TRANSACTIONS = 65
DEADLINE_S = 60.0


def request_entity(api_key: int, version: int, **fields: Any) -> Any:
    """The request of an API version. Nested messages: `schema.request(key, version).make(name, **fields)`."""
    return schema.request(api_key, version).make(load_request_schema(api_key, version).__name__, **fields)


def encode_request(entity: Any, correlation_id: int, client_id: str | None = "test") -> bytes:
    """The frame of a request entity, its size included."""
    out = io.BytesIO()
    out.write(struct.pack(">hhi", entity.__api_key__, entity.__version__, correlation_id))
    if client_id is None:
        out.write(b"\xff\xff")
    else:
        raw = client_id.encode()
        out.write(struct.pack(">h", len(raw)) + raw)
    if entity.__flexible__:
        out.write(b"\x00")
    entity_writer(type(entity))(out, entity)
    body = out.getvalue()
    return struct.pack(">i", len(body)) + body


def decode_response(api_key: int, version: int, frame: bytes) -> tuple[int, Any]:
    """Correlation id and entity of a response frame (without its size)."""
    cls = load_response_schema(api_key, version)
    (correlation_id,) = struct.unpack_from(">i", frame)
    at = 4
    if cls.__flexible__ and api_key != API_VERSIONS:
        assert frame[at] == 0, "the response header has tags"
        at += 1
    if api_key == DESCRIBE_TRANSACTIONS:
        return correlation_id, request_reader(cls, cls)(frame, at)  # kio refuses a start time of -1: no transaction
    entity, size = entity_reader(cls)(frame, at)
    assert at + size == len(frame), f"{len(frame) - at - size} bytes after the response"
    return correlation_id, entity


class KafkaClient:
    """One connection to one broker."""

    def __init__(self, host: str, port: int, client_id: str | None = "test") -> None:
        self._address = (host, port)
        self._client_id = client_id
        self._next_id = 1
        self._sent: list[tuple[int, int, int]] = []
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection(*self._address, limit=1 << 26)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.transport.abort()

    async def send(self, api_key: int, version: int, **fields: Any) -> Any:
        """Send one request and return its response."""
        self.post(request_entity(api_key, version, **fields))
        return await self.receive()

    def post(self, entity: Any) -> int:
        """Send a request without waiting; returns its correlation id."""
        correlation_id = self._next_id
        self._next_id += 1
        self._sent.append((entity.__api_key__, entity.__version__, correlation_id))
        self.writer.write(encode_request(entity, correlation_id, self._client_id))
        return correlation_id

    async def receive(self) -> Any:
        """The response of the oldest request not answered yet. Raises `IncompleteReadError` if the broker hung up."""
        frame = await self.receive_frame()
        api_key, version, expected = self._sent.pop(0)
        correlation_id, entity = decode_response(api_key, version, frame)
        assert correlation_id == expected, "responses are out of order"
        return entity

    async def receive_frame(self) -> bytes:
        """The next response frame, without its size."""
        async with asyncio.timeout(DEADLINE_S):
            (size,) = struct.unpack(">i", await self.reader.readexactly(4))
            return await self.reader.readexactly(size)

    async def closed_by_broker(self) -> bool:
        """Whether the broker closes the connection, without another byte, before the deadline."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True

"""Requests of Kafka that librdkafka does not have: connections to brokers, and the fields of flexible messages.

Requests are encoded by whoever sends them: of the messages of a Kafka library five are needed, and the driver commits
in a new process for each micro-batch. Answers come from a broker that one has chosen; what is no answer is an error.

Entry: `KafkaConnections`, `KafkaAnswer`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence

from tidelog.runtime.errors import Unavailable

ANSWER_S = 30.0
MAX_ANSWER_BYTES = 64 << 20
"""Of ListTransactions, some hundred bytes for each open transaction."""


class KafkaConnections:
    """A connection to each broker that was asked; not thread-safe."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], _Connection] = {}

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The brokers to which there are connections."""
        return list(self._open)

    def ask(self, address: tuple[str, int], api: tuple[int, int], body: bytes) -> KafkaAnswer:
        """Send a request of an API key and version, and return the answer. Raises `Unavailable`."""
        try:
            connection = self._open.get(address)
            if connection is None:
                connection = self._open[address] = _Connection(address)
            return connection.ask(api, body)
        except OSError as error:
            broken = self._open.pop(address, None)
            if broken is not None:
                broken.close()
            raise Unavailable(f"the broker at {address[0]}:{address[1]} does not answer: {error}") from error

    def close(self) -> None:
        """Close them all."""
        for each in self._open.values():
            each.close()
        self._open.clear()


class _Connection:
    """A connection to a broker, with one request at a time."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, ANSWER_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._number = 0

    def ask(self, api: tuple[int, int], body: bytes) -> KafkaAnswer:
        """Send a request and return its answer. Raises `OSError`."""
        self._number += 1
        client = b"tidelog-spark"
        request = struct.pack(">hhih", *api, self._number, len(client)) + client + TAGS + body
        self._socket.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", self._receive(4))
        if not 4 <= size <= MAX_ANSWER_BYTES:
            raise OSError(f"an answer of {size} bytes")
        answer = KafkaAnswer(self._receive(size))
        if answer.int32() != self._number:
            raise OSError("the answer to another request")
        answer.tags()
        return answer

    def _receive(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            piece = self._socket.recv(size - len(found))
            if not piece:
                raise ConnectionError("the broker has closed the connection")
            found += piece
        return bytes(found)

    def close(self) -> None:
        """Close it."""
        self._socket.close()


TAGS = b"\0"
"""No tagged fields."""


def encode_length(count: int) -> bytes:
    """The length of a compact array or string, which is one more than it."""
    return _varint(count + 1)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def encode_text(text: str) -> bytes:
    """A compact string."""
    raw = text.encode()
    return encode_length(len(raw)) + raw


def encode_texts(texts: Sequence[str]) -> bytes:
    """A compact array of compact strings."""
    return encode_length(len(texts)) + b"".join(map(encode_text, texts))


class KafkaAnswer:
    """The fields of an answer, in order. Methods raise `OSError` where it is too short."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if size < 0 or end > len(self._data):
            raise OSError("an answer ends too early")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big", signed=True)

    def int16(self) -> int:
        """A signed number of 16 bits."""
        return self._number(2)

    def int32(self) -> int:
        """A signed number of 32 bits."""
        return self._number(4)

    def int64(self) -> int:
        """A signed number of 64 bits."""
        return self._number(8)

    def _varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self._take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def length(self) -> int:
        """The length of a compact array; 0 where it is null."""
        return max(0, self._varint() - 1)

    def text(self) -> str:
        """A compact string; empty where it is null."""
        return self._take(self.length()).decode()

    def texts(self) -> list[str]:
        """A compact array of compact strings."""
        return [self.text() for _ in range(self.length())]

    def tags(self) -> None:
        """Skip tagged fields."""
        for _ in range(self._varint()):
            self._varint()
            self._take(self._varint())

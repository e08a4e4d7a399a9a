"""Flexible fields (KIP-482) for the requests of the workloads: compact lengths, tagged fields.

Entry: `request`, `FlexibleReader`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

from tidelog.simulation.actors.kafka import FieldReader, Leader, Request

NO_TAGS = b"\0"
_LEADER = struct.Struct(">ii")


class FlexibleReader(FieldReader):
    """Also reads flexible fields."""

    def varint(self) -> int:
        """Read an unsigned varint."""
        value = shift = 0
        while True:
            byte = self.i8() & 0xFF
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def take(self, size: int) -> bytes:
        """Read raw bytes."""
        raw = self.data[self.at : self.at + size]
        self.at += size
        return raw

    def compact(self) -> bytes:
        """Read a string or bytes; null as empty."""
        return self.take(max(0, self.varint() - 1))

    def rows(self, read: Callable[[], Any], leader_tag: int = -1) -> list[Any]:
        """Read an array of structures; null as empty. `leader_tag`: the tag of their `leader`."""
        found = []
        for _ in range(max(0, self.varint() - 1)):
            one = read()
            told = self.tags().get(leader_tag)
            found.append(one if told is None else one._replace(leader=Leader(*_LEADER.unpack_from(told))))
        return found

    def numbers(self) -> list[int]:
        """Read an array of int32."""
        return [self.i32() for _ in range(max(0, self.varint() - 1))]

    def tags(self) -> dict[int, bytes]:
        """Read tagged fields."""
        return {self.varint(): self.take(self.varint()) for _ in range(self.varint())}


def varint(value: int) -> bytes:
    """Encode an unsigned varint."""
    raw = bytearray()
    while value >= 0x80:
        raw.append(value & 0x7F | 0x80)
        value >>= 7
    raw.append(value)
    return bytes(raw)


def compact(value: bytes | None) -> bytes:
    """Encode a string or bytes."""
    return b"\0" if value is None else varint(len(value) + 1) + value


def rows(items: Iterable[bytes]) -> bytes:
    """Encode an array of structures without tagged fields."""
    found = list(items)
    return varint(len(found) + 1) + b"".join(each + NO_TAGS for each in found)


def numbers(items: Iterable[int]) -> bytes:
    """Encode an array of int32."""
    found = list(items)
    return varint(len(found) + 1) + b"".join(struct.pack(">i", each) for each in found)


def request(api_key: int, version: int, body: bytes, read: Callable[[FlexibleReader], Any]) -> Request:
    """Return a request of a flexible version; its `body` is without the last tagged fields."""

    def skip_header(r: FieldReader) -> Any:
        flexible = FlexibleReader(r.data, r.at)
        flexible.tags()
        return read(flexible)

    return Request(api_key, version, body + NO_TAGS, skip_header, NO_TAGS)

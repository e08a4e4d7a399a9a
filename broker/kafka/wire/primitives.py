"""The primitives of Kafka's wire format, read from one buffer by position, and written to a bytearray.

Readers take `(buffer, position)` and return `(value, next position)`. They raise `MalformedRequest` for lengths past
the end of the buffer; a fixed-size field past the end raises `struct.error` or `IndexError`, which the message decoders
convert to `MalformedRequest` in one place. "Compact" means the flexible versions' encoding: an unsigned varint of
length + 1.
"""

from __future__ import annotations

from struct import Struct
from typing import TypeVar

from tidelog.broker.kafka.errors import MalformedRequest, OversizedRequest
from tidelog.runtime.types import Buffer

T = TypeVar("T")

INT16 = Struct(">h")
INT32 = Struct(">i")
INT64 = Struct(">q")

MAX_ELEMENTS = 65_536
"""Maximum number of elements of all arrays of a request. Each becomes an object many times its size and takes
microseconds of the event loop; a request for 10,000 partitions has 10,000."""
MAX_TAGS = 32
"""Maximum number of tagged fields of a section; Kafka's messages have fewer than ten."""

DECODE_ERRORS = (IndexError, UnicodeDecodeError, OverflowError, ValueError)
"""Exceptions of the readers for invalid input besides `MalformedRequest` and `struct.error`."""


def read_uvarint(buffer: Buffer, at: int) -> tuple[int, int]:
    """Read an unsigned 32-bit varint, 1 to 5 bytes."""
    byte = buffer[at]
    at += 1
    if byte < 0x80:
        return byte, at
    value = byte & 0x7F
    for shift in (7, 14, 21, 28):
        byte = buffer[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise MalformedRequest("a varint is longer than five bytes")


def write_uvarint(out: bytearray, value: int) -> None:
    """Append an unsigned varint."""
    while value >= 0x80:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)


def _checked_end(buffer: Buffer, at: int, size: int) -> int:
    end = at + size
    if end > len(buffer):
        raise MalformedRequest(f"a field of {size} bytes exceeds the frame")
    return end


def read_legacy_string(buffer: Buffer, at: int) -> tuple[str | None, int]:
    """Read a string with an int16 length; -1 is null."""
    (size,) = INT16.unpack_from(buffer, at)
    at += 2
    if size < 0:
        if size == -1:
            return None, at
        raise MalformedRequest(f"negative string length {size}")
    end = _checked_end(buffer, at, size)
    return str(buffer[at:end], "utf-8"), end


def read_compact_string(buffer: Buffer, at: int) -> tuple[str | None, int]:
    """Read a string with a compact length; 0 is null."""
    size, at = read_uvarint(buffer, at)
    if size == 0:
        return None, at
    end = _checked_end(buffer, at, size - 1)
    return str(buffer[at:end], "utf-8"), end


def legacy_bytes_span(buffer: Buffer, at: int) -> tuple[int, int]:
    """Return start and end of bytes with an int32 length; (next, -1) for null."""
    (size,) = INT32.unpack_from(buffer, at)
    at += 4
    if size < 0:
        if size == -1:
            return at, -1
        raise MalformedRequest(f"negative bytes length {size}")
    return at, _checked_end(buffer, at, size)


def compact_bytes_span(buffer: Buffer, at: int) -> tuple[int, int]:
    """Return start and end of bytes with a compact length; (next, -1) for null."""
    size, at = read_uvarint(buffer, at)
    if size == 0:
        return at, -1
    return at, _checked_end(buffer, at, size - 1)


def read_legacy_count(buffer: Buffer, at: int) -> tuple[int, int]:
    """Read the length of an array; -1 is null. An element takes at least a byte, so a greater length is invalid."""
    (count,) = INT32.unpack_from(buffer, at)
    at += 4
    if count < -1 or count > len(buffer) - at:
        raise MalformedRequest(f"an array of {count} elements exceeds the frame")
    return count, at


def read_compact_count(buffer: Buffer, at: int) -> tuple[int, int]:
    """Read the length of an array in flexible versions; -1 is null."""
    count, at = read_uvarint(buffer, at)
    if count - 1 > len(buffer) - at:
        raise MalformedRequest(f"an array of {count - 1} elements exceeds the frame")
    return count - 1, at


def too_many_elements() -> OversizedRequest:
    """The error for more than `MAX_ELEMENTS` elements."""
    return OversizedRequest(f"a request has more than {MAX_ELEMENTS} array elements")


def skip_tags(buffer: Buffer, at: int) -> int:
    """Skip a tagged-field section; unknown tags are ignored, as required by KIP-482."""
    count = buffer[at]
    if count == 0:
        return at + 1
    count, at = _tag_count(buffer, at)
    for _ in range(count):
        _, at = read_uvarint(buffer, at)
        size, at = read_uvarint(buffer, at)
        at = _checked_end(buffer, at, size)
    return at


def _tag_count(buffer: Buffer, at: int) -> tuple[int, int]:
    count, at = read_uvarint(buffer, at)
    if count > MAX_TAGS:
        raise OversizedRequest(f"a section of {count} tagged fields is over the limit of {MAX_TAGS}")
    return count, at


def read_tags(buffer: Buffer, at: int) -> tuple[dict[int, tuple[int, int]], int]:
    """Read a tagged-field section as `{tag: (start, end)}` of the values."""
    count, at = _tag_count(buffer, at)
    tags: dict[int, tuple[int, int]] = {}
    for _ in range(count):
        tag, at = read_uvarint(buffer, at)
        size, at = read_uvarint(buffer, at)
        end = _checked_end(buffer, at, size)
        tags[tag] = (at, end)
        at = end
    return tags, at


def required(value: T | None, what: str) -> T:
    """`value`, or `MalformedRequest` where null is not allowed."""
    if value is None:
        raise MalformedRequest(f"{what} is null")
    return value


def write_string(out: bytearray, text: str | None, flexible: bool) -> None:
    """Append a (nullable) string."""
    if text is None:
        out += b"\x00" if flexible else b"\xff\xff"
        return
    raw = text.encode()
    if flexible:
        write_uvarint(out, len(raw) + 1)
    else:
        if len(raw) > 0x7FFF:
            raise ValueError(f"a string of {len(raw)} bytes does not fit an int16 length")
        out += INT16.pack(len(raw))
    out += raw


def write_count(out: bytearray, count: int, flexible: bool) -> None:
    """Append an array length; -1 is null."""
    if flexible:
        write_uvarint(out, count + 1)
    else:
        out += INT32.pack(count)

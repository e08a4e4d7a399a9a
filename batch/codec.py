"""The records inside a v2 record batch, once decompressed: varints, keys, values, headers.

A record is, with all numbers zig-zag varints of at most 5 (int32) or 10 (int64) bytes:
`length, attributes (1 byte, 0), timestamp delta (int64), offset delta, key length (-1: null), key, value length
(-1: null), value, header count, headers`; a header is `key length, key (UTF-8), value length (-1: null), value`.

Invariant: every length in the input is checked against the remaining bytes before it is used.
Entry: `encode_record`, `decode_records`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tidelog.batch.errors import CorruptRecord

Header = tuple[str, bytes | None]


class Record(NamedTuple):
    """One decoded record."""

    offset: int
    """int64. Ignored when a batch is built: records are numbered by position."""
    timestamp: int
    """Milliseconds since the Unix epoch, or -1."""
    key: bytes | None
    value: bytes | None
    headers: Sequence[Header] = ()


def put_varint(out: bytearray, value: int) -> None:
    """Append the zig-zag varint of `value` (int64)."""
    value = value << 1 if value >= 0 else ~(value << 1)
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def get_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return `(value, next position)` of the zig-zag varint at `at`. Raises `IndexError`, `CorruptRecord`."""
    byte = data[at]
    at += 1
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), at
    value, shift = byte & 0x7F, 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
        shift += 7
        if shift > 63:
            raise CorruptRecord("a varint is longer than 10 bytes")


def _put_bytes(out: bytearray, value: bytes | None) -> None:
    if value is None:
        out.append(1)  # -1
    else:
        put_varint(out, len(value))
        out += value


def encode_record(record: Record, offset_delta: int, timestamp_delta: int) -> bytearray:
    """Encode a record, preceded by its length."""
    body = bytearray(1)  # attributes
    put_varint(body, timestamp_delta)
    put_varint(body, offset_delta)
    _put_bytes(body, record.key)
    _put_bytes(body, record.value)
    put_varint(body, len(record.headers))
    for name, value in record.headers:
        _put_bytes(body, name.encode())
        _put_bytes(body, value)
    out = bytearray()
    put_varint(out, len(body))
    out += body
    return out


def _get_bytes(data: bytes, at: int, end: int) -> tuple[bytes | None, int]:
    length, at = get_varint(data, at)
    if length < 0:
        return None, at
    stop = at + length
    if stop > end:
        raise CorruptRecord(f"a field of {length} bytes does not fit its record")
    return data[at:stop], stop


def _get_headers(data: bytes, at: int, end: int, count: int) -> tuple[tuple[Header, ...], int]:
    if count < 0 or count > end - at:  # a header takes at least two bytes
        raise CorruptRecord(f"a record cannot have {count} headers in {end - at} bytes")
    headers: list[Header] = []
    for _ in range(count):
        name, at = _get_bytes(data, at, end)
        if name is None:
            raise CorruptRecord("a header has no key")
        value, at = _get_bytes(data, at, end)
        headers.append((name.decode(errors="surrogateescape"), value))
    return tuple(headers), at


def decode_records(data: bytes, count: int, base_offset: int, base_timestamp: int) -> Iterator[Record]:
    """Iterate lazily over the `count` records in `data`, in order. Raises `CorruptRecord` for malformed bytes."""
    at, size = 0, len(data)
    try:
        for _ in range(count):
            length, at = get_varint(data, at)
            end = at + length
            if length < 6 or end > size:
                raise CorruptRecord(f"a record of {length} bytes does not fit its batch")
            timestamp_delta, at = get_varint(data, at + 1)
            offset_delta, at = get_varint(data, at)
            key, at = _get_bytes(data, at, end)
            value, at = _get_bytes(data, at, end)
            headers: tuple[Header, ...] = ()
            header_count, at = get_varint(data, at)
            if header_count:
                headers, at = _get_headers(data, at, end, header_count)
            if at != end:
                raise CorruptRecord("a record's length does not match its fields")
            yield Record(base_offset + offset_delta, base_timestamp + timestamp_delta, key, value, headers)
    except IndexError as error:
        raise CorruptRecord("records end too early") from error
    if at != size:
        raise CorruptRecord(f"{size - at} bytes follow the last record of a batch")

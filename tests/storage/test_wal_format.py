"""The bytes of a WAL record."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.runtime.types import Buffer
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import WalRecordType
from tidelog.storage.wal.format import (
    HEADER_BYTES,
    crc_matches,
    encode_header,
    misplaced,
    read_header,
    record_of,
    unsupported,
)

int64 = st.integers(0, (1 << 63) - 1)
int32 = st.integers(0, (1 << 31) - 1)
payloads = st.lists(st.binary(max_size=200), max_size=4)


def encode(
    type: int = 1,
    offset: int = 0,
    confirm: int = 0,
    stream: int = 0,
    epoch: int = 0,
    base: int = 0,
    master: int = 0,
    count: int = 0,
    payload: Sequence[Buffer] = (),
) -> bytes:
    length = sum(map(len, payload))
    record = StreamAppend(stream, epoch, base, count, payload)
    return encode_header(type, length, offset, confirm, master, record) + b"".join(payload)


def test_layout_is_the_documented_one() -> None:
    raw = encode(1, 1 << 40, 1 << 39, -1, 1 << 50, 1 << 60, 7, 3, [b"ab", b"c"])
    assert len(raw) == HEADER_BYTES + 3
    assert raw[0:4] == b"TLWR"
    assert struct.unpack(">I", raw[4:8])[0] == crc32c(raw[8:])
    assert (raw[8], raw[9], raw[10:12]) == (1, 1, b"\0\0")
    assert struct.unpack(">I", raw[12:16])[0] == 3
    assert struct.unpack(">qqqqqii", raw[16:64]) == (1 << 40, 1 << 39, -1, 1 << 50, 1 << 60, 7, 3)
    assert raw[64:] == b"abc"


@given(st.sampled_from(WalRecordType), int64, int64, int64, int64, int64, int32, int32, payloads, st.binary(max_size=9))
@settings(max_examples=examples(60))
def test_what_was_encoded_is_read_back(
    type: WalRecordType,
    offset: int,
    confirm: int,
    stream: int,
    epoch: int,
    base: int,
    master: int,
    count: int,
    payload: list[bytes],
    before: bytes,
) -> None:
    raw = memoryview(before + encode(type, offset, confirm, stream, epoch, base, master, count, payload))
    header = read_header(raw, len(before))
    assert not misplaced(header, offset)
    assert misplaced(header, offset + 1)
    assert crc_matches(header, raw, len(before))
    assert not unsupported(header)
    assert header.confirm_offset == confirm
    record = record_of(header, raw, len(before))
    assert (record.offset, record.type, record.master_epoch) == (offset, type, master)
    assert (record.stream_id, record.stream_epoch, record.base_offset, record.count) == (stream, epoch, base, count)
    assert bytes(record.payload) == b"".join(payload)
    assert record.end_offset == offset + HEADER_BYTES + len(record.payload)


@given(payloads, st.data())
@settings(max_examples=examples(100))
def test_any_flipped_bit_is_found(payload: list[bytes], data: st.DataObject) -> None:
    raw = bytearray(encode(offset=77, stream=5, payload=payload))
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    header = read_header(raw, 0)
    whole = not misplaced(header, 77) and HEADER_BYTES + header.payload_length <= len(raw)
    assert not (whole and crc_matches(header, memoryview(raw), 0))


def test_a_later_version_is_named_not_misread() -> None:
    raw = bytearray(encode())
    raw[8] = 2
    assert "version 2" in unsupported(read_header(raw, 0))
    raw[8], raw[9] = 1, 200
    assert "type 200" in unsupported(read_header(raw, 0))

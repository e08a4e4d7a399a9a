"""The records of `__consumer_offsets`: Kafka's layouts byte for byte, and every value there and back."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.batch.errors import CorruptRecord
from tidelog.broker.groups.records import (
    GroupKey,
    GroupValue,
    MemberValue,
    OffsetKey,
    OffsetValue,
    UnknownKey,
    encode_group_key,
    encode_group_value,
    encode_offset_key,
    encode_offset_value,
    parse_group_value,
    parse_key,
    parse_offset_value,
)
from tidelog.runtime.errors import InvalidInput

TEXT = st.text(max_size=40)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
MEMBERS = st.builds(
    MemberValue,
    TEXT,
    st.none() | TEXT,
    TEXT,
    TEXT,
    st.integers(0, (1 << 31) - 1),
    INT32,
    st.binary(max_size=40),
    st.binary(max_size=40),
)
GROUPS = st.builds(
    GroupValue, TEXT, INT32, st.none() | TEXT, st.none() | TEXT, INT64, st.lists(MEMBERS, max_size=4).map(tuple)
)


def string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def compact(data: bytes) -> bytes:
    assert len(data) < 127
    return bytes([len(data) + 1]) + data


def test_offset_commit_key_v1_has_kafkas_bytes() -> None:
    assert encode_offset_key(OffsetKey("group", "orders", 7)).hex() == (
        "0001" + "0005" + b"group".hex() + "0006" + b"orders".hex() + "00000007"
    )


def test_group_metadata_key_v2_has_kafkas_bytes() -> None:
    assert encode_group_key("group").hex() == "0002" + "0005" + b"group".hex()


def test_offset_commit_value_v3_has_kafkas_bytes() -> None:
    value = OffsetValue(0x1122, 5, "note", 0x0102030405)
    assert encode_offset_value(value).hex() == (
        "0003" + "0000000000001122" + "00000005" + "0004" + b"note".hex() + "0000000102030405"
    )


def test_a_topic_id_is_written_as_v4_as_kafka_does() -> None:
    value = OffsetValue(0x1122, 5, "note", 0x0102030405, topic_id=b"0123456789abcdef")
    assert (
        encode_offset_value(value).hex()
        == ("0004" + "0000000000001122" + "00000005" + "05" + b"note".hex() + "0000000102030405" + "01" + "00" + "10")
        + b"0123456789abcdef".hex()
    )


def test_an_expire_timestamp_is_written_as_v1_as_kafka_does() -> None:
    data = encode_offset_value(OffsetValue(1, 9, "", 2, expire_ms=3))
    assert data.hex() == "0001" + "0000000000000001" + "0000" + "0000000000000002" + "0000000000000003"
    assert parse_offset_value(data) == OffsetValue(1, -1, "", 2, 3)  # v1 has no leader epoch


def test_group_metadata_value_v3_has_kafkas_bytes() -> None:
    member = MemberValue("m-1", "i", "cl", "/h", 30, 10, b"sub", b"asg")
    value = GroupValue("consumer", 4, "range", "m-1", 99, (member,))
    assert encode_group_value(value) == b"".join(
        (
            struct.pack(">h", 3),
            string("consumer"),
            struct.pack(">i", 4),
            string("range"),
            string("m-1"),
            struct.pack(">q", 99),
            struct.pack(">i", 1),
            string("m-1"),
            string("i"),
            string("cl"),
            string("/h"),
            struct.pack(">ii", 30, 10),
            struct.pack(">i", 3) + b"sub",
            struct.pack(">i", 3) + b"asg",
        )
    )


def test_nulls_are_minus_one_lengths() -> None:
    empty = GroupValue("", 0, None, None, -1, ())
    assert encode_group_value(empty).hex() == "0003" + "0000" + "00000000" + "ffff" + "ffff" + "ff" * 8 + "00000000"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (struct.pack(">hq", 0, 5) + string("m") + struct.pack(">q", 6), OffsetValue(5, -1, "m", 6)),
        (struct.pack(">hq", 1, 5) + string("m") + struct.pack(">qq", 6, 7), OffsetValue(5, -1, "m", 6, 7)),
        (struct.pack(">hq", 2, 5) + string("m") + struct.pack(">q", 6), OffsetValue(5, -1, "m", 6)),
        (struct.pack(">hqi", 3, 5, 2) + string("m") + struct.pack(">q", 6), OffsetValue(5, 2, "m", 6)),
        (struct.pack(">hqi", 4, 5, 2) + compact(b"m") + struct.pack(">q", 6) + b"\0", OffsetValue(5, 2, "m", 6)),
        (  # v4 with a tagged field, the topic id, that says that it is not known
            struct.pack(">hqi", 4, 5, 2) + compact(b"m") + struct.pack(">q", 6) + b"\1\0\x10" + bytes(16),
            OffsetValue(5, 2, "m", 6),
        ),
        (
            struct.pack(">hqi", 4, 5, 2) + compact(b"m") + struct.pack(">q", 6) + b"\2\7\1x\0\x10" + b"i" * 16,
            OffsetValue(5, 2, "m", 6, topic_id=b"i" * 16),
        ),
    ],
    ids=["v0", "v1", "v2", "v3", "v4", "v4-tagged", "v4-topic-id"],
)
def test_offset_values_of_every_version_are_read(data: bytes, expected: OffsetValue) -> None:
    assert parse_offset_value(data) == expected


@pytest.mark.parametrize("version", range(5))
def test_group_values_of_every_version_are_read(version: int) -> None:
    flexible = version >= 4
    text = (lambda value: compact(value.encode())) if flexible else string
    data = struct.pack(">h", version) + text("consumer") + struct.pack(">i", 4) + text("range") + text("m")
    data += struct.pack(">q", 77) if version >= 2 else b""
    data += b"\x02" if flexible else struct.pack(">i", 1)
    data += text("m") + (text("inst") if version >= 3 else b"") + text("c") + text("/h")
    data += (struct.pack(">i", 30) if version >= 1 else b"") + struct.pack(">i", 10)
    for blob in (b"sub", b"asg"):
        data += compact(blob) if flexible else struct.pack(">i", 3) + blob
    data += b"\0\0" if flexible else b""
    member = MemberValue(
        "m", "inst" if version >= 3 else None, "c", "/h", 30 if version >= 1 else 10, 10, b"sub", b"asg"
    )
    assert parse_group_value(data) == GroupValue("consumer", 4, "range", "m", 77 if version >= 2 else -1, (member,))


def test_both_old_versions_of_the_offset_key_are_read() -> None:
    body = encode_offset_key(OffsetKey("g", "t", 1))[2:]
    assert parse_key(b"\0\0" + body) == parse_key(b"\0\1" + body) == OffsetKey("g", "t", 1)


def test_a_key_of_a_newer_type_is_told_apart_and_not_parsed() -> None:
    assert parse_key(b"\0\x03anything") == UnknownKey(3)


@given(TEXT, TEXT, INT32)
def test_keys_come_back(group: str, topic: str, partition: int) -> None:
    assert parse_key(encode_offset_key(OffsetKey(group, topic, partition))) == OffsetKey(group, topic, partition)
    assert parse_key(encode_group_key(group)) == GroupKey(group)


@given(INT64, INT32, TEXT, INT64, st.sampled_from((b"", b"0123456789abcdef")))
def test_offset_values_come_back(offset: int, epoch: int, metadata: str, commit_ms: int, topic_id: bytes) -> None:
    value = OffsetValue(offset, epoch, metadata, commit_ms, topic_id=topic_id)
    assert parse_offset_value(encode_offset_value(value)) == value


@given(GROUPS)
def test_group_values_come_back(value: GroupValue) -> None:
    assert parse_group_value(encode_group_value(value)) == value


@given(GROUPS, st.data())
def test_damaged_bytes_raise_corrupt_record_and_nothing_else(value: GroupValue, data: st.DataObject) -> None:
    whole = encode_group_value(value)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CorruptRecord):
        parse_group_value(whole[:cut])
    with pytest.raises(CorruptRecord):
        parse_group_value(whole + b"\0")
    with pytest.raises(CorruptRecord):
        parse_offset_value(b"\0\5" + whole)


@given(st.binary(max_size=60))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    for parse in (parse_key, parse_offset_value, parse_group_value):
        try:
            parse(data)
        except CorruptRecord:
            continue


def test_a_string_that_no_record_can_hold_is_refused() -> None:
    with pytest.raises(InvalidInput):
        encode_group_key("x" * 32_768)
    assert len(encode_group_key("x" * 32_767)) == 32_771

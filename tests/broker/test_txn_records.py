"""The records of `__transaction_state`: Kafka's layouts byte for byte, and every value there and back."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.batch.errors import CorruptRecord
from tidelog.broker.txn.records import (
    TxnKey,
    TxnState,
    TxnValue,
    UnknownTxnKey,
    encode_txn_key,
    encode_txn_value,
    parse_txn_key,
    parse_txn_value,
)
from tidelog.runtime.errors import InvalidInput

INT16 = st.integers(-(1 << 15), (1 << 15) - 1)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
KNOWN_TAGS = (0, 1, 2, 10_000, 10_001, 10_002)
TAGS = st.dictionaries(
    st.integers(0, (1 << 32) - 1).filter(lambda tag: tag not in KNOWN_TAGS), st.binary(max_size=200), max_size=3
)
PARTITIONS = st.frozensets(st.tuples(st.text(max_size=20), st.integers(0, (1 << 31) - 1)), max_size=6)
VALUES = st.builds(
    TxnValue,
    INT64,
    INT16,
    INT32,
    st.sampled_from(TxnState),
    PARTITIONS,
    INT64,
    INT64,
    INT64,
    INT64,
    INT16,
    INT16,
    INT16,
    TAGS.map(lambda tags: tuple(sorted(tags.items()))),
    st.booleans(),
)
EMPTY = TxnValue(7, 3, 60_000, TxnState.EMPTY, updated_ms=0x0102)
ONGOING = TxnValue(
    0x1122,
    5,
    60_000,
    TxnState.ONGOING,
    frozenset((("b", 1), ("a", 9), ("a", 2))),
    updated_ms=0x0102,
    started_ms=0x0101,
)
HEAD = "0001" + "0000000000001122" + "0005" + "0000ea60" + "01"
TIMES = "0000000000000102" + "0000000000000101"
TOPICS = "03" + ("02" + "61" + "03" + "00000002" + "00000009" + "00") + ("02" + "62" + "02" + "00000001" + "00")


def test_the_key_has_kafkas_bytes() -> None:
    assert encode_txn_key("pay").hex() == "0000" + "0003" + b"pay".hex()


def test_an_empty_value_has_kafkas_bytes() -> None:
    assert encode_txn_value(EMPTY).hex() == (
        "0001" + "0000000000000007" + "0003" + "0000ea60" + "00" + "00" + "0000000000000102" + "ff" * 8 + "00"
    )


def test_a_value_with_partitions_has_kafkas_bytes() -> None:
    assert encode_txn_value(ONGOING).hex() == HEAD + TOPICS + TIMES + "00"


def test_a_complete_value_has_an_empty_array_not_null() -> None:
    data = encode_txn_value(EMPTY._replace(state=TxnState.COMPLETE_COMMIT))
    assert data[2 + 8 + 2 + 4 : 2 + 8 + 2 + 4 + 2].hex() == "0401"


def test_tags_come_in_ascending_order_with_ours_last() -> None:
    value = ONGOING._replace(
        previous_producer_id=1,
        next_producer_id=2,
        client_version=2,
        last_epoch=4,
        next_epoch=6,
        unknown_tags=((3, b"xy"), (20_000, b"")),
    )
    assert encode_txn_value(value).hex() == HEAD + TOPICS + TIMES + "07" + (
        ("00" + "08" + "0000000000000001")
        + ("01" + "08" + "0000000000000002")
        + ("02" + "02" + "0002")
        + ("03" + "02" + b"xy".hex())
        + ("904e" + "02" + "0004")
        + ("914e" + "02" + "0006")
        + ("a09c01" + "00")
    )


def test_version_0_is_read() -> None:
    body = struct.pack(">hqhib", 0, 0x1122, 5, 60_000, 1) + struct.pack(">i", 2)
    body += struct.pack(">h", 1) + b"a" + struct.pack(">iii", 2, 2, 9)
    body += struct.pack(">h", 1) + b"b" + struct.pack(">ii", 1, 1)
    assert parse_txn_value(body + struct.pack(">qq", 0x0102, 0x0101)) == ONGOING
    null = struct.pack(">hqhibi", 0, 7, 3, 60_000, 0, -1) + struct.pack(">qq", 0x0102, -1)
    assert parse_txn_value(null) == EMPTY


def test_a_tag_of_a_newer_version_is_kept_and_written_back() -> None:
    data = bytes.fromhex(HEAD + TOPICS + TIMES + "01" + "07" + "03" + "616263")
    value = parse_txn_value(data)
    assert value.unknown_tags == ((7, b"abc"),)
    assert encode_txn_value(value._replace(epoch=6))[-5:] == data[-5:]


def test_a_key_of_a_newer_type_is_told_apart_and_not_parsed() -> None:
    assert parse_txn_key(b"\0\x01anything") == UnknownTxnKey(1)


@given(st.text(max_size=40))
def test_keys_come_back(transactional_id: str) -> None:
    assert parse_txn_key(encode_txn_key(transactional_id)) == TxnKey(transactional_id)


@given(VALUES)
def test_values_come_back(value: TxnValue) -> None:
    assert parse_txn_value(encode_txn_value(value)) == value


@given(VALUES, st.data())
def test_damaged_values_raise_corrupt_record_and_nothing_else(value: TxnValue, data: st.DataObject) -> None:
    whole = encode_txn_value(value)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(CorruptRecord):
        parse_txn_value(whole[:cut])
    with pytest.raises(CorruptRecord):
        parse_txn_value(whole + b"\0")
    with pytest.raises(CorruptRecord):
        parse_txn_value(b"\0\2" + whole[2:])


@given(st.binary(max_size=80), st.booleans())
def test_random_bytes_never_raise_anything_else(data: bytes, head: bool) -> None:
    for parse, form in ((parse_txn_key, b""), (parse_txn_value, bytes.fromhex(HEAD))):
        try:
            parse(form + data if head else data)
        except CorruptRecord:
            continue


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("0001" + "00" * 14 + "07", "state 7"),
        ("0001" + "00" * 14 + "ff", "state -1"),
        (HEAD + "ffffffff0f", "number of topics"),
        (HEAD + "02" + "0261" + "ffffffff0f", "number of partitions"),
        (HEAD + "02" + "0261" + "00", "number of partitions: -1"),
        (HEAD + "02" + "00" + "02" + "00000001" + "00", "null string"),
        (HEAD + "02" + "0261" + "02" + "ffffffff" + "00" + TIMES + "00", "partition -1"),
        (HEAD + "02" + "0261" + "03" + "0000000100000001" + "00" + TIMES + "00", "twice"),
        (HEAD + "03" + 2 * ("0261" + "02" + "00000001" + "00") + TIMES + "00", "twice"),
        (HEAD + "02" + "02ff" + "02" + "00000001" + "00" + TIMES + "00", "UTF-8"),
        (HEAD + "01" + TIMES + "01" + "00" + "02" + "0000", "tag 0 .* 2 bytes, not 8"),
        (HEAD + "01" + TIMES + "02" + "07" + "00" + "07" + "00", "tag 7 after tag 7"),
        (HEAD + "01" + TIMES + "01" + "8080808080", "more than five bytes"),
        (HEAD + "01" + TIMES + "ffffffff0f", "truncated"),
    ],
)
def test_what_is_wrong_with_a_value_is_said(body: str, says: str) -> None:
    with pytest.raises(CorruptRecord, match=says):
        parse_txn_value(bytes.fromhex(body))


def test_a_count_that_the_bytes_cannot_hold_costs_no_memory() -> None:
    data = bytes.fromhex(HEAD + "ffffffff0f") + bytes(30)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecord):
            parse_txn_value(data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_an_id_that_no_record_can_hold_is_refused() -> None:
    with pytest.raises(InvalidInput, match="32768 bytes"):
        encode_txn_key("x" * 32_768)
    assert len(encode_txn_key("x" * 32_767)) == 32_771

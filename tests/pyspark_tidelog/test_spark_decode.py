"""Record batches to Arrow, against the record-by-record decoder, and over damaged input."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from pyspark_tidelog.columns import LAST_MS, arrow_schema, column_names, spark_schema
from pyspark_tidelog.decode import ROWS, RecordDecoder
from pyspark_tidelog.rows import RowCollector
from tests.pyspark_tidelog.test_spark_tail_rows import TailMessage
from tidelog.batch.batch import (
    HEADER_BYTES,
    ControlType,
    build_batch,
    build_control_batch,
    iter_batches,
    iter_records,
    set_base_offset,
    set_log_append_time,
)
from tidelog.batch.checksum import BATCH_CRC_AT, BATCH_CRC_FROM
from tidelog.batch.codec import Record
from tidelog.batch.errors import CorruptRecord, RecordTooLarge

BYTES = st.none() | st.binary(max_size=40)
RECORDS = st.lists(
    st.builds(
        Record,
        st.just(0),
        st.integers(-1, 1 << 42),
        BYTES,
        BYTES,
        st.lists(st.tuples(st.text(max_size=8), BYTES), max_size=3),
    ),
    min_size=1,
    max_size=12,
)
CODECS = range(5)


def rows(decoder: RecordDecoder) -> list[dict[str, Any]]:
    if not decoder.rows:
        return []
    batch = decoder.take()
    batch.validate(full=True)
    return list(batch.to_pylist())


def resealed(batch: bytes | bytearray) -> bytes:
    """A batch with the CRC of its present bytes: a writer's mistake, and no flipped bit."""
    out = bytearray(batch)
    struct.pack_into(">I", out, BATCH_CRC_AT, crc32c(memoryview(out)[BATCH_CRC_FROM:]))
    return bytes(out)


@given(st.lists(st.tuples(RECORDS, st.sampled_from(CODECS)), min_size=1, max_size=4), st.data())
def test_the_rows_are_the_records(drawn: list[tuple[list[Record], int]], data: st.DataObject) -> None:
    log, at = b"", data.draw(st.integers(0, 1 << 40))
    first = at
    for records, codec in drawn:
        log += build_batch(records, base_offset=at, compression=codec)
        at += len(records)
    start = data.draw(st.integers(first, at - 1))
    end = data.draw(st.integers(start + 1, at + 1))
    decoder = RecordDecoder("t", 7, columns=column_names(include_headers=True))
    assert decoder.add(log, start, end) == min(at, end)
    wanted = [
        {
            "key": each.key,
            "value": each.value,
            "topic": "t",
            "partition": 7,
            "offset": each.offset,
            "timestampType": 0,
            "headers": [{"key": key, "value": value} for key, value in each.headers] or None,
        }
        for header, batch in iter_batches(log)
        for each in iter_records(batch, header=header)
        if start <= each.offset < end
    ]
    found = rows(decoder)
    times = [each.pop("timestamp") for each in found]
    assert found == wanted
    assert len(times) == len(wanted)


def test_a_header_name_that_is_no_utf_8_is_replaced_and_its_record_kept() -> None:
    names = ["fine", b"caf\xe9".decode(errors="surrogateescape"), "naïve"]
    decoder = RecordDecoder("t", 0, columns=column_names(include_headers=True))
    decoder.add(build_batch([Record(0, 5, b"k", b"v", [(name, b"1") for name in names])]), 0, 10)
    (found,) = rows(decoder)
    assert [each["key"] for each in found["headers"]] == ["fine", "caf\ufffd", "naïve"]


def test_several_takes_hold_what_was_added_between_them() -> None:
    decoder = RecordDecoder("t", 0)
    for base in (0, 10, 20):
        batch = build_batch([Record(0, 5, None, b"v%d" % at) for at in range(base, base + 10)], base_offset=base)
        decoder.add(batch, 0, 100)
        assert [each["value"] for each in rows(decoder)] == [b"v%d" % at for at in range(base, base + 10)]


def test_timestamps_are_the_records_own_or_those_of_the_log() -> None:
    records = [Record(0, 1_000, None, b"a"), Record(0, 3_500, None, b"b"), Record(0, -1, None, b"c")]
    own, of_log = build_batch(records), bytearray(build_batch(records, base_offset=3))
    set_log_append_time(of_log, 9_000)
    decoder = RecordDecoder("t", 0)
    decoder.add(own + bytes(of_log), 0, 100)
    found = rows(decoder)
    assert [round(each["timestamp"].timestamp() * 1_000) for each in found] == [1_000, 3_500, -1, 9_000, 9_000, 9_000]
    assert [each["timestampType"] for each in found] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(("given", "found"), [(1 << 60, LAST_MS), (-(1 << 60), -LAST_MS)])
def test_a_timestamp_that_spark_cannot_hold_is_the_last_or_first_that_it_can(given: int, found: int) -> None:
    decoder, tail = RecordDecoder("t", 0, ["timestamp"]), RowCollector(["timestamp"])
    decoder.add(build_batch([Record(0, given, None, b"a"), Record(0, 1, None, b"b")]), 0, 100)
    for batch, expected in ((decoder.take(), [found, 1]), (_tail(tail, given), [found])):
        assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [each * 1_000 for each in expected]


def _tail(rows: RowCollector, timestamp_ms: int) -> pa.RecordBatch:
    class Message(TailMessage):
        def timestamp(self) -> tuple[int, int]:
            return 1, timestamp_ms

    rows.add(Message(None, b"v", None))
    return rows.take()


def test_a_batch_that_decompresses_to_too_much_is_told_with_its_place() -> None:
    batch = build_batch([Record(0, 5, None, bytes(33 << 20))] * 2, base_offset=8, compression=1)
    with pytest.raises(RecordTooLarge, match=r"t-3: batch 8: a batch decompresses to more than 67108864 bytes"):
        RecordDecoder("t", 3).add(batch, 0, 100)


def test_control_batches_have_no_rows_and_are_passed() -> None:
    marker = bytearray(
        build_control_batch(ControlType.COMMIT, producer_id=1, producer_epoch=0, coordinator_epoch=0, timestamp=5)
    )
    set_base_offset(marker, 1)
    log = build_batch([Record(0, 5, None, b"a")]) + bytes(marker)
    decoder = RecordDecoder("t", 0)
    assert decoder.add(log, 0, 100) == 2
    assert [each["value"] for each in rows(decoder)] == [b"a"]


def test_it_is_full_by_rows_and_by_bytes() -> None:
    decoder = RecordDecoder("t", 0)
    batch = build_batch([Record(0, 5, None, b"")] * 1_000)
    for _ in range(ROWS // 1_000):
        assert not decoder.is_full
        decoder.add(batch, 0, 1_000)
    assert decoder.is_full
    decoder = RecordDecoder("t", 0)
    decoder.add(build_batch([Record(0, 5, None, bytes(33 << 20))]), 0, 1)
    assert decoder.is_full


@pytest.mark.parametrize("codec", CODECS)
def test_a_flipped_bit_is_found_by_the_batchs_checksum(codec: int) -> None:
    batch = bytearray(build_batch([Record(0, 5, b"k", b"v" * 50)], compression=codec))
    for at in range(BATCH_CRC_FROM, len(batch)):
        batch[at] ^= 4
        with pytest.raises(CorruptRecord):
            RecordDecoder("t", 0).add(bytes(batch), 0, 10)
        batch[at] ^= 4


@given(st.data())
def test_no_bytes_that_pass_the_checksum_read_outside_of_their_batch(data: st.DataObject) -> None:
    """The kernels check no bounds of arrays: a length that is believed would end the process."""
    batch = bytearray(build_batch(data.draw(RECORDS)))
    size = len(batch) - HEADER_BYTES
    for _ in range(data.draw(st.integers(1, 4))):
        at = HEADER_BYTES + data.draw(st.integers(0, size - 1))
        batch[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        struct.pack_into(">i", batch, HEADER_BYTES - 4, data.draw(st.integers(0, 1 << 31 - 1)))
    decoder = RecordDecoder("t", 0, columns=column_names(include_headers=True))
    try:
        decoder.add(resealed(batch), 0, 1 << 62)
        rows(decoder)
    except CorruptRecord:
        return


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\x80" * 11, "longer than 10 bytes"),
        (b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01" + bytes(6), "cut short"),
        (b"\x0c\x00\x00\x00\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01\x00", "cut short"),
        (b"\x01" + bytes(8), "negative"),
        (b"\x0c\x00\x00\x00\x01\x01\x01", "negative"),
        (b"\x0c\x00\x00\x00\x01\x01\x00" + b"\x00" * 3, "follow the last record"),
    ],
)
def test_what_is_wrong_with_a_record_is_told(body: bytes, said: str) -> None:
    batch = build_batch([Record(0, 5, None, None)])[:HEADER_BYTES] + body
    out = bytearray(batch)
    struct.pack_into(">i", out, 8, len(out) - 12)
    with pytest.raises(CorruptRecord, match=said):
        RecordDecoder("t", 0).add(resealed(out), 0, 10)


def test_a_count_that_the_bytes_cannot_hold_takes_no_memory() -> None:
    out = bytearray(build_batch([Record(0, 5, None, b"v")]))
    struct.pack_into(">i", out, HEADER_BYTES - 4, (1 << 31) - 1)
    with pytest.raises(CorruptRecord, match="2147483647 records in"):
        RecordDecoder("t", 0).add(resealed(out), 0, 10)


@pytest.mark.parametrize("include_headers", [False, True])
def test_the_columns_are_as_spark_wants_them(include_headers: bool) -> None:
    names = column_names(include_headers=include_headers)
    assert arrow_schema(names).equals(to_arrow_schema(spark_schema(names), timezone="UTC"))


@given(RECORDS, st.lists(st.sampled_from(column_names(include_headers=True)), min_size=1, max_size=8, unique=True))
def test_fewer_columns_are_those_of_all(records: list[Record], names: list[str]) -> None:
    batch = build_batch(records)
    whole = RecordDecoder("t", 3, column_names(include_headers=True))
    some = RecordDecoder("t", 3, names)
    for decoder in (whole, some, some):  # the second one goes on after a batch was taken
        decoder.add(batch, 0, len(records))
        found = decoder.take()
        found.validate(full=True)
        if decoder is whole:
            wanted = found.select(names)
        else:
            assert found.equals(wanted) and found.schema.names == names

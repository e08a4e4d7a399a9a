"""The v2 record batch: round trips, checks, and what other implementations write and read."""

from __future__ import annotations

import contextlib
import random
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.batch.batch import (
    HEADER_BYTES,
    Compression,
    ControlType,
    CorruptRecord,
    InvalidRecord,
    Record,
    RecordTooLarge,
    UnsupportedCompression,
    build_batch,
    build_control_batch,
    check_batch,
    check_crc,
    control_type,
    cut,
    iter_batches,
    iter_records,
    parse_header,
    rebuild,
    scan,
    set_base_offset,
    set_leader_epoch,
    set_log_append_time,
)
from tidelog.batch.codec import get_varint, put_varint
from tidelog.batch.compression import compress, decompress

LIMIT = 1 << 20
CODECS = list(Compression)

maybe_bytes = st.none() | st.binary(max_size=40)
headers = st.lists(st.tuples(st.text(max_size=8), maybe_bytes), max_size=3).map(tuple)
records = st.lists(
    st.builds(Record, st.just(0), st.integers(0, 1 << 50), maybe_bytes, maybe_bytes, headers), min_size=1, max_size=20
)


def one(value: bytes = b"v", timestamp: int = 1000) -> Record:
    return Record(0, timestamp, b"k", value)


def view(batch: bytes) -> memoryview:
    return memoryview(bytearray(batch))


def with_crc(batch: bytearray) -> memoryview:
    from crc32c import crc32c

    struct.pack_into(">I", batch, 17, crc32c(bytes(batch[21:])))
    return memoryview(batch)


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_varints_round_trip_over_all_of_int64(value: int) -> None:
    out = bytearray()
    put_varint(out, value)
    assert get_varint(bytes(out), 0) == (value, len(out))
    assert len(out) <= 10


sized_records = st.lists(
    st.builds(
        lambda key, size, time: Record(0, time, key, bytes(size)),
        st.binary(max_size=90),
        st.integers(0, 20_000),
        st.integers(0, 1 << 40),
    ),
    min_size=1,
    max_size=150,
)


@settings(max_examples=examples(60), deadline=None)
@given(st.one_of(records, sized_records), st.sampled_from(CODECS), st.data())
def test_a_scan_finds_what_decoding_finds_and_a_cut_is_as_rebuilt(
    batch_records: list[Record], codec: Compression, data: st.DataObject
) -> None:
    batch = build_batch(batch_records, base_offset=77, producer_id=3, producer_epoch=0, compression=codec)
    header, decoded = parse_header(batch), list(iter_records(batch))
    found = scan(batch, header)
    assert [77 + delta for delta in found.offset_deltas] == [one.offset for one in decoded]
    assert found.keys == [one.key for one in decoded]
    assert found.nulls == [at for at, one in enumerate(decoded) if one.value is None]
    left = sorted(data.draw(st.sets(st.integers(0, len(decoded) - 1), min_size=1)))
    smaller = cut(header, found, left)
    assert smaller == rebuild(header, [decoded[at] for at in left])
    again = scan(smaller, parse_header(smaller))
    assert again.keys == [decoded[at].key for at in left]
    assert cut(parse_header(smaller), again, range(len(left))) == smaller


@settings(max_examples=examples(300), deadline=None)
@given(records, st.data())
def test_a_scan_refuses_what_decoding_refuses(batch_records: list[Record], data: st.DataObject) -> None:
    batch = bytearray(build_batch(batch_records))
    at = data.draw(st.integers(HEADER_BYTES, len(batch) - 1))
    batch[at] = data.draw(st.integers(0, 255))
    header = parse_header(batch)
    try:
        decoded = list(iter_records(bytes(batch)))
        offsets = [one.offset for one in decoded]
        assert sorted(set(offsets)) == offsets and 0 <= offsets[0] <= offsets[-1] <= header.last_offset_delta
    except (CorruptRecord, AssertionError):
        with pytest.raises(CorruptRecord):
            scan(batch, header)
    else:
        assert scan(batch, header).keys == [one.key for one in decoded]


@settings(max_examples=examples(60))
@given(records, st.sampled_from(CODECS), st.integers(0, 1 << 60))
def test_a_built_batch_reads_back_the_same(batch_records: list[Record], codec: Compression, base: int) -> None:
    batch = build_batch(batch_records, base_offset=base, leader_epoch=3, compression=codec)
    header = check_batch(view(batch), limit_bytes=LIMIT)
    assert (header.base_offset, header.count, header.compression) == (base, len(batch_records), codec)
    assert header.max_timestamp == max(record.timestamp for record in batch_records)
    assert header.size_bytes == len(batch)
    read = list(iter_records(batch))
    assert [record.offset for record in read] == list(range(base, base + len(batch_records)))
    assert [record._replace(offset=0) for record in read] == batch_records


@settings(max_examples=examples(60))
@given(st.binary(max_size=5000), st.sampled_from(CODECS))
def test_every_codec_round_trips_bytes(data: bytes, codec: Compression) -> None:
    assert bytes(decompress(memoryview(compress(data, codec)), codec, len(data))) == data


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec])
@pytest.mark.parametrize("size", [1 << 20, 5 << 20])
def test_decompression_is_bounded_and_exact_at_the_bound(codec: Compression, size: int) -> None:
    packed = memoryview(compress(bytes(size), codec))
    assert len(packed) < size // 10
    assert len(decompress(packed, codec, size)) == size
    with pytest.raises(RecordTooLarge):
        decompress(packed, codec, size - 1)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec])
def test_cut_compressed_data_are_corrupt(codec: Compression) -> None:
    packed = compress(bytes(range(256)) * 400, codec)
    for end in (1, 5, len(packed) // 2, len(packed) - 1):
        with pytest.raises(CorruptRecord):
            decompress(memoryview(packed)[:end], codec, LIMIT)


@settings(max_examples=examples(100))
@given(st.data(), st.sampled_from(CODECS))
def test_damaged_records_raise_typed_errors_only(data: st.DataObject, codec: Compression) -> None:
    batch = bytearray(build_batch([one(b"x" * 50), one(b"y" * 50)], compression=codec))
    at = data.draw(st.integers(HEADER_BYTES, len(batch) - 1))
    batch[at] ^= data.draw(st.integers(1, 255))
    assert not check_crc(batch)
    with contextlib.suppress(CorruptRecord, RecordTooLarge):
        list(iter_records(batch, max_bytes=LIMIT))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_break_the_check(data: bytes) -> None:
    with pytest.raises((InvalidRecord, CorruptRecord, UnsupportedCompression)):
        check_batch(memoryview(data), limit_bytes=LIMIT)


def test_exactly_one_batch_is_accepted() -> None:
    batch = build_batch([one()])
    assert check_batch(view(batch), limit_bytes=LIMIT).count == 1
    with pytest.raises(InvalidRecord):
        check_batch(view(b""), limit_bytes=LIMIT)
    with pytest.raises(InvalidRecord):
        check_batch(view(batch + batch), limit_bytes=LIMIT)
    with pytest.raises(CorruptRecord):
        check_batch(view(batch[:-1]), limit_bytes=LIMIT)


@pytest.mark.parametrize(("magic", "error"), [(0, InvalidRecord), (1, InvalidRecord), (3, CorruptRecord)])
def test_other_formats_are_refused(magic: int, error: type[Exception]) -> None:
    batch = bytearray(build_batch([one()]))
    batch[16] = magic
    with pytest.raises(error):
        check_batch(memoryview(batch), limit_bytes=LIMIT)


def test_a_batch_over_the_limit_is_too_large() -> None:
    batch = build_batch([one()])
    assert check_batch(view(batch), limit_bytes=len(batch))
    with pytest.raises(RecordTooLarge) as caught:
        check_batch(view(batch), limit_bytes=len(batch) - 1)
    assert caught.value.kafka_code == 10


@settings(max_examples=examples(50))
@given(st.data())
def test_any_flipped_bit_from_byte_21_fails_the_crc(data: st.DataObject) -> None:
    batch = bytearray(build_batch([one()]))
    batch[data.draw(st.integers(17, len(batch) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptRecord) as caught:
        check_batch(memoryview(batch), limit_bytes=LIMIT)
    assert caught.value.kafka_code == 2


def test_last_offset_delta_must_be_count_minus_one() -> None:
    for field_at, value in ((23, 5), (57, 7), (57, 0), (57, -1)):
        batch = bytearray(build_batch([one(), one()]))
        struct.pack_into(">i", batch, field_at, value)
        with pytest.raises(InvalidRecord):
            check_batch(with_crc(batch), limit_bytes=LIMIT)


def test_producer_fields_must_belong_together() -> None:
    for batch in (
        build_batch([one()], producer_id=4, producer_epoch=0),
        build_batch([one()], producer_id=4, base_sequence=0),
    ):
        with pytest.raises(InvalidRecord):
            check_batch(view(batch), limit_bytes=LIMIT)
    with pytest.raises(InvalidRecord):
        check_batch(view(build_batch([one()], transactional=True)), limit_bytes=LIMIT)


def test_an_unknown_codec_is_refused() -> None:
    batch = bytearray(build_batch([one()]))
    batch[22] |= 5
    with pytest.raises(UnsupportedCompression) as caught:
        check_batch(with_crc(batch), limit_bytes=LIMIT)
    assert caught.value.kafka_code == 76


def test_control_batches_come_only_from_inside() -> None:
    marker = build_control_batch(
        ControlType.COMMIT, producer_id=7, producer_epoch=2, coordinator_epoch=9, timestamp=1000
    )
    with pytest.raises(InvalidRecord):
        check_batch(view(marker), limit_bytes=LIMIT)
    header = check_batch(view(marker), limit_bytes=LIMIT, allow_control=True)
    assert header.is_control
    assert header.is_transactional
    assert control_type(next(iter_records(marker))) == ControlType.COMMIT


def test_offset_and_epoch_are_rewritten_without_touching_the_crc() -> None:
    batch = bytearray(build_batch([one()]))
    set_base_offset(batch, 1 << 40)
    set_leader_epoch(batch, 12)
    header = parse_header(batch)
    assert (header.base_offset, header.partition_leader_epoch) == (1 << 40, 12)
    assert check_crc(batch)


def test_log_append_time_sets_bit_timestamp_and_crc() -> None:
    batch = bytearray(build_batch([one(timestamp=5), one(timestamp=6)]))
    set_log_append_time(batch, 777)
    header = check_batch(memoryview(batch), limit_bytes=LIMIT)
    assert header.is_log_append_time
    assert header.max_timestamp == 777
    assert [record.timestamp for record in iter_records(batch)] == [777, 777]


def test_last_sequence_wraps_after_the_largest_int32() -> None:
    batch = build_batch([one()] * 3, producer_id=1, producer_epoch=0, base_sequence=(1 << 31) - 2)
    assert parse_header(batch).last_sequence == 0


def test_batches_in_a_row_are_found_and_a_cut_one_is_reported() -> None:
    parts = [build_batch([one(bytes([n]))] * (n + 1), base_offset=n) for n in range(4)]
    buffer = b"".join(parts)
    assert [bytes(batch) for _, batch in iter_batches(buffer)] == parts
    with pytest.raises(CorruptRecord):
        list(iter_batches(buffer[:-1]))


@pytest.mark.parametrize("codec", CODECS)
def test_aiokafka_reads_our_batches_and_we_read_its(codec: Compression) -> None:
    from aiokafka.record.default_records import DefaultRecordBatchBuilder
    from aiokafka.record.memory_records import MemoryRecords

    rows = [
        (index, 1000 + index, f"k{index}".encode(), b"v" * 40_000 * (index % 3), [("h", b"x"), ("n", None)])
        for index in range(5)
    ]
    ours = build_batch([Record(0, row[1], row[2], row[3], tuple(row[4])) for row in rows], compression=codec)
    batch = MemoryRecords(ours).next_batch()
    assert batch.validate_crc()
    assert [(r.offset, r.timestamp, r.key, r.value, list(r.headers)) for r in batch] == rows

    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=codec,
        is_transactional=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 20,
    )
    for offset, timestamp, key, value, row_headers in rows:
        assert builder.append(offset, timestamp, key, value, row_headers) is not None
    theirs = bytes(builder.build())
    assert check_batch(view(theirs), limit_bytes=LIMIT).count == 5
    assert [(*record[:4], list(record[4])) for record in iter_records(theirs)] == rows
    if codec == Compression.NONE:
        assert theirs[21:] == ours[21:]


@pytest.mark.filterwarnings("ignore:(read|open)_text is deprecated:DeprecationWarning")
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != Compression.SNAPPY])  # needs python-snappy
def test_kafka_python_reads_our_batches(codec: Compression) -> None:
    from kafka.record.memory_records import MemoryRecords

    ours = build_batch([one(b"a" * 1000), one(b"b")], compression=codec)
    batch = MemoryRecords(ours).next_batch()
    assert batch.validate_crc()
    assert [(r.offset, r.key, r.value) for r in batch] == [(0, b"k", b"a" * 1000), (1, b"k", b"b")]


def test_raw_snappy_as_librdkafka_writes_it_is_read() -> None:
    import cramjam

    raw = bytes(cramjam.snappy.compress_raw(b"hello " * 100))
    assert bytes(decompress(memoryview(raw), Compression.SNAPPY, 1000)) == b"hello " * 100


def test_multi_member_gzip_and_frames_of_unknown_size_are_read() -> None:
    import gzip

    import zstandard

    two = gzip.compress(b"ab") + gzip.compress(b"cd")
    assert bytes(decompress(memoryview(two), Compression.GZIP, 4)) == b"abcd"
    packer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    unsized = packer.compress(b"z" * 3000) + packer.flush()
    assert bytes(decompress(memoryview(unsized), Compression.ZSTD, 3000)) == b"z" * 3000
    with pytest.raises(RecordTooLarge):
        decompress(memoryview(unsized), Compression.ZSTD, 2999)


@pytest.mark.parametrize("codec", [Compression.GZIP, Compression.LZ4])
def test_many_empty_members_take_no_longer_together_than_alone(codec: Compression) -> None:
    member = memoryview(compress(b"", codec))
    count = (3 << 20) // 2 // len(member)
    together = memoryview(bytes(member) * count)
    started = time.thread_time()
    for _ in range(count):
        assert not decompress(member, codec, LIMIT)
    alone_s = time.thread_time() - started
    started = time.thread_time()
    assert not decompress(together, codec, LIMIT)
    assert time.thread_time() - started < 3 * alone_s + 0.3, "the time grows with the square of their number"


@pytest.mark.parametrize("codec", [Compression.GZIP, Compression.LZ4])
def test_members_of_all_sizes_are_read_one_after_the_other(codec: Compression) -> None:
    rng = random.Random(7)
    parts = [rng.randbytes(size) for size in (0, 1, 70_000, 3, 0, 300_000, 16 << 10, 2 << 20, 5)]
    packed = b"".join(compress(part, codec) for part in parts)
    whole = b"".join(parts)
    assert decompress(memoryview(packed), codec, len(whole)) == whole
    with pytest.raises(RecordTooLarge):
        decompress(memoryview(packed), codec, len(whole) - 1)
    with pytest.raises(CorruptRecord):
        decompress(memoryview(packed)[:-1], codec, len(whole))


@pytest.mark.parametrize("noise", [8_000, 16_000, 32_000])
def test_a_block_of_lz4_may_lie_anywhere_in_what_is_fed_at_a_time(noise: int) -> None:
    """A piece may end within a block right where a mebibyte was given out: nothing more comes of that piece."""
    whole = (random.Random(7).randbytes(noise) + bytes((64 << 10) - noise)) * 80
    packed = memoryview(compress(whole, Compression.LZ4))
    assert decompress(packed, Compression.LZ4, len(whole)) == whole
    with pytest.raises(CorruptRecord, match="too early"):
        decompress(packed[:-1], Compression.LZ4, len(whole))
    with pytest.raises(RecordTooLarge):
        decompress(packed, Compression.LZ4, len(whole) - 1)

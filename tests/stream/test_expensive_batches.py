"""Batches of a few hundred bytes that hold millions of headers or records: what they may cost a broker."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator

import pytest
from crc32c import crc32c

from tests.support.fake_storage import FakeClock, FakeWorld, Process
from tidelog.batch.batch import (
    HEADER_BYTES,
    BatchHeader,
    Compression,
    CorruptRecord,
    Record,
    RecordTooLarge,
    build_batch,
    iter_records,
    iter_times,
    parse_header,
    scan,
)
from tidelog.batch.codec import MAX_HEADERS, MAX_SCANNED, put_varint
from tidelog.batch.compression import compress
from tidelog.stream import partition_lookup
from tidelog.stream.admission import MAX_REPACKED_BYTES
from tidelog.stream.log_config import LogConfig
from tidelog.stream.partition_log import PartitionLog

NOW = 1_700_000_000_000


def with_headers(count: int, headers: bytes, *, tells_largest: bool = True) -> bytearray:
    """Return a batch of one record that tells `count` headers, and has these bytes for them."""
    body = bytearray(b"\0\0\0\2k\1")  # attributes, both deltas, a key, no value
    put_varint(body, count)
    body += headers
    data = bytearray()
    put_varint(data, len(body))
    batch = bytearray(build_batch([Record(0, NOW, b"k", None)], compression=Compression.ZSTD))
    batch[HEADER_BYTES:] = compress(data + body, Compression.ZSTD)
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    if not tells_largest:
        struct.pack_into(">q", batch, 35, -1)
    struct.pack_into(">I", batch, 17, crc32c(batch[21:]))
    return batch


def millions() -> bytearray:
    return with_headers(MAX_HEADERS + 1, b"\0\1" * (MAX_HEADERS + 1))


def opened(test: Callable[[PartitionLog], object], config: LogConfig | None = None) -> None:
    async def run() -> None:
        log = await Process(FakeWorld(), FakeClock(NOW)).open(config or LogConfig())
        result = test(log)
        if asyncio.iscoroutine(result):
            await result

    asyncio.run(run())


def test_no_more_headers_of_a_batch_are_decoded_or_scanned_than_the_bound() -> None:
    batch = millions()
    assert len(batch) < 1024
    with pytest.raises(RecordTooLarge):
        list(iter_records(batch))
    with pytest.raises(RecordTooLarge):
        scan(batch, parse_header(batch))


def test_a_batch_may_have_as_many_headers_as_the_bound() -> None:
    batch = with_headers(MAX_HEADERS, b"\0\1" * MAX_HEADERS)
    assert scan(batch, parse_header(batch)).keys == [b"k"]
    (record,) = iter_records(batch)
    assert len(record.headers) == MAX_HEADERS


@pytest.mark.parametrize("headers", [b"\1\1", b"\0\4", b"\6\1", b"\0", b"\0\1\0\1"])
def test_a_scan_finds_headers_that_do_not_parse(headers: bytes) -> None:
    batch = with_headers(1, headers)
    with pytest.raises(CorruptRecord):
        scan(batch, parse_header(batch))
    with pytest.raises(CorruptRecord):
        list(iter_records(batch))


def test_a_compacted_topic_refuses_a_batch_of_millions_of_headers() -> None:
    def test(log: PartitionLog) -> None:
        with pytest.raises(RecordTooLarge):
            log.append(memoryview(millions()))
        assert log.log_end_offset == 0

    opened(test, LogConfig(cleanup_policy="compact"))


def test_a_topics_own_compression_refuses_a_batch_that_takes_too_long_to_compress_anew() -> None:
    def of(size: int) -> memoryview:
        return memoryview(bytearray(build_batch([Record(0, NOW, None, bytes(size))], compression=Compression.ZSTD)))

    def test(log: PartitionLog) -> None:
        with pytest.raises(RecordTooLarge) as caught:
            log.append(of(MAX_REPACKED_BYTES + 1))
        assert caught.value.kafka_code == 10 and log.log_end_offset == 0
        log.append(of(MAX_REPACKED_BYTES - 100))
        assert log.log_end_offset == 1

    opened(test, LogConfig(compression_type="lz4"))
    large = LogConfig(compression_type="lz4", max_message_bytes=2 * MAX_REPACKED_BYTES)
    opened(lambda log: log.append(of(MAX_REPACKED_BYTES + 1)), large)


def test_no_more_records_are_scanned_than_the_bound() -> None:
    batch = build_batch([Record(0, NOW, b"", b"")] * (MAX_SCANNED + 1), compression=Compression.ZSTD)
    with pytest.raises(RecordTooLarge):
        scan(batch, parse_header(batch))


def test_timestamps_are_found_without_a_look_at_headers() -> None:
    async def test(log: PartitionLog) -> None:
        log.append(memoryview(with_headers(1 << 30, b"no headers at all")))
        log.append(memoryview(with_headers(1 << 30, b"no headers at all", tells_largest=False)))
        first = await log.offset_for_timestamp(NOW)
        assert first is not None and (first.offset, first.timestamp) == (0, NOW)
        assert await log.offset_of_max_timestamp() == first

    opened(test)


def test_lookups_have_few_batches_decompressed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held = most = 0

    def counted(payload: bytes | memoryview, header: BatchHeader) -> Iterator[tuple[int, int]]:
        nonlocal held, most
        held += 1
        most = max(most, held)
        try:
            yield from iter_times(payload, header)
        finally:
            held -= 1

    monkeypatch.setattr(partition_lookup, "iter_times", counted)

    async def test(log: PartitionLog) -> None:
        records = [*([Record(0, NOW, None, None)] * 3000), Record(0, NOW + 1, None, None)]
        log.append(memoryview(bytearray(build_batch(records, compression=Compression.GZIP))))
        found = await asyncio.gather(*(log.offset_for_timestamp(NOW + 1) for _ in range(50)))
        assert {each.offset for each in found if each is not None} == {3000}

    opened(test)
    assert most == partition_lookup.MAX_UNPACKED

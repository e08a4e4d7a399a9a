"""What a partition log promises: the lines of Produce, Fetch, ListOffsets and OffsetForLeaderEpoch."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from crc32c import crc32c

from tests.support.fake_storage import DATA, META, TIME, TXN, FakeClock, FakeWorld, Process
from tests.support.guarded import append_guarded
from tidelog.batch.batch import (
    HEADER_BYTES,
    Compression,
    ControlType,
    InvalidRecord,
    InvalidTimestamp,
    Record,
    RecordTooLarge,
    build_batch,
    build_control_batch,
    check_crc,
    iter_records,
    parse_header,
    set_log_append_time,
)
from tidelog.batch.codec import encode_record
from tidelog.runtime.errors import Closed
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import WalFailed, WalFull
from tidelog.stream.admission import MAX_RECORDS_READ, MAX_RECORDS_SCANNED
from tidelog.stream.errors import FencedLeaderEpoch, OffsetOutOfRange, OutOfOrderSequence, UnknownLeaderEpoch
from tidelog.stream.log_config import LogConfig
from tidelog.stream.partition_log import AppendResult, PartitionLog

NOW = 1_700_000_000_000


def sync(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


def batch(*values: bytes | None, timestamp: int = NOW, key: bytes | None = b"k", **fields: Any) -> memoryview:
    records = [Record(0, timestamp + n, key, value) for n, value in enumerate(values or (b"v",))]
    return memoryview(bytearray(build_batch(records, **fields)))


def idempotent(sequence: int, count: int = 1, *, pid: int = 9, epoch: int = 0, txn: bool = False) -> memoryview:
    return batch(*[b"v"] * count, producer_id=pid, producer_epoch=epoch, base_sequence=sequence, transactional=txn)


def end_txn(kind: ControlType, *, pid: int = 9, epoch: int = 0) -> bytes:
    return build_control_batch(kind, producer_id=pid, producer_epoch=epoch, coordinator_epoch=0, timestamp=NOW)


class Bench:
    """A world, its process and its log."""

    def __init__(self, config: LogConfig | None = None, *, auto_confirm: bool = True) -> None:
        self.world = FakeWorld()
        self.clock = FakeClock(NOW)
        self.config = config or LogConfig()
        self.process = Process(self.world, self.clock, auto_confirm=auto_confirm)

    async def open(self) -> PartitionLog:
        return await self.process.open(self.config)

    async def restart(self, keep: int | None = None) -> PartitionLog:
        """A crash: the process is gone, the WAL is cut to `keep` records or the confirmed ones."""
        self.world.crash(keep)
        self.process = Process(self.world, self.clock)
        return await self.open()

    async def reopen(self, log: PartitionLog) -> PartitionLog:
        await log.close()
        self.process = Process(self.world, self.clock)
        return await self.open()


async def values(log: PartitionLog, offset: int, *, committed: bool = False, size: int = 1 << 20) -> list[bytes | None]:
    found = await log.read(offset, size, committed=committed)
    return [record.value for part in found.records for record in iter_records(part)]


# --- Produce ---------------------------------------------------------------------------------------------------------


@sync
async def test_offsets_are_assigned_in_order_and_epochs_stamped() -> None:
    log = await Bench().open()
    assert log.append(batch(b"a", b"b", b"c"))[:2] == (0, 2)
    assert log.append(batch(b"d", leader_epoch=0))[:2] == (3, 3)
    assert (log.log_end_offset, log.high_watermark, log.log_start_offset) == (4, 4, 0)
    found = await log.read(0, 1 << 20, committed=False)
    assert [parse_header(part).base_offset for part in found.records] == [0, 3]
    assert {parse_header(part).partition_leader_epoch for part in found.records} == {log.leader_epoch}
    assert all(check_crc(part) for part in found.records)
    assert found.size_bytes == sum(len(part) for part in found.records) == log.size_bytes()


@sync
async def test_the_callers_buffer_is_kept_without_a_copy_and_a_read_only_one_is_copied() -> None:
    log = await Bench().open()
    view = batch(b"a")
    log.append(view)
    found = log.read_hot(0, 1 << 20, committed=False)
    assert found is not None
    assert isinstance(found.records[0], memoryview)
    assert found.records[0].obj is view.obj
    log.append(view.toreadonly())
    assert await values(log, 0) == [b"a", b"a"]


@sync
async def test_a_batch_over_the_topics_limit_is_refused() -> None:
    log = await Bench(LogConfig(max_message_bytes=100)).open()
    with pytest.raises(RecordTooLarge):
        log.append(batch(b"x" * 100))
    log.config = LogConfig()
    log.append(batch(b"x" * 100))


@sync
async def test_a_client_may_not_write_control_batches() -> None:
    log = await Bench().open()
    with pytest.raises(InvalidRecord):
        log.append(memoryview(end_txn(ControlType.COMMIT)))


@sync
async def test_null_keys_on_a_compacted_topic_are_named() -> None:
    log = await Bench(LogConfig(cleanup_policy="compact")).open()
    with pytest.raises(InvalidRecord) as caught:
        log.append(batch(b"a", b"b", key=None, compression=Compression.ZSTD))
    assert caught.value.kafka_code == 87
    assert [index for index, _ in caught.value.record_errors] == [0, 1]
    assert log.log_end_offset == 0
    log.append(batch(b"a", compression=Compression.ZSTD))
    log.append(batch(None))


@sync
async def test_records_that_are_not_where_their_batch_says_are_refused_on_a_compacted_topic() -> None:
    log = await Bench(LogConfig(cleanup_policy="compact")).open()
    two = bytearray(batch(b"a", b"b", timestamp=-1))
    two[HEADER_BYTES:] = encode_record(Record(0, NOW, b"k", b"a"), 0, 0) * 2
    struct.pack_into(">I", two, 17, crc32c(two[21:]))
    with pytest.raises(InvalidRecord) as caught:
        log.append(memoryview(two))
    assert (caught.value.kafka_code, log.log_end_offset) == (87, 0)


@sync
async def test_log_append_time_is_the_brokers_and_the_crc_is_right() -> None:
    bench = Bench(LogConfig(timestamp_type="LogAppendTime"))
    log = await bench.open()
    bench.clock.now_ms = NOW + 500
    result = log.append(batch(b"a", b"b", timestamp=5))
    assert result.log_append_time_ms == NOW + 500
    part = (await log.read(0, 1000, committed=False)).records[0]
    assert check_crc(part)
    assert [record.timestamp for record in iter_records(part)] == [NOW + 500] * 2
    assert await log.offset_for_timestamp(NOW) == (0, NOW + 500, log.leader_epoch)


@sync
async def test_create_time_keeps_the_producers_timestamps_within_bounds() -> None:
    config = LogConfig(message_timestamp_before_max_ms=1000, message_timestamp_after_max_ms=2000)
    log = await Bench(config).open()
    assert log.append(batch(timestamp=NOW - 1000)).log_append_time_ms == -1
    log.append(batch(timestamp=NOW + 2000))
    log.append(batch(timestamp=-1))
    for timestamp in (NOW - 1001, NOW + 2001):
        with pytest.raises(InvalidTimestamp) as caught:
            log.append(batch(timestamp=timestamp))
        assert caught.value.kafka_code == 32


@pytest.mark.parametrize("timestamp_type", ["CreateTime", "LogAppendTime"])
def test_a_producer_may_not_mark_a_batch_with_log_append_time(timestamp_type: str) -> None:
    async def check() -> None:
        log = await Bench(LogConfig(timestamp_type=timestamp_type)).open()
        marked = bytearray(batch(timestamp=NOW))
        set_log_append_time(marked, NOW + 1)
        with pytest.raises(InvalidTimestamp, match="LogAppendTime") as caught:
            log.append(memoryview(marked))
        assert caught.value.kafka_code == 32
        assert log.append(batch(timestamp=NOW)).base_offset == 0

    sync(check)()


def untold(*timestamps: int, compression: int = Compression.NONE) -> memoryview:
    """A batch without its largest timestamp, as Sarama sent it before 1.45.1."""
    records = [Record(0, timestamp, b"k", b"v") for timestamp in timestamps]
    sent = bytearray(build_batch(records, compression=compression))
    struct.pack_into(">q", sent, 35, -1)
    struct.pack_into(">I", sent, 17, crc32c(sent[21:]))
    return memoryview(sent)


@pytest.mark.parametrize("codec", [Compression.NONE, Compression.SNAPPY])
def test_the_largest_timestamp_of_a_batch_that_does_not_tell_it_is_found(codec: Compression) -> None:
    async def check() -> None:
        log = await Bench().open()
        log.append(untold(NOW, NOW + 20, NOW + 10, compression=codec))
        log.append(untold(NOW + 30, compression=codec).toreadonly())
        first, second = (await log.read(0, 1 << 20, committed=False)).records
        assert [parse_header(each).max_timestamp for each in (first, second)] == [NOW + 20, NOW + 30]
        assert check_crc(first) and check_crc(second)
        found = [await log.offset_for_timestamp(NOW + later) for later in (0, 11, 21, 31)]
        assert [one and one.offset for one in found] == [0, 1, 3, None]
        assert await log.offset_of_max_timestamp() == (3, NOW + 30, log.leader_epoch)

    asyncio.run(check())


@sync
async def test_a_largest_timestamp_that_is_not_told_is_within_the_topics_bounds_too() -> None:
    log = await Bench(LogConfig(message_timestamp_after_max_ms=2000)).open()
    with pytest.raises(InvalidTimestamp):
        log.append(untold(NOW, NOW + 2001))
    assert log.log_end_offset == 0
    log.append(untold(NOW, NOW + 2000))


@sync
async def test_a_largest_timestamp_that_is_no_timestamp_is_refused() -> None:
    log = await Bench().open()
    for timestamp in ((1 << 63) - 1, -1 << 63):
        sent = bytearray(batch(b"v", timestamp=NOW))
        sent[HEADER_BYTES:] = encode_record(Record(0, NOW, b"k", b"v"), 0, timestamp)
        struct.pack_into(">i", sent, 8, len(sent) - 12)
        struct.pack_into(">q", sent, 35, -1)
        struct.pack_into(">I", sent, 17, crc32c(sent[21:]))
        with pytest.raises(InvalidRecord):
            log.append(memoryview(sent))
    assert log.log_end_offset == 0


@sync
async def test_records_whose_numbers_are_no_int64_do_not_end_lookups_by_time() -> None:
    log = await Bench().open()
    for offset_delta, timestamp_delta in ((0, (1 << 63) - 1), (0, -1 << 63), ((1 << 63) - 1, 5), (-7, 5)):
        sent = bytearray(batch(b"v", timestamp=NOW))
        sent[HEADER_BYTES:] = encode_record(Record(0, NOW, b"k", b"v"), offset_delta, timestamp_delta)
        struct.pack_into(">i", sent, 8, len(sent) - 12)
        struct.pack_into(">q", sent, 35, NOW + 5)
        struct.pack_into(">I", sent, 17, crc32c(sent[21:]))
        log.append(memoryview(sent))
    log.append(batch(b"v", timestamp=NOW + 1))
    found = await log.offset_for_timestamp(NOW)
    assert found is not None and found.offset == 4
    assert await log.offset_of_max_timestamp() == found


@sync
async def test_a_largest_timestamp_that_takes_too_long_to_find_is_refused() -> None:
    log = await Bench().open()
    with pytest.raises(InvalidRecord):
        log.append(untold(*[NOW] * (MAX_RECORDS_READ + 1), compression=Compression.ZSTD))
    assert log.log_end_offset == 0
    log.append(untold(*[NOW] * MAX_RECORDS_READ, compression=Compression.ZSTD))


@sync
async def test_a_batch_whose_keys_take_too_long_to_look_at_is_too_large_for_a_compacted_topic() -> None:
    compacted, plain = await Bench(LogConfig(cleanup_policy="compact")).open(), await Bench().open()
    records = [Record(0, NOW, b"", b"")] * (MAX_RECORDS_SCANNED + 1)
    sent = build_batch(records, compression=Compression.ZSTD)
    assert len(sent) < compacted.config.max_message_bytes
    with pytest.raises(RecordTooLarge):
        compacted.append(memoryview(bytearray(sent)))
    assert compacted.log_end_offset == 0
    plain.append(memoryview(bytearray(sent)))
    compacted.append(memoryview(bytearray(build_batch(records[1:], compression=Compression.ZSTD))))
    assert (compacted.log_end_offset, plain.log_end_offset) == (MAX_RECORDS_SCANNED, MAX_RECORDS_SCANNED + 1)


@sync
async def test_a_topics_own_compression_repacks_other_batches() -> None:
    log = await Bench(LogConfig(compression_type="lz4")).open()
    log.append(batch(b"x" * 500, compression=Compression.GZIP))
    log.append(batch(b"y" * 500, compression=Compression.LZ4))
    found = await log.read(0, 1 << 20, committed=False)
    assert [parse_header(part).compression for part in found.records] == [Compression.LZ4] * 2
    assert all(check_crc(part) for part in found.records)
    assert await values(log, 0) == [b"x" * 500, b"y" * 500]


@sync
async def test_batches_are_recompressed_at_the_level_of_the_topic() -> None:
    value = b"".join(b"%d is a number, and so is %d; " % (n * n, n * 7919 % 1000) for n in range(3000))
    levels: dict[str, tuple[int, int]] = {"gzip": (1, 9), "lz4": (9, 12), "zstd": (-100, 19)}
    for codec, (low, high) in levels.items():
        sizes = []
        for level in (low, None, high):
            log = await Bench(LogConfig(compression_type=codec, compression_level=level)).open()
            log.append(batch(value))
            assert await values(log, 0) == [value]
            sizes.append(log.size_bytes())
        assert sizes[0] >= sizes[1] >= sizes[2], codec
        assert sizes[0] > sizes[2], codec


@sync
async def test_a_batch_that_a_topics_own_compression_makes_too_large_is_refused() -> None:
    bench = Bench(LogConfig(compression_type="uncompressed", max_message_bytes=1000))
    log = await bench.open()
    large = bytes(batch(bytes(60_000), compression=Compression.ZSTD))
    assert len(large) <= 1000
    with pytest.raises(RecordTooLarge) as caught:
        log.append(memoryview(bytearray(large)))
    assert caught.value.kafka_code == 10
    assert (log.log_end_offset, log.size_bytes()) == (0, 0)
    log.config = LogConfig(compression_type="gzip", max_message_bytes=1000)
    log.append(memoryview(bytearray(large)))
    assert log.log_end_offset == 1


@sync
async def test_duplicates_return_the_original_offsets() -> None:
    log = await Bench().open()
    log.append(batch(b"other"))
    first = log.append(idempotent(0, 3))
    log.append(idempotent(3))
    again = log.append(idempotent(0, 3))
    assert again.duplicate
    assert again[:2] == first[:2] == (1, 3)
    assert log.log_end_offset == 5
    with pytest.raises(OutOfOrderSequence):
        log.append(idempotent(5))


@sync
async def test_a_duplicate_of_an_unconfirmed_batch_waits_with_it() -> None:
    bench = Bench(auto_confirm=False)
    log = await bench.open()
    first = log.append(idempotent(0))
    again = log.append(idempotent(0))
    assert again.duplicate
    assert again.wal_end >= first.wal_end > bench.process.storage.confirm.value
    bench.process.storage.confirm_all()
    assert log.append(idempotent(0)).wal_end <= bench.process.storage.confirm.value


@sync
async def test_a_refused_append_changes_nothing() -> None:
    bench = Bench(LogConfig(segment_bytes=200))
    log = await bench.open()
    log.append(idempotent(0))
    for sequence in range(1, 30):
        bench.process.storage.refusals.append(WalFull("full"))
        with pytest.raises(WalFull):
            log.append(idempotent(sequence))
        result = log.append(idempotent(sequence))
        assert (result.base_offset, result.duplicate) == (sequence, False)
    assert len(await values(log, 0)) == 30


@sync
async def test_the_leader_epoch_of_a_write_is_checked_when_it_is_given() -> None:
    log = await Bench().open()
    with pytest.raises(FencedLeaderEpoch):
        log.append(batch(), acks_leader_epoch=log.leader_epoch - 1)
    with pytest.raises(UnknownLeaderEpoch):
        log.append(batch(), acks_leader_epoch=log.leader_epoch + 1)
    log.append(batch(), acks_leader_epoch=log.leader_epoch)


# --- visibility ------------------------------------------------------------------------------------------------------


@sync
async def test_nothing_past_the_confirm_offset_is_visible() -> None:
    bench = Bench(auto_confirm=False)
    log = await bench.open()
    moved: list[int] = []
    remove = log.add_watermark_listener(lambda: moved.append(log.high_watermark))
    first = log.append(batch(b"a", b"b"))
    second = log.append(batch(b"c"))
    assert (log.high_watermark, log.log_end_offset) == (0, 3)
    assert await values(log, 0) == []
    assert await log.offset_for_timestamp(0) is None
    bench.process.storage.confirm_to(first.wal_end)
    assert await values(log, 0) == [b"a", b"b"]
    assert await values(log, 2) == []
    bench.process.storage.confirm_to(second.wal_end)
    assert await values(log, 2) == [b"c"]
    assert moved == [2, 3]
    remove()
    remove()
    log.append(batch())
    bench.process.storage.confirm_all()
    assert moved == [2, 3]


@sync
async def test_the_wal_end_of_a_result_is_what_acks_all_waits_for() -> None:
    bench = Bench(auto_confirm=False)
    log = await bench.open()
    result = log.append(batch())
    waiting = asyncio.ensure_future(bench.process.storage.confirm.wait(result.wal_end))
    await asyncio.sleep(0)
    assert not waiting.done()
    bench.process.storage.confirm_all()
    await waiting
    assert log.high_watermark == 1


# --- Fetch -----------------------------------------------------------------------------------------------------------


@sync
async def test_a_read_begins_with_the_whole_batch_that_contains_the_offset() -> None:
    log = await Bench().open()
    log.append(batch(b"a", b"b", b"c"))
    log.append(batch(b"d", b"e"))
    assert await values(log, 1) == [b"a", b"b", b"c", b"d", b"e"]
    assert await values(log, 4) == [b"d", b"e"]


@pytest.mark.parametrize("hot", [True, False])
async def test_one_batch_comes_even_over_the_limit(hot: bool) -> None:
    bench = Bench()
    bench.process.storage.hot = hot
    log = await bench.open()
    log.append(batch(b"x" * 1000))
    log.append(batch(b"y" * 1000))
    assert await values(log, 0, size=10) == [b"x" * 1000]
    assert (await log.read(0, 10, committed=False, minimum_one=False)).records == []
    assert (log.read_hot(0, 10, committed=False) is not None) == hot


@sync
async def test_offsets_outside_the_log_are_out_of_range_and_the_end_is_empty() -> None:
    bench = Bench(auto_confirm=False)
    log = await bench.open()
    log.append(batch(b"a"))
    bench.process.storage.confirm_all()
    log.append(batch(b"b"))
    for offset in (1, 2):
        found = await log.read(offset, 1000, committed=False)
        assert found == ([], [], 0), "at the high watermark, and up to the log end, a consumer waits"
        assert log.read_hot(offset, 1000, committed=False) == found
    for offset in (-1, 3):
        with pytest.raises(OffsetOutOfRange) as caught:
            await log.read(offset, 1000, committed=False)
        assert caught.value.kafka_code == 1
        with pytest.raises(OffsetOutOfRange):
            log.read_hot(offset, 1000, committed=False)


# --- transactions ----------------------------------------------------------------------------------------------------


@sync
async def test_read_committed_stops_at_the_first_undecided_offset() -> None:
    log = await Bench().open()
    log.append(batch(b"a"))
    append_guarded(log, idempotent(0, txn=True))
    log.append(batch(b"b"))
    assert (log.high_watermark, log.last_stable_offset) == (3, 1)
    assert len(await values(log, 0)) == 3
    assert await values(log, 0, committed=True) == [b"a"]
    marker = log.append_internal(end_txn(ControlType.COMMIT))
    assert (marker.base_offset, log.last_stable_offset) == (3, 4)
    found = await log.read(0, 1 << 20, committed=True)
    assert len(found.records) == 4
    assert found.aborted == []


@sync
async def test_a_marker_counts_only_when_it_is_confirmed() -> None:
    bench = Bench(auto_confirm=False)
    log = await bench.open()
    append_guarded(log, idempotent(0, txn=True))
    bench.process.storage.confirm_all()
    log.append_internal(end_txn(ControlType.COMMIT))
    assert (log.high_watermark, log.last_stable_offset) == (1, 0)
    bench.process.storage.confirm_all()
    assert (log.high_watermark, log.last_stable_offset) == (2, 2)


@pytest.mark.parametrize("restart", ["no", "clean", "crash"])
async def test_aborted_transactions_in_the_range_are_listed(restart: str) -> None:
    bench = Bench()
    log = await bench.open()
    for round_ in range(3):
        base = 5 * round_
        append_guarded(log, idempotent(2 * round_, txn=True))
        log.append(idempotent(0, pid=100 + round_))
        log.append_internal(end_txn(ControlType.ABORT if round_ != 1 else ControlType.COMMIT))
        assert log.last_stable_offset == base + 3
        log.append_internal(end_txn(ControlType.ABORT))  # ends nothing
        log.append(idempotent(2 * round_ + 1))
    if restart == "clean":
        log = await bench.reopen(log)
    elif restart == "crash":
        log = await bench.restart()
    assert (await log.read(0, 1 << 20, committed=True)).aborted == [(9, 0), (9, 10)]
    assert (await log.read(3, 1 << 20, committed=True)).aborted == [(9, 10)]
    assert (await log.read(0, 10, committed=True)).aborted == [(9, 0)]
    assert (await log.read(13, 1 << 20, committed=True)).aborted == []
    assert (await log.read(0, 1 << 20, committed=False)).aborted == []
    hot = log.read_hot(0, 1 << 20, committed=True)
    assert hot is not None
    assert hot.aborted == [(9, 0), (9, 10)]


@sync
async def test_an_abort_marker_survives_a_full_wal_behind_it() -> None:
    bench = Bench()
    log = await bench.open()
    append_guarded(log, idempotent(0, txn=True))
    original = bench.process.storage.append

    def full_for_the_index(record: StreamAppend) -> int:
        if record.stream_id == TXN:
            raise WalFull("full")
        return original(record)

    bench.process.storage.append = full_for_the_index  # type: ignore[method-assign]
    assert log.append_internal(end_txn(ControlType.ABORT)).base_offset == 1
    assert (await log.read(0, 1000, committed=True)).aborted == [(9, 0)]
    with pytest.raises(WalFull):
        log.append(batch())
    bench.process.storage.append = original  # type: ignore[method-assign]
    log.append(batch())
    assert sum(stream_id == TXN for stream_id, _ in bench.world.wal) == 1


# --- ListOffsets, OffsetForLeaderEpoch -------------------------------------------------------------------------------


@sync
async def test_the_first_record_at_or_after_a_timestamp_is_found() -> None:
    log = await Bench(LogConfig(segment_bytes=2000, index_interval_bytes=200)).open()
    for n in range(50):
        log.append(batch(b"x" * 30, b"y" * 30, timestamp=NOW + 10 * n, compression=n % 5))
    for target in range(NOW - 1, NOW + 492):
        index = max(0, target - NOW)
        n, rest = divmod(index, 10)
        expected = (2 * n + rest, NOW + 10 * n + rest) if rest < 2 else (2 * n + 2, NOW + 10 * n + 10)
        found = await log.offset_for_timestamp(target)
        assert found == (*expected, log.leader_epoch), target - NOW
    assert await log.offset_for_timestamp(NOW + 492) is None
    assert await log.offset_of_max_timestamp() == (99, NOW + 491, log.leader_epoch)


@sync
async def test_timestamps_out_of_order_are_found_at_the_smallest_offset() -> None:
    log = await Bench(LogConfig(segment_bytes=1000, index_interval_bytes=100)).open()
    stamps = [(n * 7919) % 97 for n in range(97)]
    for stamp in stamps:
        log.append(batch(timestamp=NOW + stamp))
    for target in range(97):
        found = await log.offset_for_timestamp(NOW + target)
        assert found is not None
        assert found.offset == next(n for n, stamp in enumerate(stamps) if stamp >= target)
    largest = await log.offset_of_max_timestamp()
    assert largest is not None
    assert largest[:2] == (stamps.index(96), NOW + 96)


@sync
async def test_an_empty_log_has_no_timestamps() -> None:
    log = await Bench().open()
    assert await log.offset_for_timestamp(0) is None
    assert await log.offset_of_max_timestamp() is None
    log.append(batch(timestamp=-1))
    assert await log.offset_of_max_timestamp() is None


@sync
async def test_the_largest_timestamp_is_that_of_what_is_left() -> None:
    log = await Bench().open()
    for stamp in (5, 90, 3, 40, 2):
        log.append(batch(timestamp=NOW + stamp))
    await log.delete_records(2)
    found = await log.offset_of_max_timestamp()
    assert found is not None
    assert found[:2] == (3, NOW + 40)


@sync
async def test_lookups_by_time_do_not_pass_the_last_stable_offset_when_asked_so() -> None:
    log = await Bench().open()
    log.append(batch(timestamp=NOW - 50))
    append_guarded(log, idempotent(0, txn=True))
    assert await log.offset_for_timestamp(NOW, committed=True) is None
    found = await log.offset_for_timestamp(NOW)
    assert found is not None
    assert found.offset == 1


@sync
async def test_epochs_end_where_the_next_leader_began() -> None:
    bench = Bench()
    log = await bench.open()
    first = log.leader_epoch
    log.append(batch(b"a", b"b"))
    log = await bench.reopen(log)
    log = await bench.reopen(log)
    second = log.leader_epoch
    log.append(batch(b"c"))
    assert second == first + 2
    assert log.end_offset_for_epoch(first) == (first, 2)
    assert log.end_offset_for_epoch(first + 1) == (first, 2), "nothing was written in the epoch between"
    assert log.end_offset_for_epoch(second) == (second, 3)
    assert log.end_offset_for_epoch(second + 1) == (-1, -1)
    assert [log.epoch_at(offset) for offset in (0, 1, 2)] == [first, first, second]


# --- the end ---------------------------------------------------------------------------------------------------------


@sync
async def test_a_closed_log_serves_no_more_and_wakes_who_waits() -> None:
    bench = Bench()
    log = await bench.open()
    log.append(batch())
    woken: list[bool] = []
    log.add_watermark_listener(lambda: woken.append(log.closed))
    await log.close()
    await log.close()
    assert woken == [True]
    for call in (
        lambda: log.append(batch()),
        lambda: log.append_internal(batch()),
        lambda: log.read_hot(0, 1, committed=False),
    ):
        with pytest.raises(Closed):
            call()
    for wait in (log.read(0, 1, committed=False), log.offset_for_timestamp(0), log.delete_records(-1)):
        with pytest.raises(Closed):
            await wait


@sync
async def test_a_dropped_log_leaves_nothing_to_upload() -> None:
    bench = Bench()
    log = await bench.open()
    log.append(batch())
    await log.drop()
    assert bench.process.storage.dropped == {META, DATA, TIME, TXN}


@sync
async def test_a_close_that_cannot_be_written_closes_all_the_same() -> None:
    bench = Bench()
    log = await bench.open()
    log.append(idempotent(0))
    bench.process.storage.refusals += [WalFailed("the disk is gone")]
    with pytest.raises(WalFailed):
        await log.close()
    assert log.closed
    log = await bench.restart()
    assert log.append(idempotent(0)).duplicate


@sync
async def test_a_close_waits_for_room_in_a_full_wal() -> None:
    bench = Bench()
    log = await bench.open()
    log.append(batch())
    bench.process.storage.refusals += [WalFull("full")]
    log = await bench.reopen(log)
    assert bench.process.storage.reads == 1, "the meta stream alone: nothing was scanned"


def test_append_results_have_named_fields() -> None:
    assert AppendResult._fields == (
        "base_offset",
        "last_offset",
        "log_append_time_ms",
        "log_start_offset",
        "wal_end",
        "duplicate",
        "checked_at",
    )


@sync
async def test_readers_and_lookups_pass_over_what_log_compaction_removed() -> None:
    bench = Bench(LogConfig(cleanup_policy="compact", segment_bytes=200))
    log = await bench.open()
    for number in range(8):
        log.append(batch(b"%d" % number, timestamp=NOW + number))
    stored = bench.process.storage.records[DATA]
    for hole in (0, 1, 2, 4):
        stored[hole] = stored[hole]._replace(payload=b"")
    for committed in (False, True):
        assert await values(log, 0, committed=committed) == [b"3", b"5", b"6", b"7"]
        assert await values(log, 0, committed=committed, size=1) == [b"3"]
        assert await values(log, 4, committed=committed, size=1) == [b"5"]
    assert log.read_hot(0, 1, committed=False) is None
    assert await log.read(0, 1, committed=False, minimum_one=False) == ([], [], 0)
    found = await log.offset_for_timestamp(NOW + 1)
    assert found is not None
    assert found[:2] == (3, NOW + 3)
    newest = await log.offset_of_max_timestamp()
    assert newest is not None
    assert newest[0] == 7

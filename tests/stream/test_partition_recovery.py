"""Opening again: clean, after a crash, and from what a crash left half done."""

from __future__ import annotations

import asyncio
import gc
import itertools
import struct
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from tests.support.fake_storage import DATA, META, TIME, FakeClock, FakeWorld, Process
from tests.support.guarded import append_guarded
from tidelog.batch.batch import Record, build_batch, iter_records
from tidelog.runtime.errors import CorruptData
from tidelog.storage.records import StreamEntry
from tidelog.stream.admission import EARLIER_BATCH_S
from tidelog.stream.errors import EarlierBatchMissing
from tidelog.stream.log_cleaning import CLEANING, Cleaned
from tidelog.stream.log_config import LogConfig
from tidelog.stream.partition_log import PartitionLog
from tidelog.stream.partition_state import CHECKPOINT, CLEAN, EPOCHS, PRODUCERS, START

NOW = 1_700_000_000_000
WAITING_MS = int(EARLIER_BATCH_S * 1000) + 1
"""So long a producer that a log has forgotten is kept waiting after it was opened."""
SMALL = LogConfig(segment_bytes=1500, checkpoint_bytes=700, index_interval_bytes=150, retention_ms=-1)


def sync(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


def batch(sequence: int, *, pid: int = 9, count: int = 1) -> memoryview:
    records = [Record(0, NOW + sequence + n, b"k", b"x" * 30) for n in range(count)]
    return memoryview(bytearray(build_batch(records, producer_id=pid, producer_epoch=0, base_sequence=sequence)))


def facts(log: PartitionLog) -> dict[str, object]:
    """All that must survive."""
    state = log.state
    return {
        "ends": (log.log_start_offset, log.high_watermark, log.last_stable_offset, log.log_end_offset),
        "segments": [
            (one.base_offset, one.size_bytes, one.first_timestamp, one.max_timestamp) for one in state.segments
        ],
        "producers": [(p, state.producers.get(p.producer_id).batches) for p in log.producers()],  # type: ignore[union-attr]
        "epochs": [entry for entry in state.epochs.entries() if entry[1] < log.log_end_offset],
    }


async def timestamps_are_found(log: PartitionLog) -> None:
    for offset in range(log.log_start_offset, log.high_watermark, 7):
        found = await log.offset_for_timestamp(NOW + offset)
        assert found is not None
        assert found[:2] == (offset, NOW + offset)


async def filled(world: FakeWorld, clock: FakeClock, batches: int, config: LogConfig = SMALL) -> PartitionLog:
    log = await Process(world, clock).open(config)
    for n in range(batches):
        log.append(batch(n))
    return log


@sync
async def test_what_a_round_of_log_compaction_has_cleaned_is_not_served_from_what_a_follower_has_kept() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    log = await filled(world, clock, 60)
    log.cleaning.finish(40, NOW, log.cleaning.changes(), 0)
    second = Process(world, clock)
    await second.open(SMALL)
    assert second.storage.forgotten == {DATA: 40}


@sync
async def test_a_clean_open_reads_the_meta_stream_only() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    log = await filled(world, clock, 60)
    before = facts(log)
    await log.close()
    process = Process(world, clock)
    read: list[int] = []
    urgent: list[bool] = []
    original = process.storage.read

    async def watched(
        stream_id: int, start: int, end: int, max_bytes: int, *, is_urgent: bool = False
    ) -> list[StreamEntry]:
        urgent.append(is_urgent)
        read.append(stream_id)
        return await original(stream_id, start, end, max_bytes)

    process.storage.read = watched  # type: ignore[method-assign]
    log = await process.open(SMALL)
    assert set(read) == {META}
    assert set(urgent) == {True}, "clients wait for the partition"
    assert facts(log) == before
    urgent.clear()
    await timestamps_are_found(log)
    assert set(urgent) == {False}, "it is open"


@sync
async def test_an_idle_log_writes_nothing_by_opening_and_closing() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    await (await filled(world, clock, 0)).close()
    assert world.wal == []
    await (await filled(world, clock, 3)).close()
    size = len(world.wal)
    for _ in range(3):
        await (await Process(world, clock).open(SMALL)).close()
    assert len(world.wal) == size


@sync
async def test_the_clean_flag_goes_before_the_first_append() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    await (await filled(world, clock, 5)).close()
    size = len(world.wal)
    log = await Process(world, clock).open(SMALL)
    log.append(batch(5))
    assert [stream_id for stream_id, _ in world.wal[size:]] == [META, DATA]
    before = facts(log)
    log = await Process(world, clock).open(SMALL)
    assert facts(log) == before
    assert log.append(batch(5)).duplicate


@pytest.mark.parametrize("batches", range(1, 90, 4))
async def test_a_crash_loses_nothing_that_was_confirmed(batches: int) -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    log = await filled(world, clock, batches)
    before = facts(log)
    world.crash()
    process = Process(world, clock)
    again = await process.open(SMALL)
    assert facts(again) == before
    await timestamps_are_found(again)
    assert again.append(batch(batches - 1)).duplicate
    with pytest.raises(EarlierBatchMissing):
        again.append(batch(batches + 1))
    assert again.append(batch(batches)).base_offset == batches


@sync
async def test_wherever_the_wal_is_cut_the_log_is_a_prefix() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    await (await filled(world, clock, 20)).close()
    log = await Process(world, clock).open(SMALL)
    for n in range(20, 60):
        log.append(batch(n))
    await log.close()
    whole = list(world.wal)
    for cut in range(len(whole) + 1):
        part = FakeWorld(wal=whole[:cut], confirmed=cut, epoch=10)
        data = [record for stream_id, record in part.wal if stream_id == DATA]
        again = await Process(part, clock).open(SMALL)
        assert again.high_watermark == len(data)
        assert again.size_bytes() == sum(len(record.payload) for record in data)
        await timestamps_are_found(again)
        if data:
            assert again.append(batch(len(data) - 1)).duplicate
        assert again.append(batch(len(data))).base_offset == len(data)
        await again.close()
        entries = [
            entry
            for stream_id, record in part.wal
            if stream_id == TIME
            for entry in struct.iter_unpack(">qq", record.payload[1:])
        ]
        assert all(one[1] < two[1] for one, two in itertools.pairwise(entries)), "no entry is written twice"


@sync
async def test_an_unclean_open_scans_only_from_the_last_checkpoint() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    await filled(world, clock, 300)
    process = Process(world, clock)
    starts: list[int] = []
    original = process.storage.read

    async def watched(
        stream_id: int, start: int, end: int, max_bytes: int, *, is_urgent: bool = False
    ) -> list[StreamEntry]:
        assert is_urgent, "clients wait for the partition"
        if stream_id == DATA:
            starts.append(start)
        return await original(stream_id, start, end, max_bytes)

    process.storage.read = watched  # type: ignore[method-assign]
    await process.open(SMALL)
    assert starts
    assert min(starts) > 285


@sync
async def test_a_checkpoint_before_a_hand_over_leaves_next_to_nothing_to_scan() -> None:
    assert await first_scanned(writes=False) == 0
    assert await first_scanned(writes=True) == 300


@sync
async def test_small_batches_are_covered_by_checkpoints_too() -> None:
    world, clock, config = FakeWorld(), FakeClock(NOW), LogConfig(checkpoint_batches=160)
    await filled(world, clock, 170, config)
    again, starts = await reopened(world, clock, config)
    assert min(starts) == 160, "written after so many batches"
    for n in range(170, 172):
        again.append(batch(n))
    again, starts = await reopened(world, clock, config)
    assert min(starts) == 170, "written by an open that had more than a few to scan"
    again, starts = await reopened(world, clock, config)
    assert min(starts) == 170, "two batches are not worth one"


@sync
async def test_housekeeping_writes_a_checkpoint_of_a_slow_partition() -> None:
    world, clock, config = FakeWorld(), FakeClock(NOW), LogConfig(retention_ms=-1)
    log = await filled(world, clock, 7, config)
    length = len(world.wal)
    await log.apply_retention()
    assert len(world.wal) == length, "few batches"
    log.append(batch(7))
    await log.apply_retention()
    _, starts = await reopened(world, clock, config)
    assert starts == []


@sync
async def test_a_checkpoint_of_many_producers_waits_for_more_batches() -> None:
    world, clock, config = FakeWorld(), FakeClock(NOW), LogConfig(checkpoint_batches=16, retention_ms=-1)
    log = await Process(world, clock).open(config)
    for producer_id in range(50):
        records = [Record(0, NOW, b"k", b"v")]
        log.append(
            memoryview(bytearray(build_batch(records, producer_id=producer_id, producer_epoch=0, base_sequence=0)))
        )
    await log.apply_retention()
    _, starts = await reopened(world, clock, config)
    assert min(starts) == 0, "fifty producers are written by four hundred batches"


async def reopened(world: FakeWorld, clock: FakeClock, config: LogConfig) -> tuple[PartitionLog, list[int]]:
    """An unclean open, and the data offsets at which it reads."""
    process = Process(world, clock)
    starts: list[int] = []
    original = process.storage.read

    async def watched(
        stream_id: int, start: int, end: int, max_bytes: int, *, is_urgent: bool = False
    ) -> list[StreamEntry]:
        assert is_urgent, "clients wait for the partition"
        if stream_id == DATA:
            starts.append(start)
        return await original(stream_id, start, end, max_bytes)

    process.storage.read = watched  # type: ignore[method-assign]
    return await process.open(config), starts


async def first_scanned(*, writes: bool) -> int:
    """The first data offset that an unclean open reads; `writes`: a checkpoint is written after 300 of 301 batches."""
    world, clock, config = FakeWorld(), FakeClock(NOW), LogConfig()
    log = await filled(world, clock, 300, config)
    if writes:
        await log.write_checkpoint()
        length = len(world.wal)
        await log.write_checkpoint()
        assert len(world.wal) == length, "nothing was appended since"
    log.append(batch(300))
    again, starts = await reopened(world, clock, config)
    assert again.log_end_offset == 301
    return min(starts)


@sync
async def test_an_open_producer_transaction_survives() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    log = await filled(world, clock, 10)
    records = [Record(0, NOW, b"k", b"v")]
    append_guarded(log, build_batch(records, producer_id=1, producer_epoch=0, base_sequence=0, transactional=True))
    log.append(batch(10))
    assert log.last_stable_offset == 10
    log = await Process(world, clock).open(SMALL)
    assert log.last_stable_offset == 10
    await log.close()
    log = await Process(world, clock).open(SMALL)
    assert log.last_stable_offset == 10


@sync
async def test_leader_epochs_come_back_from_batch_headers() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    config = LogConfig()
    epochs = []
    for n in range(4):
        log = await Process(world, clock).open(config)
        epochs.append(log.leader_epoch)
        log.append(batch(n))
    log = await Process(world, clock).open(config)
    assert [log.epoch_at(offset) for offset in range(4)] == epochs
    assert [log.end_offset_for_epoch(epoch) for epoch in epochs] == [(epoch, n + 1) for n, epoch in enumerate(epochs)]


@sync
async def test_a_clean_record_that_does_not_match_is_not_trusted() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    log = await filled(world, clock, 20)
    await log.close()
    payload = build_batch([Record(0, NOW, b"k", b"v")], base_offset=20, leader_epoch=99)
    world.wal.append((DATA, StreamEntry(20, 1, payload)))
    world.confirmed += 1
    world.epoch = 100
    log = await Process(world, clock).open(SMALL)
    assert log.high_watermark == 21
    assert log.epoch_at(20) == 99
    await log.close()
    log = await Process(world, clock).open(SMALL)
    assert log.high_watermark == 21


@pytest.mark.parametrize("key", [CHECKPOINT, CLEAN, START, EPOCHS, PRODUCERS])
def test_a_value_of_an_unknown_version_is_refused_by_name(key: str) -> None:
    async def run() -> None:
        world, clock = FakeWorld(), FakeClock(NOW)
        log = await filled(world, clock, 60)
        await log.delete_records(5)
        await log.close()
        stored = log.state.meta.get(key)
        assert stored is not None
        version, *values = msgspec.msgpack.decode(stored)
        assert version == 1
        payload = b"\x01" + msgspec.msgpack.encode([[key, msgspec.msgpack.encode([9, *values])]])
        world.wal.append((META, StreamEntry(log.state.meta.stream.next_offset, 1, payload)))
        world.confirmed = len(world.wal)
        with pytest.raises(CorruptData, match=r"version[= ]9"):
            await Process(world, clock).open(SMALL)

    asyncio.run(run())


@sync
async def test_data_shorter_than_its_checkpoint_are_reported() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    await filled(world, clock, 100)
    world.wal = [entry for n, entry in enumerate(world.wal) if entry[0] != DATA or n < 20]
    world.confirmed = len(world.wal)
    with pytest.raises(CorruptData):
        await Process(world, clock).open(SMALL)


@sync
async def test_a_batch_that_does_not_match_its_stream_record_is_reported() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    log = await Process(world, clock).open(LogConfig())
    log.append(batch(0))
    record = world.wal[-1][1]
    world.wal[-1] = (DATA, StreamEntry(record.base_offset, 2, record.payload))
    process = Process(world, clock)
    with pytest.raises(CorruptData):
        await process.open(LogConfig())
    assert process.storage.opened == set(), "the next try opens the streams anew"


@sync
async def test_a_trim_past_lost_records_is_reported() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    log = await filled(world, clock, 10)
    await log.delete_records(8)
    world.wal.clear()
    world.confirmed = 0
    world.starts = {DATA: 8}
    opened = world.opened(DATA)
    assert opened.start_offset == 8
    process = Process(world, clock)
    process.storage.records[DATA] = [StreamEntry(0, 5, b"")]
    with pytest.raises(CorruptData):
        await process.open(SMALL)


@sync
async def test_segments_before_a_moved_start_stay_away_after_a_crash() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    log = await filled(world, clock, 100)
    await log.delete_records(50)
    before = facts(log)
    assert log.state.segments[0].base_offset <= 50 < log.state.segments[1].base_offset
    log = await Process(world, clock).open(SMALL)
    assert facts(log) == before
    await timestamps_are_found(log)
    found = await log.read(50, 10, committed=False)
    assert next(iter_records(found.records[0])).offset == 50


@sync
async def test_producers_of_deleted_records_survive_a_crash() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    log = await filled(world, clock, 3, LogConfig())
    await log.delete_records(2)
    log = await Process(world, clock).open(LogConfig())
    assert log.append(batch(1)).duplicate
    log.append(batch(0, pid=77))
    await log.delete_records(-1)
    log = await Process(world, clock).open(LogConfig())
    assert log.append(batch(0, pid=77)).duplicate
    assert log.append(batch(3)).base_offset == 4


async def test_an_idle_partition_costs_little_memory() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    process, count = Process(world, clock), 200
    for n in range(count):
        log = await process.open(SMALL, first_stream=4 * n)
        log.append(batch(0))
        await log.close()
    process = Process(world, clock)
    await process.open(SMALL, first_stream=4 * count)
    gc.collect()
    tracemalloc.start()
    try:
        logs = [await process.open(SMALL, first_stream=4 * n) for n in range(count)]
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] / len(logs) < 10_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("end", [0, 1, 13, 14, 15, 27, 33, 45, 59])
async def test_a_partition_goes_on_where_its_released_data_ends(end: int, clean: bool) -> None:
    """Its checkpoints, segments, epochs and time index tell of records that were set aside."""

    world, clock = FakeWorld(), FakeClock(NOW)
    log = await filled(world, clock, 60)
    if clean:
        await log.close()
    world.release(DATA, end)
    log = await Process(world, clock).open(SMALL)
    assert (log.log_start_offset, log.high_watermark, log.log_end_offset) == (0, end, end)
    await timestamps_are_found(log)
    clock.now_ms += WAITING_MS
    for n in range(end, 60):
        assert log.append(batch(n, pid=10)).base_offset == n
    segments = log.state.segments
    assert [one.base_offset for one in segments] == sorted({one.base_offset for one in segments})
    assert all(start < 60 for _, start in log.state.epochs.entries())
    assert [entry[1] for entry in log.state.epochs.entries()] == [0, end][: 1 + bool(end)]
    await timestamps_are_found(log)
    before = facts(log)
    world.crash()
    log = await Process(world, clock).open(SMALL)
    assert facts(log)["ends"] == before["ends"] and facts(log)["segments"] == before["segments"]
    await timestamps_are_found(log)


@pytest.mark.parametrize("end", [14, 40, 59])
async def test_what_is_written_after_a_release_is_not_taken_for_compacted(end: int) -> None:
    """Else its tombstones would be removed, and the older values of their keys come back."""
    world, clock = FakeWorld(), FakeClock(NOW)
    log = await filled(world, clock, 60)
    log.state.meta.put({CLEANING: msgspec.msgpack.encode(Cleaned(1, 40, NOW))})
    world.release(DATA, end)
    for _ in range(2):
        log = await Process(world, clock).open(SMALL)
        assert log.cleaning.last() == Cleaned(1, min(40, end), NOW)
    clock.now_ms += WAITING_MS
    assert log.append(batch(60, pid=10)).base_offset == end


async def test_data_that_is_gone_without_a_release_is_refused() -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    await (await filled(world, clock, 60)).close()
    world.release(DATA, 33)
    world.released[DATA] = 32  # of an earlier time
    with pytest.raises(CorruptData, match="checkpoint covers"):
        await Process(world, clock).open(SMALL)


@pytest.mark.parametrize(("stream", "end"), [(META, 5), (META, 0), (TIME, 3), (TIME, 0)])
async def test_released_meta_and_time_streams_lose_no_data(stream: int, end: int) -> None:
    world, clock = FakeWorld(), FakeClock(NOW)
    await (await filled(world, clock, 60)).close()
    starts = [record.base_offset for one, record in world.wal if one == stream]
    world.release(stream, max(start for start in starts if start <= end))
    log = await Process(world, clock).open(SMALL)
    assert (log.log_start_offset, log.high_watermark, log.log_end_offset) == (0, 60, 60)
    await timestamps_are_found(log)
    clock.now_ms += WAITING_MS
    for n in range(60, 90):
        log.append(batch(n, pid=10))
    await timestamps_are_found(log)
    await log.close()
    await timestamps_are_found(await Process(world, clock).open(SMALL))

"""What moves the start of a partition log: DeleteRecords and retention."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.stream.test_partition_log import NOW, Bench, batch, idempotent, sync, values
from tests.support.fake_storage import DATA, META, TIME, HeldRead
from tidelog.runtime.errors import Closed
from tidelog.stream.admission import EARLIER_BATCH_S
from tidelog.stream.errors import OffsetOutOfRange
from tidelog.stream.log_config import LogConfig
from tidelog.stream.partition_log import PartitionLog


@sync
async def test_delete_records_moves_the_log_start_durably() -> None:
    bench = Bench()
    log = await bench.open()
    for n in range(5):
        log.append(batch(b"a%d" % n, b"b%d" % n))
    assert await log.delete_records(3) == 3
    assert log.log_start_offset == 3
    assert bench.world.starts[DATA] == 3
    with pytest.raises(OffsetOutOfRange):
        await log.read(2, 1000, committed=False)
    assert (await values(log, 3))[:2] == [b"a1", b"b1"], "the batch that contains the start comes whole"
    assert await log.delete_records(1) == 3
    for offset in (11, -2):
        with pytest.raises(OffsetOutOfRange):
            await log.delete_records(offset)
    log = await bench.restart()
    assert log.log_start_offset == 3
    assert await log.delete_records(-1) == 10
    assert (log.log_start_offset, log.size_bytes()) == (10, 0)
    log = await bench.reopen(log)
    assert log.append(batch()).base_offset == 10


@sync
async def test_delete_records_never_passes_the_high_watermark() -> None:
    bench = Bench(auto_confirm=False)
    log = await bench.open()
    log.append(batch(b"a"))
    bench.process.storage.confirm_all()
    log.append(batch(b"b"))
    with pytest.raises(OffsetOutOfRange):
        await log.delete_records(2)
    deleting = asyncio.ensure_future(log.delete_records(-1))
    await asyncio.sleep(0)
    assert not deleting.done(), "it is acknowledged when it is durable"
    assert DATA not in bench.world.starts
    bench.process.storage.confirm_all()
    assert await deleting == 1


@sync
async def test_a_log_start_is_told_only_when_it_is_confirmed() -> None:
    """Until then a failover takes it back, and a client must not have seen it (found by simulation, seed 1386)."""
    bench = Bench(auto_confirm=False)
    log = await bench.open()
    log.append(batch(b"a"))
    log.append(batch(b"b"))
    bench.process.storage.confirm_all()
    first, second = (asyncio.ensure_future(log.delete_records(offset)) for offset in (2, 1))
    await asyncio.sleep(0)
    assert log.log_start_offset == 0
    assert log.append(batch(b"c")).log_start_offset == 0
    assert await values(log, 0) == [b"a", b"b"]
    await asyncio.sleep(0)
    assert not second.done(), "a later request for less is told of nothing that is not durable, either"
    bench.process.storage.confirm_all()
    assert (await first, await second) == (2, 2)
    assert log.log_start_offset == 2
    with pytest.raises(OffsetOutOfRange):
        await log.read(1, 1000, committed=False)


@sync
async def test_a_trim_that_the_controller_misses_is_made_up_for() -> None:
    bench = Bench(LogConfig(retention_ms=-1))
    log = await bench.open()
    log.append(batch(b"a"))
    log.append(batch(b"b"))
    bench.process.manager.away = True
    assert await log.delete_records(1) == 1
    assert DATA not in bench.world.starts
    bench.process.manager.away = False
    assert await log.apply_retention() == 1
    assert bench.world.starts[DATA] == 1


@sync
async def test_delete_records_is_not_acknowledged_by_a_log_that_closes_before_it_has_done_it() -> None:
    """A move may close the log while DeleteRecords waits for an earlier trim: the client must ask the new leader."""
    bench = Bench(LogConfig(retention_ms=-1))
    log = await bench.open()
    for value in (b"a", b"b", b"c"):
        log.append(batch(value))
    bench.process.manager.away = True
    assert await log.delete_records(1) == 1
    bench.process.manager.away = False
    deleting = asyncio.ensure_future(log.delete_records(2))
    await asyncio.sleep(0)
    assert not deleting.done(), "the earlier trim is on its way"
    await log.close()
    with pytest.raises(Closed):
        await deleting
    log = await bench.restart()
    assert log.log_start_offset == 1
    assert await log.delete_records(2) == 2


@sync
async def test_streams_are_trimmed_only_when_the_bucket_holds_the_new_start() -> None:
    bench = Bench(LogConfig(retention_ms=-1, checkpoint_bytes=100))
    bench.world.uploaded = 0
    log = await bench.open()
    for n in range(200):
        log.append(idempotent(n))
    assert await log.delete_records(150) == 150
    await log.apply_retention()
    assert bench.world.starts == {}, "the disk may still be lost, and with it all of this"
    log = await bench.restart()
    assert (await log.apply_retention(), bench.world.starts) == (150, {})
    bench.world.uploaded = None
    await log.apply_retention()
    assert bench.world.starts[DATA] == 150
    assert bench.world.starts[META] > 0


@sync
async def test_retention_by_size_and_time_drops_segments_and_their_index() -> None:
    bench = Bench(LogConfig(segment_bytes=1000, index_interval_bytes=100, retention_ms=-1, retention_bytes=3000))
    log = await bench.open()
    for n in range(100):
        log.append(batch(b"x" * 30, timestamp=NOW + n))
    size = log.size_bytes()
    start = await log.apply_retention()
    assert 0 < start < 100
    assert 3000 <= log.size_bytes() < 4000 < size
    found = await log.offset_for_timestamp(0)
    assert found is not None
    assert found[:2] == (start, NOW + start)
    log = await bench.reopen(log)
    assert log.log_start_offset == start
    log.config = LogConfig(retention_ms=1000)
    bench.clock.now_ms += 10_000
    moved: list[int] = []
    log.add_watermark_listener(lambda: moved.append(log.log_start_offset))
    assert await log.apply_retention() == 100
    assert moved == [100]
    assert log.size_bytes() == 0
    assert bench.world.starts[DATA] == 100
    assert bench.world.starts[TIME] > 0
    assert log.append(batch()).base_offset == 100


@sync
async def test_expired_producers_are_forgotten_by_housekeeping() -> None:
    bench = Bench(LogConfig(producer_id_expiration_ms=1000, retention_ms=-1))
    log = await bench.open()
    bench.clock.now_ms += int(EARLIER_BATCH_S * 1000)
    log.append(idempotent(0))
    assert [producer.producer_id for producer in log.producers()] == [9]
    bench.clock.now_ms += 1000
    await log.apply_retention()
    assert log.producers() == []
    assert not log.append(idempotent(77)).duplicate


@sync
async def test_the_meta_stream_stays_small() -> None:
    await _check_meta_stays_small(PartitionLog.apply_retention, 25)


@sync
async def test_the_meta_stream_stays_small_without_retention() -> None:
    await _check_meta_stays_small(PartitionLog.shorten_meta, 50)


async def _check_meta_stays_small(step: Callable[[PartitionLog], Awaitable[object]], most: int) -> None:
    bench = Bench(LogConfig(checkpoint_bytes=500, retention_ms=-1))
    log = await bench.open()
    for n in range(1500):
        log.append(idempotent(n))
        if n % 50 == 0:
            await step(log)
    records = [record for stream_id, record in bench.world.wal if stream_id == META]
    kept = [record for record in records if record.base_offset >= bench.world.starts[META]]
    assert len(kept) < most < len(records) / 2
    log = await bench.restart()
    assert log.append(idempotent(1499)).duplicate


@sync
async def test_a_lookup_by_time_in_what_is_deleted_meanwhile_finds_what_is_left() -> None:
    bench = Bench()
    log = await bench.open()
    for n in range(6):
        log.append(batch(b"a%d" % n, timestamp=NOW + n))
    bench.process.storage.hot = False
    for look in (partial(log.offset_for_timestamp, NOW), log.offset_of_max_timestamp):
        start = log.log_start_offset
        held = bench.process.storage.held = HeldRead(DATA)
        async with asyncio.timeout(10):
            looking = asyncio.create_task(look())
            await held.reached.wait()
            assert await log.delete_records(start + 2) == start + 2
            held.released.set()
            found = await looking
        assert found is not None and found.offset == (start + 2 if start == 0 else 5)

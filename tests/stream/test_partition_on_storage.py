"""Partition logs on the real storage: WAL, log cache, uploads and reads from the bucket, with crashes between."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.fake_wal import WalMedia
from tests.support.guarded import append_guarded
from tests.support.storage_world import World, until
from tidelog.batch.batch import Record, build_batch, iter_batches, iter_records
from tidelog.runtime.errors import Overloaded
from tidelog.storage.settings import CacheSettings
from tidelog.stream.errors import EarlierBatchMissing, OffsetOutOfRange, OutOfOrderSequence
from tidelog.stream.log_config import LogConfig
from tidelog.stream.opened import OpenedStream
from tidelog.stream.partition_log import AppendResult, FetchResult, LedPartition, PartitionLog

SMALL = LogConfig(
    segment_bytes=1500,
    checkpoint_bytes=700,
    index_interval_bytes=150,
    retention_ms=-1,
    message_timestamp_after_max_ms=1 << 60,
)


class Cluster:
    """A storage world, the controller's streams and some partition logs."""

    feature_level = 1

    def __init__(self, **upload: int) -> None:
        self.world = World(**upload)
        self.starts: dict[int, int] = {}
        self.logs: list[PartitionLog] = []

    async def trim_stream(
        self, replica_set_id: int, master_epoch: int, stream_id: int, epoch: int, start_offset: int
    ) -> None:
        await asyncio.sleep(0)
        self.starts[stream_id] = max(self.starts.get(stream_id, 0), start_offset)

    async def boot(self, partitions: int = 1, config: LogConfig = SMALL) -> PartitionLog:
        """Start a process and open its logs; the first of them."""
        world = self.world
        storage = await world.boot(done=False)
        self.logs = []
        for n in range(partitions):
            opened = [
                OpenedStream(
                    stream, world.stream_epoch, self.starts.get(stream, 0), world.objects.ends.get(stream, 0), 0
                )
                for stream in range(4 * n, 4 * n + 4)
            ]
            log = await PartitionLog.open(
                led=LedPartition("t", bytes(16), n, world.stream_epoch),
                streams=(opened[0], opened[1], opened[2], opened[3]),
                storage=storage,
                manager=self,  # type: ignore[arg-type]
                config=config,
                clock=world.clock,
            )
            self.logs.append(log)
        storage.recovered_done()
        return self.logs[0]

    async def lose_the_disk(self) -> None:
        """The process and its WAL are gone; the bucket and the controller are not."""
        await self.world.crash()
        self.world.media = WalMedia()

    async def confirmed(self, result: AppendResult) -> AppendResult:
        await self.world.storage.confirm.wait(result.wal_end)
        return result


def value(sequence: int) -> bytes:
    return b"%d:" % sequence + b"x" * 40


def batch(sequence: int, *, pid: int = 9, txn: bool = False) -> memoryview:
    records = [Record(0, 5000 + sequence, b"k", value(sequence))]
    built = build_batch(records, producer_id=pid, producer_epoch=0, base_sequence=sequence, transactional=txn)
    return memoryview(bytearray(built))


async def contents(log: PartitionLog) -> list[tuple[int, int, bytes | None]]:
    found: list[tuple[int, int, bytes | None]] = []
    at = log.log_start_offset
    while at < log.high_watermark:
        part = await log.read(at, 300, committed=False)
        for records in part.records:
            found += [(one.offset, one.timestamp, one.value) for one in iter_records(records)]
        at = found[-1][0] + 1
    return found


def expected(start: int, end: int) -> list[tuple[int, int, bytes | None]]:
    return [(n, 5000 + n, value(n)) for n in range(start, end)]


@pytest.mark.parametrize("clean", [True, False])
async def test_once_uploaded_everything_survives_the_loss_of_the_disk(clean: bool) -> None:
    cluster = Cluster()
    log = await cluster.boot(partitions=2)
    for n in range(150):
        for one in cluster.logs:
            one.append(batch(n))
    await cluster.confirmed(log.append(batch(150)))
    epoch = log.leader_epoch
    await log.delete_records(7)
    if clean:
        for one in cluster.logs:
            await one.close()
    await cluster.world.storage.upload_now()
    await cluster.lose_the_disk()

    log = await cluster.boot(partitions=2)
    assert (log.log_start_offset, log.high_watermark) == (7, 151)
    assert await contents(log) == expected(7, 151)
    assert await contents(cluster.logs[1]) == expected(0, 150)
    assert log.append(batch(150)).duplicate
    with pytest.raises((OutOfOrderSequence, EarlierBatchMissing)):
        log.append(batch(152))
    for offset in range(7, 151, 13):
        assert await log.offset_for_timestamp(5000 + offset) == (offset, 5000 + offset, epoch)
    assert await log.offset_of_max_timestamp() == (150, 5150, epoch)
    assert log.end_offset_for_epoch(epoch) == (epoch, 151)
    result = await cluster.confirmed(log.append(batch(151)))
    assert (result.base_offset, log.high_watermark) == (151, 152)
    await cluster.world.check()


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_confirmed_is_lost_and_nothing_doubled_over_crashes(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(size_bytes=rng.choice([500, 3000, 1 << 20]))
    log = await cluster.boot()
    sent = confirmed = 0
    for _ in range(12):
        for _ in range(rng.randrange(60)):
            log.append(batch(sent))
            sent += 1
            if rng.random() < 0.2:
                await asyncio.sleep(0)
            confirmed = max(confirmed, log.high_watermark)
        action = rng.choice(["crash", "close", "upload", "disk", "housekeeping"])
        if action == "upload":
            await asyncio.wait_for(cluster.world.storage.upload_now(), 60)
        elif action == "housekeeping":
            await log.apply_retention()
        else:
            if action == "disk":
                await log.close()
                await asyncio.wait_for(cluster.world.storage.upload_now(), 60)
                await cluster.lose_the_disk()
                confirmed = sent
            elif action == "close":
                await log.close()
                await cluster.world.storage.close(upload=rng.random() < 0.5)
                confirmed = sent
            else:
                await cluster.world.crash()
            log = await cluster.boot()
            assert confirmed <= log.high_watermark <= sent, action
            if log.high_watermark:
                assert log.append(batch(log.high_watermark - 1)).duplicate
            sent = confirmed = log.high_watermark
        assert await contents(log) == expected(0, log.high_watermark)
    await cluster.world.check()


async def test_deleted_records_stay_deleted_and_the_rest_is_read_from_the_bucket() -> None:
    cluster = Cluster()
    config = LogConfig(
        segment_bytes=1500,
        retention_bytes=4000,
        retention_ms=-1,
        index_interval_bytes=150,
        message_timestamp_after_max_ms=1 << 60,
    )
    log = await cluster.boot(config=config)
    for n in range(200):
        log.append(batch(n))
    await cluster.confirmed(log.append(batch(200)))
    start = await log.apply_retention()
    assert start > 0
    assert cluster.starts == {}, "not before the bucket knows of it"
    await cluster.world.storage.upload_now()
    assert await log.apply_retention() == start
    assert cluster.starts[1] == start
    await log.close()
    await cluster.world.storage.upload_now()
    await cluster.lose_the_disk()
    log = await cluster.boot(config=config)
    assert log.log_start_offset == start
    assert await contents(log) == expected(start, 201)
    assert await log.offset_for_timestamp(0) == (start, 5000 + start, 1)


async def test_a_full_log_cache_refuses_an_append_and_changes_nothing() -> None:
    cluster = Cluster()
    cluster.world.cache = CacheSettings(log_bytes=20_000, block_bytes=1 << 20)
    cluster.world.upload.size_bytes = 1 << 20
    log = await cluster.boot()
    refused = 0

    async def append(sequence: int) -> AppendResult:
        nonlocal refused
        while True:
            try:
                return log.append(batch(sequence))
            except Overloaded:
                refused += 1
                await asyncio.wait_for(cluster.world.storage.writable(), 60)

    for n in range(200):
        assert not (await append(n)).duplicate
    assert refused
    await cluster.confirmed(await append(200))
    assert await contents(log) == expected(0, 201)


async def test_an_undecided_transaction_survives_the_loss_of_the_disk() -> None:
    cluster = Cluster()
    log = await cluster.boot()
    log.append(batch(0))
    append_guarded(log, batch(0, pid=4, txn=True))
    await cluster.confirmed(log.append(batch(1)))
    assert log.last_stable_offset == 1
    await cluster.world.storage.upload_now()
    await cluster.lose_the_disk()
    log = await cluster.boot()
    assert (log.last_stable_offset, log.high_watermark) == (1, 3)


async def test_a_disk_lost_after_deleting_what_was_never_uploaded_leaves_a_log_that_opens() -> None:
    cluster = Cluster(size_bytes=1 << 20)
    log = await cluster.boot()
    for n in range(40):
        log.append(batch(n))
    await cluster.confirmed(log.append(batch(40)))
    await cluster.world.storage.upload_now()
    for n in range(41, 80):
        log.append(batch(n))
    await cluster.confirmed(log.append(batch(80)))
    assert await log.delete_records(-1) == 81
    await log.apply_retention()
    await cluster.lose_the_disk()
    log = await cluster.boot()
    assert (log.log_start_offset, log.high_watermark) == (0, 41)
    assert await contents(log) == expected(0, 41)


async def restarted_with_aborted(cluster: Cluster) -> PartitionLog:
    """Offsets 0 to 2 were aborted by the marker at 3, which is in a later object, 4 to 9 follow; all is cold."""
    log = await cluster.boot()
    for n in range(3):
        append_guarded(log, batch(n, txn=True))
    await cluster.world.storage.upload_now()
    log.write_marker(9, 0, commit=False, coordinator_epoch=0, transaction_version=0)
    for n in range(4, 10):
        await cluster.confirmed(log.append(batch(n, pid=-1)))
    await log.close()
    await cluster.world.storage.upload_now()
    await cluster.world.crash()
    return await cluster.boot()


async def held_read(
    cluster: Cluster, log: PartitionLog, max_bytes: int
) -> tuple[asyncio.Task[FetchResult], asyncio.Event]:
    """A read_committed read from offset 0 that waits for the bucket, which answers everything else."""
    gate = cluster.world.store.get_gate = asyncio.Event()
    before = len(cluster.world.store.gets)
    reading = asyncio.create_task(log.read(0, max_bytes, committed=True))
    await until(lambda: len(cluster.world.store.gets) > before)
    for _ in range(3):  # it has been counted, and comes to the gate
        await asyncio.sleep(0)
    cluster.world.store.get_gate = None
    assert not reading.done()
    return reading, gate


@pytest.mark.parametrize("max_bytes", [200, 4000])
@pytest.mark.parametrize("log_start", [2, 5])
async def test_records_that_are_deleted_while_they_are_read_are_not_taken_for_committed(
    log_start: int, max_bytes: int
) -> None:
    cluster = Cluster()
    log = await restarted_with_aborted(cluster)
    reading, gate = await held_read(cluster, log, max_bytes)
    assert await log.delete_records(log_start) == log_start
    await cluster.world.storage.upload_now()
    await log.apply_retention()
    index = log.state.txn.stream
    assert index.start_offset == (0 if log_start == 2 else index.next_offset), "what was aborted is forgotten by now"
    gate.set()
    if max_bytes == 200:
        with pytest.raises(OffsetOutOfRange):
            await reading
    else:
        found = await reading
        offsets = [header.base_offset for header, _ in iter_batches(b"".join(found.records))]
        assert offsets == list(range(log_start, 10)), "what is left"
        assert found.aborted == ([(9, 0)] if log_start == 2 else [])

"""Partitions over a replicated WAL: a master is killed, and another broker serves what was acknowledged.

The controllers, replicas, storages and partition managers are the real ones; the bucket is in memory, for all brokers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from tests.controller.controller_helpers import until
from tests.support.kafka_world import CLUSTER_ID
from tests.support.kept_set import SET, KeptProcess, SelfKeptSet
from tidelog.batch.batch import Record, build_batch, iter_records
from tidelog.broker.hot_storage import HotStorage
from tidelog.broker.partitions.local_streams import ImageStreams
from tidelog.broker.partitions.manager import PartitionManager
from tidelog.broker.partitions.storages import MasterStorages
from tidelog.broker.replication.duty import DutyEvents
from tidelog.broker.settings import KafkaSettings, LogSettings
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import TidelogError
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.inputs import HandedWal, LocalStreams, ReplicaSetData
from tidelog.storage.settings import StorageSettings, UploadSettings
from tidelog.storage.storage import Storage
from tidelog.storage.wal.base import WalFailed
from tidelog.stream.partition_log import PartitionLog

pytestmark = pytest.mark.timeout(300)


class Serving:
    """What a process serves with."""

    def __init__(self, hot: HotStorage, storages: MasterStorages, partitions: PartitionManager) -> None:
        self.hot = hot
        self.storages = storages
        self.partitions = partitions


class ServingSet(SelfKeptSet):
    """Brokers that serve the partitions of the set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.bucket = MemoryObjectStore()
        self.serving: dict[int, Serving] = {}
        self.upload_age_ms = 3_600_000

    async def begun(self, process: KeptProcess) -> DutyEvents:
        broker_id, client = process.broker.broker_id, process.client
        storages, streams = MasterStorages(), ImageStreams(client, SET)
        partitions = PartitionManager(
            node_id=broker_id,
            controller=client,
            storages=storages,
            clock=SystemClock(),
            kafka=KafkaSettings(),
            defaults=LogSettings(),
            rng=random.Random(broker_id),
        )

        def make(handed: HandedWal) -> Storage:
            return Storage(
                ReplicaSetData(CLUSTER_ID, SET, process.broker.wal, self.bucket, client, handed=handed),
                StorageSettings(UploadSettings(age_ms=self.upload_age_ms)),
                SystemClock(),
                random.Random(broker_id),
                streams=LocalStreams(streams.is_placed, streams.facts),
            )

        hot = HotStorage(process.broker.replica, make, storages, process.failures.append)
        await partitions.start()
        self.serving[broker_id] = Serving(hot, storages, partitions)
        return hot.events()

    async def ending(self, process: KeptProcess) -> None:
        serving = self.serving.pop(process.broker.broker_id)
        await serving.hot.close(upload=False)  # first: a process that is killed closes no partition
        await serving.partitions.close()

    async def later_than(self, epoch: int) -> None:
        """Wait until this term has ended."""
        await until(lambda: self.node.image.replica_sets[SET].master_epoch > epoch)

    async def partition(self) -> PartitionLog:
        """Wait until the master's partition is open."""
        await self.settled()

        def is_open() -> bool:
            record = self.node.image.replica_sets[SET]
            serving = self.serving.get(record.master)
            return serving is not None and [one.leader_epoch for one in serving.partitions.all()] == [
                self.node.image.leader(one)[1] for one in self.node.image.all_partitions()
            ]

        await until(is_open)
        return self.serving[self.node.image.replica_sets[SET].master].partitions.get("t", 0)


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[ServingSet]:
    here = ServingSet(tmp_path)
    await here.begin()
    await here.processes[1].client.create_topic("t", 1, {}, assignment=[SET])
    yield here
    await here.finish()


async def produce(log: PartitionLog, values: list[bytes]) -> None:
    """Append one batch for each value; return when all are acknowledged."""
    acked = asyncio.Event()
    left = set(range(len(values)))

    def acknowledge(index: int) -> None:
        left.discard(index)
        if not left:
            acked.set()

    for index, value in enumerate(values):
        batch = build_batch([Record(0, 1_700_000_000_000, b"k", value)])
        end = log.append(memoryview(bytearray(batch))).wal_end
        log.when_acked(end, partial(acknowledge, index))
    async with asyncio.timeout(30):
        await acked.wait()


async def contents(log: PartitionLog) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < log.high_watermark:
        for batch in (await log.read(len(found), 1 << 20, committed=False)).records:
            found += [bytes(record.value or b"") for record in iter_records(batch)]
    return found


def values(first: int, count: int) -> list[bytes]:
    return [b"value-%d" % each for each in range(first, first + count)]


async def test_what_a_killed_master_acknowledged_is_served_by_another_broker(serving: ServingSet) -> None:
    log = await serving.partition()
    await produce(log, values(0, 60))
    await serving.end(1)
    log = await serving.partition()
    await until(lambda: log.high_watermark == 60)
    assert await contents(log) == values(0, 60)
    await produce(log, values(60, 20))
    await serving.launch(1)
    await serving.settled()
    await serving.end(serving.leader().broker_id)  # and the next one, too
    log = await serving.partition()
    await until(lambda: log.high_watermark == 80)
    assert await contents(log) == values(0, 80)
    assert all(one.failures == [] for one in serving.processes.values())


async def test_what_was_uploaded_is_read_from_the_bucket_by_the_next_master(serving: ServingSet) -> None:
    log = await serving.partition()
    await produce(log, values(0, 40))
    await serving.serving[1].storages.get(SET).upload_now()
    committed = serving.node.image.replica_sets[SET].committed_wal_offset
    assert committed > 0
    await produce(log, values(40, 40))
    await serving.end(1)
    log = await serving.partition()
    storage = next(iter(serving.serving[serving.leader().broker_id].storages.all()))
    await until(lambda: log.high_watermark == 80)
    assert await contents(log) == values(0, 80)
    await storage.upload_now()
    assert serving.node.image.replica_sets[SET].committed_wal_offset > committed
    assert await contents(log) == values(0, 80)


async def test_a_storage_whose_term_has_ended_reaches_the_wal_no_more(serving: ServingSet) -> None:
    log = await serving.partition()
    old, taken = [], 0
    for designated in (2, 1, 3, 1):
        await produce(log, values(taken, 10))
        taken += 10
        old.append(log)
        await serving.same()  # the designated one is elected if it has what two of the others have
        await serving.settled()
        epoch = serving.node.image.replica_sets[SET].master_epoch
        await serving.processes[2].client.replica_sets.begin_election(SET, epoch, "again", designated=designated)
        await serving.later_than(epoch)
        log = await serving.partition()
        assert serving.leader().broker_id == designated
        for each in old:
            with pytest.raises(TidelogError):
                each.append(memoryview(bytearray(build_batch([Record(0, 1_700_000_000_000, b"k", b"late")]))))
    await produce(log, values(taken, 10))
    assert await contents(log) == values(0, taken + 10)
    await serving.same()


async def test_a_wal_that_fails_ends_what_it_served(serving: ServingSet) -> None:
    log = await serving.partition()
    await produce(log, values(0, 5))
    serving.serving[1].hot.wal_failed(WalFailed("the disk is gone"))
    with pytest.raises(WalFailed):
        await log.wait_acked(log.append(memoryview(bytearray(build_batch([Record(0, 1, b"k", b"v")])))).wal_end)
    await serving.end(1)
    log = await serving.partition()
    await until(lambda: log.high_watermark >= 5)
    assert (await contents(log))[:5] == values(0, 5)


async def test_a_storage_whose_last_upload_was_given_up_is_closed_all_the_same(
    serving: ServingSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await serving.partition()
    await produce(log, values(0, 5))
    asked, ended = asyncio.Event(), asyncio.Event()

    async def silent(*_arguments: object, **_options: object) -> None:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(serving.bucket, "put", silent)
    here = serving.serving[1]
    closing = asyncio.create_task(here.hot.close(upload=True))
    async with asyncio.timeout(30):
        await asked.wait()
    closing.cancel()  # its time is up
    with pytest.raises(asyncio.CancelledError):
        await closing
    await here.hot.close(upload=False)
    assert ended.is_set() and here.storages.all() == []
    with pytest.raises(TidelogError):
        log.append(memoryview(bytearray(build_batch([Record(0, 1_700_000_000_000, b"k", b"late")]))))

"""A takeover that is tried again after its own fence is not fenced by that (rule 14), however few brokers are left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from tests.controller.controller_helpers import TOPIC, Driver, until
from tidelog.broker.partitions.takeover import ATTEMPTS, TakeoverRunner
from tidelog.controller.image.image import Delta
from tidelog.controller.model import commands as c
from tidelog.controller.model.records import NO_BROKER, ReplicaSetRecord
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import Fenced, Unavailable
from tidelog.storage.bucket.health import BucketHealth
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.commits import CommitObjects
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import CacheSettings, StorageSettings, UploadSettings, WalSettings
from tidelog.storage.wal.s3.format import FENCE_BYTES
from tidelog.storage.wal.s3.wal import S3Wal

DEAD = 0
PARTITIONS = 3


class GuardedStore(MemoryObjectStore):
    health = BucketHealth("memory://", SystemClock())


class Cluster:
    """The controllers as a broker sees them, and a bucket. `failures` is how many placements fail."""

    def __init__(self, brokers: int) -> None:
        self.driver = Driver()
        self.store = GuardedStore()
        self.failures = 0
        self.elected: list[tuple[int, int]] = []
        self._listeners: list[Callable[[Delta], None]] = []
        for broker in range(brokers):
            names = (f"code{broker}", "a", "host")
            self.run(c.RegisterBroker(broker, *names, 9092, "", "", "s3", f"host:{7000 + broker}"))
            self.run(c.Elect(broker, broker))
        self.run(c.CreateTopic(TOPIC, "t", PARTITIONS, {}, False, False, (DEAD,) * PARTITIONS))
        firsts = [each.first_stream for each in self.image.partitions(TOPIC)]
        pairs = [(first + step, self.epoch) for first in firsts for step in range(4)]
        self.run(c.OpenStreams(DEAD, self.epoch, tuple(pairs)))
        self.stream = firsts[0]

    @property
    def image(self) -> Any:
        return self.driver.image

    @property
    def record(self) -> ReplicaSetRecord:
        return cast("ReplicaSetRecord", self.image.replica_sets[DEAD])

    @property
    def epoch(self) -> int:
        return self.record.master_epoch

    def run(self, command: c.AnyCommand) -> Any:
        value = self.driver.run(command)
        for listener in self._listeners:
            listener(Delta(self.driver.index, []))
        return value

    def subscribe(self, listener: Callable[[Delta], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def takeover(self, replica_set: int, broker: int, epoch: int) -> None:
        await asyncio.sleep(0)
        self.run(c.ElectSuccessor(replica_set, broker, epoch))
        self.elected.append((broker, self.epoch))

    async def place_taken_over(self, replica_set: int, epoch: int, wal_offset: int, keys: Any) -> int:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise Unavailable("the controllers do not answer")
        return int(self.run(c.PlaceTakenOver(replica_set, epoch, wal_offset, tuple(keys))))

    def committed_wal_offset(self, replica_set: int) -> int:
        return int(self.image.replica_sets[replica_set].committed_wal_offset)

    def quarantined(self, stream: int) -> str:
        return ""

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        return int(self.run(c.PrepareObjects(count, ttl_ms)))

    async def commit_objects(self, commit: CommitObjects) -> None:
        self.run(c.Commit(commit))

    def wal(self, _cluster: str, replica_set: int) -> S3Wal:
        settings = WalSettings(max_bytes=1 << 20, max_record_bytes=4096, s3_batch_bytes=200, s3_in_flight=4)
        clock, rng = SystemClock(), random.Random()
        return S3Wal(self.store, settings, cluster_id="cluster", replica_set_id=replica_set, clock=clock, rng=rng)

    async def kill(self, successor: int) -> None:
        """The broker writes a record that is not uploaded, and dies."""
        wal = self.wal("cluster", DEAD)
        await wal.recover(lambda _record: None)
        await wal.begin_epoch(self.epoch)
        end = wal.append(StreamAppend(self.stream, self.epoch, 0, 1, (b"record",)))
        await until(lambda: wal.durable_offset >= end)
        await wal.close()
        self.run(c.SetBrokerAlive(DEAD, self.image.brokers[DEAD].registration_epoch, False))
        self.run(c.ElectSuccessor(DEAD, successor, self.epoch))

    @property
    def end_offset(self) -> int:
        return int(self.image.streams[self.stream].end_offset)

    @property
    def fences(self) -> int:
        return [len(body) for body in map(self.store.body, self.store.keys())].count(FENCE_BYTES)

    @asynccontextmanager
    async def runner(self, node: int) -> AsyncIterator[TakeoverRunner]:
        runner = TakeoverRunner(
            node_id=node,
            controller=cast("Any", self),
            open_wal=self.wal,
            store=cast("Any", self.store),
            clock=SystemClock(),
            rng=random.Random(1),
            settings=StorageSettings(UploadSettings(), CacheSettings(log_bytes=1 << 20, block_bytes=1 << 20)),
            on_deposed=lambda error: pytest.fail(str(error)),
        )
        runner.start(self.image.replica_sets[node].master_epoch)
        try:
            yield runner
        finally:
            await runner.close()

    @property
    def is_placed(self) -> bool:
        return self.record.successor == NO_BROKER and not self.image.index.partition_counts.get(DEAD, 0)


async def test_the_only_survivor_goes_on_after_its_own_fence() -> None:
    cluster = Cluster(2)
    cluster.failures = ATTEMPTS + 2
    await cluster.kill(1)
    async with cluster.runner(1) as runner:
        await until(lambda: cluster.is_placed, 20.0)
        await until(lambda: runner.counts["done"] == 1)
    assert cluster.end_offset == 1
    assert {broker for broker, _epoch in cluster.elected} == {1}


async def test_a_successor_that_starts_again_goes_on_after_its_fence() -> None:
    cluster = Cluster(2)
    cluster.failures = 1
    await cluster.kill(1)
    async with cluster.runner(1):
        await until(lambda: cluster.failures == 0)
    assert not cluster.is_placed
    async with cluster.runner(1):
        await until(lambda: cluster.is_placed, 20.0)
    assert cluster.end_offset == 1


async def test_another_broker_is_asked_after_as_many_failures_as_before() -> None:
    cluster = Cluster(3)
    cluster.failures = ATTEMPTS
    await cluster.kill(1)
    async with cluster.runner(1), cluster.runner(2):
        await until(lambda: cluster.is_placed, 20.0)
    assert cluster.elected[-1][0] == 2, cluster.elected
    assert [broker for broker, _epoch in cluster.elected].count(1) < ATTEMPTS
    assert cluster.end_offset == 1


async def test_each_fence_costs_one_failure_and_its_back_off() -> None:
    """No loop without a pause fills the bucket with fences, which are never deleted."""
    cluster = Cluster(2)
    cluster.failures = 4
    await cluster.kill(1)
    async with cluster.runner(1) as runner:
        await until(lambda: cluster.is_placed, 20.0)
        failed = runner.counts["failed_attempts"]
    assert cluster.fences <= 2 + failed


async def test_a_successor_that_was_replaced_does_not_elect_itself_again() -> None:
    cluster = Cluster(3)
    await cluster.kill(1)
    epoch = cluster.epoch
    cluster.run(c.ElectSuccessor(DEAD, 2, epoch))
    with pytest.raises(Fenced):
        await cluster.takeover(DEAD, 1, epoch)
    async with cluster.runner(1):
        for _ in range(100):
            await asyncio.sleep(0)
    assert cluster.record.successor == 2 and cluster.epoch == epoch + 1

"""Plans whose slices are in manifests: the same tasks as with slices in them, in any number of manifests."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pyspark_tidelog.cluster import Lease, Lookups
from pyspark_tidelog.fetch import EMBEDDED
from pyspark_tidelog.manifests import find_ranges, read_parts
from pyspark_tidelog.plan import Task, plan_tasks
from tests.pyspark_tidelog.test_spark_lookups import RANGES, Broker, filled
from tidelog.broker.objects.manifest_writer import ManifestWriter
from tidelog.controller.image.lookup import OffsetRange
from tidelog.controller.model import commands as c
from tidelog.controller.model.leases import TakeLease
from tidelog.runtime.clock import SystemClock
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.bucket.store import ObjectNotFound
from tidelog.storage.objects.key import object_key

LEASE = Lease(1, 1, 60.0)


class WritingBroker(Broker):
    """Writes manifests to a bucket, of `slices` each."""

    def __init__(self, bucket: Path) -> None:
        super().__init__(filled())
        self.slices = 10_000
        self.refusal = 0
        self.trims: tuple[int, int] | None = None
        """Number of the question before which a partition's log is trimmed, and to which offset."""
        self.driver.run(TakeLease("a test", 60_000, 60_000))
        bucket.mkdir()
        self.store = LocalObjectStore(bucket, SystemClock())
        self.bucket = {EMBEDDED: bucket.as_uri()}

    def answer(self, path: str, body: bytes, authorization: str) -> tuple[int, bytes]:
        if not path.startswith("/manifests"):
            return super().answer(path, body, authorization)
        if self.refusal:
            return self.refusal, b"no such path"
        question = json.loads(body)
        self.asked.append((path, question, authorization))
        if self.trims is not None and len(self.asked) == self.trims[0]:
            (partition, *_) = self.driver.image.partitions(self.driver.image.topic_ids["t"])
            epoch = self.driver.image.replica_sets[0].master_epoch
            self.driver.run(c.TrimStream(partition.first_stream + 1, 0, self.trims[1], 0, epoch))
        ranges = msgspec.convert(question["ranges"], list[OffsetRange])
        return 200, msgspec.json.encode(asyncio.run(self._write(ranges)))

    async def _write(self, ranges: list[OffsetRange]) -> Any:
        async def prepare(count: int, ttl_ms: int) -> int:
            return self.driver.prepare(count, ttl_ms)

        writer = ManifestWriter(image=lambda: self.driver.image, store=self.store, prepare=prepare, clock=SystemClock())
        return await writer.write(1, ranges, self.slices)

    def close(self) -> None:
        super().close()
        asyncio.run(self.store.close())


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[WritingBroker]:
    found = WritingBroker(tmp_path / "bucket")
    yield found
    found.close()


def resolved(broker: WritingBroker, task: Task) -> Task:
    """The task with its slices read from the manifests."""
    assert not (task.slices and task.parts)
    if not task.parts:
        return task
    cluster_id = broker.driver.image.cluster_id
    return replace(task, slices=read_parts(broker.bucket, cluster_id, task.parts), parts=())


@pytest.mark.parametrize("slices", [1, 2, 3, 7, 8, 10_000])
@pytest.mark.parametrize("max_bytes", [1, 35, 70, 1 << 20])
def test_tasks_have_the_same_slices_as_without_manifests(broker: WritingBroker, slices: int, max_bytes: int) -> None:
    broker.slices = slices
    lookups = Lookups((broker.url,), "")
    ranges = [(*each[:3], each[3] + 5 if each[1] == 1 else each[3]) for each in RANGES]
    plain = find_ranges(lookups, broker.bucket, ranges, LEASE, most=100)
    wanted = plan_tasks(plain.ranges, max_bytes=max_bytes)
    assert plain.place(wanted) == wanted
    found = find_ranges(lookups, broker.bucket, ranges, LEASE, most=3)
    assert found.ranges == plain.ranges and found.cluster_id == plain.cluster_id
    placed = found.place(plan_tasks(found.ranges, max_bytes=max_bytes))
    assert [resolved(broker, task) for task in placed] == wanted
    if slices == 10_000:
        assert [bool(task.parts) for task in placed] == [len(task.slices) > 1 for task in wanted]


def test_many_ranges_are_several_manifests_and_those_without_slices_none(broker: WritingBroker) -> None:
    rng = random.Random(1)
    ranges = [("t", number % 3, 10 * rng.randrange(7), 70) for number in range(310)]
    lookups = Lookups((broker.url,), "")
    found = find_ranges(lookups, broker.bucket, ranges, LEASE, most=0)
    assert [(each.topic, each.partition, each.start, each.end) for each in found.ranges] == ranges
    assert len([path for path, _, _ in broker.asked if path.startswith("/manifests")]) == 3
    broker.asked.clear()
    empty = find_ranges(lookups, broker.bucket, [("t", 0, 70, 90)], LEASE, most=0)
    assert [each.slices for each in empty.ranges] == [()]
    assert [task.is_tail for task in empty.place(plan_tasks(empty.ranges, max_bytes=1))] == [True]


def test_a_range_that_is_trimmed_between_two_manifests_begins_where_the_log_does(broker: WritingBroker) -> None:
    broker.slices = 3
    broker.trims = (3, 45)  # the second manifest; the first question is the one about slices
    found = find_ranges(Lookups((broker.url,), ""), broker.bucket, [("t", 0, 5, 62), ("t", 1, 0, 70)], LEASE, most=1)
    first, second = found.ranges
    assert (first.start, [each.start for each in first.slices]) == (45, [40, 50, 60])
    assert [each.start for each in second.slices] == list(range(0, 70, 10))
    tasks = found.place(plan_tasks(found.ranges, max_bytes=1))
    assert sum(task.end - task.start for task in tasks) == (62 - 45) + 70


def test_a_manifest_that_is_gone_is_told_as_not_found(broker: WritingBroker) -> None:
    found = find_ranges(Lookups((broker.url,), ""), broker.bucket, RANGES, LEASE, most=1)
    (task, *_) = found.place(plan_tasks(found.ranges, max_bytes=1 << 20))
    key = object_key(found.cluster_id, task.parts[0].object_id)
    asyncio.run(broker.store.delete([key]))
    with pytest.raises(ObjectNotFound):
        read_parts(broker.bucket, found.cluster_id, task.parts)


@pytest.mark.parametrize("status", [401, 404, 405])
def test_with_a_broker_that_writes_no_manifests_tasks_carry_their_slices(broker: WritingBroker, status: int) -> None:
    broker.refusal = status
    lookups = Lookups((broker.url,), "")
    found = find_ranges(lookups, broker.bucket, RANGES, LEASE, most=1)
    assert found == find_ranges(lookups, broker.bucket, RANGES, LEASE, most=100)

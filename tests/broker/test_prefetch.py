"""What a follower reads before it is elected (`tidelog.broker.partitions.prefetch`)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.support.kafka_world import DataController
from tests.support.loops import VIRTUAL_LOOP, LoopClock
from tests.support.storage_world import CLUSTER, FaultyStore, inline
from tidelog.broker.partitions.prefetch import AGAIN_S, PAUSE_S, FollowerPrefetch
from tidelog.broker.partitions.read_replicas import FollowedReplicas
from tidelog.controller.image.image import Image
from tidelog.controller.model.records import StreamRecord
from tidelog.storage.cache.log_cache import LogCache
from tidelog.storage.cache.recovered import RecoveredRecords
from tidelog.storage.commits import CommitObjects, NewObject, ObjectKind, StreamRange, pack_ranges
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.writer import build_object
from tidelog.storage.reads.reader import BlockReader
from tidelog.storage.records import StreamEntry
from tidelog.storage.wal.base import WalRecord, WalRecordType
from tidelog.stream.partition_state import CHECKPOINT, VERSION, Checkpoint

LOOPS = VIRTUAL_LOOP
LEADER, HERE = 1, 2
META, DATA, TIME = 0, 1, 2
PARTITIONS = 3
RECORD_BYTES = 1000
Records = Mapping[int, list[tuple[int, bytes]]]
"""By stream: base offset and payload of records of one offset."""


def checkpoint(data_offset: int) -> bytes:
    """An append of a meta stream."""
    value = msgspec.msgpack.encode(Checkpoint(VERSION, data_offset))
    return b"\x01" + msgspec.msgpack.encode([(CHECKPOINT, value)])


class Follower:
    """A broker that follows the replica set of another one, with a bucket."""

    def __init__(self, bytes_per_s: int = 1 << 20, cache_bytes: int = 64 << 20) -> None:
        self.clock = LoopClock()
        self.store = FaultyStore(cast(Any, self.clock))
        self.controller = DataController()
        for broker in (LEADER, HERE):
            self.controller.register(broker)
        self.log_cache = LogCache(1 << 20)
        self.records = RecoveredRecords(self.log_cache)
        self.replica = SimpleNamespace(is_following=True, tail=SimpleNamespace(records=self.records))
        followed = FollowedReplicas()
        followed.add(LEADER, cast(Any, self.replica))
        self.reader = BlockReader(
            store=self.store,
            objects=self.controller,
            clock=self.clock,
            cluster_id=CLUSTER,
            cache_bytes=cache_bytes,
            offload=inline,
        )
        self.prefetch = FollowerPrefetch(lambda: self.controller.image, followed, self.reader, self.clock, bytes_per_s)
        self.first: list[int] = []
        """The meta stream of each partition."""
        self._wal_end = 0

    async def begin(self, topic: str = "t", *, internal: bool = False, partitions: int = PARTITIONS) -> None:
        """A topic, led by the other broker."""
        made = await self.controller.create_topic(topic, partitions, {}, assignment=[LEADER] * partitions)
        if internal:
            self.controller.image.topics[made.id] = msgspec.structs.replace(
                self.controller.image.topics[made.id], internal=True
            )
        self.controller.open_partitions(topic)
        self.first = [each.first_stream for each in self.controller.image.partitions(made.id)]
        self.prefetch.start()

    async def upload(self, records: Records) -> None:
        """The master puts these into an object, and commits it."""
        object_id = await self.controller.prepare_objects(1, 60_000)
        built = build_object(
            object_id=object_id,
            kind=ObjectKind.STREAM_SET,
            cluster_id=CLUSTER,
            created_ms=0,
            parts=[(each, [StreamEntry(at, 1, data) for at, data in records[each]]) for each in sorted(records)],
            block_bytes=4096,
        )
        await self.store.put(object_key(CLUSTER, object_id), built.body)
        row, start = self.controller.image.replica_sets[LEADER], self._wal_end
        self._wal_end += RECORD_BYTES * sum(map(len, records.values()))
        ranges = pack_ranges([(each.stream_id, each.start_offset, each.end_offset) for each in built.ranges])
        made = NewObject(object_id, ObjectKind.STREAM_SET, built.size, ranges)
        await self.controller.commit_objects(CommitObjects(LEADER, row.master_epoch, start, self._wal_end, (made,)))

    def receive(self, records: Records) -> None:
        """The same came here before, by the WAL: it was confirmed, and is committed now."""
        for stream_id, entries in records.items():
            epoch = self.controller.image.streams[stream_id].owner_since_epoch
            for base_offset, data in entries:
                end = max(0, self.records.newest_end) + RECORD_BYTES
                kind = WalRecordType.DATA
                self.records.add(
                    WalRecord(end - RECORD_BYTES, end, kind, 1, stream_id, epoch, base_offset, 1, memoryview(data))
                )
        self.records.discard_before(1 << 60, 1 << 60)

    async def passes(self, seconds: float = 2 * PAUSE_S) -> None:
        await self.clock.sleep(seconds)

    def opens_without(self, partition: int, data_from: int) -> bool:
        """Whether an opening would find its meta stream, and the data from an offset on, in the cache."""
        return all(
            self.is_here(self.first[partition] + number, start) for number, start in ((META, 0), (DATA, data_from))
        )

    def is_here(self, stream_id: int, start: int) -> bool:
        row = self.controller.image.streams[stream_id]
        kept = self.records.kept(stream_id, row.end_offset, row.owner_since_epoch)
        end = row.end_offset if kept is None else kept.cache_start
        found = self.reader.read_cached(stream_id, start, end, 1 << 20, is_urgent=True) if start < end else []
        return found is not None and (not found or found[-1].base_offset + 1 == end)

    async def close(self) -> None:
        await self.prefetch.close()
        await self.reader.close()


@pytest.fixture
async def here() -> AsyncIterator[Follower]:
    found = Follower()
    yield found
    await found.close()


def written(here: Follower, count: int = 30, covered: int = 20) -> dict[int, list[tuple[int, bytes]]]:
    """Some data in each partition, a checkpoint that covers the first of it, and an entry in the time index."""
    found: dict[int, list[tuple[int, bytes]]] = {}
    for first in here.first:
        found[first + META] = [(0, checkpoint(covered))]
        found[first + DATA] = [(at, bytes(RECORD_BYTES)) for at in range(count)]
        found[first + TIME] = [(0, bytes(24))]
    return found


async def test_others_run_while_partitions_are_looked_at(here: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand of them held the clients of a follower up for 70 ms, at each look."""
    turns, told, stream = 0, list[int](), Image.stream

    def others_run() -> None:
        nonlocal turns
        turns += 1

    def telling(image: Image, stream_id: int) -> StreamRecord | None:
        told.append(turns)
        asyncio.get_running_loop().call_soon(others_run)
        return stream(image, stream_id)

    monkeypatch.setattr(Image, "stream", telling)
    await here.begin(partitions=2_000)
    await here.passes()
    assert len(told) >= 4 * 2_000
    assert max(Counter(told).values()) <= 4 * 256


async def test_what_lies_behind_checkpoints_is_read_before_it_is_needed_and_the_rest_is_not(here: Follower) -> None:
    await here.begin()
    await here.upload(written(here))
    await here.passes()
    assert here.prefetch.figures() == {"followed": PARTITIONS, "ready": PARTITIONS}
    assert all(here.opens_without(each, 20) for each in range(PARTITIONS))
    assert not here.opens_without(0, 0), "what the checkpoint covers is not read"
    gets = len(here.store.gets)
    await here.passes(3 * AGAIN_S)
    assert len(here.store.gets) == gets


async def test_a_later_checkpoint_and_later_data_are_read_when_they_are_committed(here: Follower) -> None:
    await here.begin()
    await here.upload(written(here))
    await here.passes()
    first = here.first[1]
    more = [(at, bytes(RECORD_BYTES)) for at in range(30, 60)]
    await here.upload({first + META: [(1, checkpoint(50))], first + DATA: more})
    await here.passes()
    assert here.opens_without(1, 50)
    assert here.prefetch.figures()["ready"] == PARTITIONS


async def test_what_came_with_the_wal_and_is_kept_is_not_read_again(here: Follower) -> None:
    await here.begin()
    records = written(here)
    await here.upload(records)
    here.receive(records)
    await here.passes()
    assert here.prefetch.figures() == {"followed": PARTITIONS, "ready": PARTITIONS}
    assert here.store.gets == []


async def test_an_internal_topic_is_read_whole(here: Follower) -> None:
    await here.begin("__consumer_offsets", internal=True)
    await here.upload(written(here))
    await here.passes()
    assert all(here.opens_without(each, 0) for each in range(PARTITIONS))


async def test_a_bucket_that_is_away_makes_none_ready_until_it_is_back(here: Follower) -> None:
    await here.begin()
    await here.upload(written(here))
    here.store.fail_gets = 1 << 30
    await here.passes(2 * AGAIN_S)
    assert here.prefetch.figures() == {"followed": PARTITIONS, "ready": 0}
    here.store.fail_gets = 0
    await here.passes(2 * AGAIN_S)
    assert here.prefetch.figures()["ready"] == PARTITIONS


async def test_what_was_evicted_while_a_bucket_does_not_answer_is_not_called_ready(here: Follower) -> None:
    await here.begin()
    records = written(here)
    await here.upload(records)
    here.receive(records)
    await here.passes()
    assert here.prefetch.figures()["ready"] == PARTITIONS
    here.store.get_gate = asyncio.Event()
    await here.upload({here.first[0] + DATA: [(30, bytes(RECORD_BYTES))]})
    await here.passes()
    assert here.prefetch.figures() == {"followed": PARTITIONS, "ready": PARTITIONS - 1}
    here.log_cache.evict(1 << 20)  # producers go on
    await here.passes(3 * AGAIN_S)
    assert here.prefetch.figures() == {"followed": PARTITIONS, "ready": 0}
    here.replica.is_following = False  # it was elected
    assert here.prefetch.figures() == {"followed": 0, "ready": 0}
    here.replica.is_following = True
    here.store.get_gate.set()
    await here.passes()
    assert here.prefetch.figures()["ready"] == PARTITIONS


async def test_a_partition_with_more_than_may_be_read_at_once_is_read_in_several_looks() -> None:
    here = Follower(bytes_per_s=5 * RECORD_BYTES)
    await here.begin("__consumer_offsets", internal=True)
    first = here.first[0]
    data = [(at, bytes(RECORD_BYTES)) for at in range(100)]
    await here.upload({first + META: [(0, checkpoint(90))], first + DATA: data})
    async with asyncio.timeout(1000):
        while here.prefetch.figures()["ready"] < PARTITIONS:
            await here.passes(1.0)
    assert here.opens_without(0, 0)
    await here.close()


async def test_a_block_larger_than_all_that_may_be_read_at_once_is_read_and_paid_for_afterwards() -> None:
    here = Follower(bytes_per_s=RECORD_BYTES)
    await here.begin()
    first, size = here.first[0], 20 * RECORD_BYTES
    await here.upload({first + META: [(0, checkpoint(0))], first + DATA: [(at, bytes(size)) for at in range(3)]})
    before = here.clock.monotonic()
    async with asyncio.timeout(1000):
        while here.prefetch.figures()["ready"] < PARTITIONS:
            await here.passes(1.0)
    assert here.clock.monotonic() - before >= 2 * size / RECORD_BYTES, "the last one is paid for later"
    assert here.opens_without(0, 0)
    await here.close()


async def test_what_is_read_is_bounded_and_partitions_with_little_to_scan_come_first() -> None:
    here = Follower(bytes_per_s=5 * RECORD_BYTES)
    await here.begin()
    records = written(here)
    records[here.first[2] + META] = [(0, checkpoint(29))]
    await here.upload(records)
    before = here.clock.monotonic()
    while not here.opens_without(2, 29):
        await here.passes(1.0)
    assert not here.opens_without(0, 20)
    while here.prefetch.figures()["ready"] < PARTITIONS:
        await here.passes(1.0)
    assert here.clock.monotonic() - before >= 21 / 5, "records of all partitions, by records per second"
    await here.close()


async def test_the_indexes_of_many_small_objects_count_as_what_is_read() -> None:
    here = Follower(bytes_per_s=2 * RECORD_BYTES)
    await here.begin()
    first, count = here.first[0], 100
    await here.upload({first + META: [(0, checkpoint(0))], first + DATA: [(0, bytes(RECORD_BYTES))]})
    for at in range(1, count):
        await here.upload({first + DATA: [(at, bytes(RECORD_BYTES))]})
    began = here.clock.monotonic()
    async with asyncio.timeout(1000):
        while here.prefetch.figures()["ready"] < PARTITIONS:
            await here.passes(1.0)
            read = sum(end - start for _, start, end in here.store.gets)
            at_once = 20 * RECORD_BYTES  # objects that one look-up takes
            assert read <= at_once + 2 * RECORD_BYTES * (here.clock.monotonic() - began)
    assert here.reader.holds(StreamRange(first + DATA, 0, count))
    await here.close()


async def test_nothing_is_read_unless_the_replica_follows(here: Follower) -> None:
    await here.begin()
    await here.upload(written(here))
    here.replica.is_following = False
    await here.passes()
    assert (here.store.gets, here.prefetch.figures()["followed"]) == ([], 0)
    here.replica.is_following = True
    await here.passes()
    assert here.prefetch.figures()["ready"] == PARTITIONS
    here.replica.is_following = False
    await here.passes()
    assert here.prefetch.figures() == {"followed": 0, "ready": 0}


async def test_a_bound_of_zero_reads_nothing() -> None:
    here = Follower(bytes_per_s=0)
    await here.begin()
    await here.upload(written(here))
    await here.passes()
    assert here.store.gets == []
    await here.close()


async def test_what_the_cache_has_evicted_is_read_again() -> None:
    here = Follower(cache_bytes=256 << 10)
    await here.begin()
    await here.upload(written(here, count=200, covered=190))
    await here.passes()
    assert here.opens_without(0, 190)
    for first in here.first:
        await here.reader.gather([StreamRange(first + DATA, 0, 150)], 1 << 20)
    assert not here.opens_without(0, 190)
    await here.passes(AGAIN_S + PAUSE_S)
    assert all(here.opens_without(each, 190) for each in range(PARTITIONS))
    await here.close()

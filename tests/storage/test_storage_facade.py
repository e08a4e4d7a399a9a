"""`Storage` as streams see it: appends, reads from memory and bucket, recovery, quarantine, the end."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from tests.support.storage_world import CLUSTER, World, until
from tidelog.runtime.errors import Closed, Fenced, InvalidInput, Overloaded, StorageFailed
from tidelog.storage.cache.log_cache import LogCache
from tidelog.storage.cache.recovered import RecoveredRecords
from tidelog.storage.commits import StreamRange
from tidelog.storage.confirm import ConfirmOffset
from tidelog.storage.inputs import HandedWal, ReplicaSetData
from tidelog.storage.records import OffsetTrimmed, StreamAppend, StreamEntry, StreamQuarantined
from tidelog.storage.settings import StorageSettings
from tidelog.storage.storage import Storage


async def settle(world: World) -> None:
    await until(lambda: world.storage.confirm.value == world.wal.end_offset)


async def evict_all(world: World) -> None:
    """Upload everything and let memory forget it."""
    await settle(world)
    await world.storage.upload_now()
    world.storage.forget_uploaded()


async def test_what_is_appended_is_read_back_from_memory() -> None:
    world = World()
    await world.boot([1])
    for number in range(10):
        world.append(1, bytes([number]) * 10, count=3)
    storage = world.storage
    got = storage.read_hot(1, 4, 30, 25)
    assert got is not None
    assert [(one.base_offset, one.count, bytes(one.payload)[:1]) for one in got] == [(3, 3, b"\1"), (6, 3, b"\2")]
    assert storage.read_hot(1, 4, 30, 1) == got[:1]
    assert storage.read_hot(1, 5, 5, 100) == []
    assert storage.read_hot(1, 7, 9, 1000) == got[1:]
    assert await storage.read(1, 29, 30, 10) == [StreamEntry(27, 3, bytes([9]) * 10)]
    assert await storage.read(1, 30, 30, 10) == []
    with pytest.raises(InvalidInput):
        await storage.read(1, 30, 31, 10)
    with pytest.raises(Closed):
        storage.read_hot(2, 0, 1, 1)
    await storage.close(upload=False)


async def test_a_handed_wal_says_whether_enough_replicas_take_a_write_and_any_other_takes_all() -> None:
    world = World()
    await world.boot([1])
    world.storage.check_writable(9)
    asked: list[int] = []

    def check(min_in_sync: int) -> None:
        asked.append(min_in_sync)
        raise Overloaded("two replicas are in sync")

    cache = LogCache(1 << 20)
    handed = HandedWal(RecoveredRecords(cache), cache, ConfirmOffset(), check=check)
    data = ReplicaSetData(CLUSTER, 1, world.wal, world.store, world.objects, handed=handed)
    replicated = Storage(data, StorageSettings(), world.clock, random.Random(1))
    with pytest.raises(Overloaded, match="two replicas"):
        replicated.check_writable(3)
    assert asked == [3]
    await world.storage.close(upload=False)


async def test_a_payload_of_several_buffers_is_one_record() -> None:
    world = World()
    await world.boot([1])
    world.storage.append(StreamAppend(1, 1, 0, 2, [b"ab", memoryview(b"cd"), bytearray(b"e")]))
    world.storage.append(StreamAppend(1, 1, 2, 1, [bytearray(b"xyz")]))
    got = world.storage.read_hot(1, 0, 3, 100)
    assert got is not None
    assert [bytes(one.payload) for one in got] == [b"abcde", b"xyz"]
    await world.storage.close(upload=False)


async def test_what_memory_forgot_is_read_from_the_bucket_and_the_rest_from_memory() -> None:
    world = World(size_bytes=10_000, block_bytes=150)
    await world.boot([1, 2])
    rng = random.Random(1)
    for _ in range(30):
        world.append(rng.randrange(1, 3), rng.randbytes(rng.randrange(100)), count=rng.randrange(1, 9))
    await evict_all(world)
    for _ in range(10):
        world.append(1, rng.randbytes(50))
    await settle(world)
    assert world.storage.read_hot(1, 0, world.next_offset(1), 1) is None
    for stream in (1, 2):
        for max_bytes in (1, 100, 1 << 20):
            assert await world.read_all(stream, max_bytes) == world.acked[stream]
    for record in world.acked[1]:
        for offset in range(record.base_offset, record.base_offset + record.count):
            (got,) = await world.storage.read(1, offset, offset + 1, 1)
            assert got._replace(payload=bytes(got.payload)) == record
    await world.storage.close(upload=False)


async def test_what_is_in_memory_is_not_gathered() -> None:
    world = World(size_bytes=10_000, block_bytes=150)
    await world.boot([1, 2])
    for _ in range(30):
        world.append(1, bytes(100))
        world.append(2, bytes(100))
    await settle(world)
    ranges = [StreamRange(stream, 0, world.next_offset(stream)) for stream in (1, 2)]
    assert world.storage.holds(ranges)
    await world.storage.gather(ranges)
    assert world.store.gets == []
    await evict_all(world)
    assert not world.storage.holds(ranges)
    assert not world.storage.holds(ranges[1:])
    await world.storage.gather(ranges)
    assert world.store.gets != []
    assert world.storage.holds(ranges)
    await world.storage.close(upload=False)


async def test_below_the_start_is_trimmed() -> None:
    world = World()
    await world.boot([1])
    for _ in range(5):
        world.append(1, b"x")
    world.storage.set_trimmed(1, 3)
    world.storage.set_trimmed(1, 2)
    assert world.storage.read_hot(1, 2, 5, 100) is None
    with pytest.raises(OffsetTrimmed) as caught:
        await world.storage.read(1, 2, 5, 100)
    assert caught.value.kafka_code == 1
    assert len(await world.storage.read(1, 3, 5, 100)) == 2
    await world.storage.close(upload=False)


async def test_a_stale_stream_epoch_and_a_closed_stream_take_no_appends() -> None:
    world = World()
    await world.boot([1])
    world.append(1, b"x")
    with pytest.raises(Fenced):
        world.storage.append(StreamAppend(1, 0, 1, 1, [b"y"]))
    world.storage.close_stream(1)
    with pytest.raises(Closed):
        world.storage.append(StreamAppend(1, 1, 1, 1, [b"y"]))
    with pytest.raises(Closed):
        await world.storage.read(1, 0, 1, 1)
    world.stream_epoch = 2
    assert world.open(1) == 1, "what is not uploaded is still there when it is opened again"
    world.append(1, b"y")
    await settle(world)
    await world.storage.upload_now()
    assert world.objects.ends == {1: 2}
    world.storage.close_stream(99)
    await world.storage.close(upload=False)


async def test_a_stream_that_was_elsewhere_meanwhile_begins_at_its_new_end() -> None:
    world = World()
    await world.boot([1])
    for _ in range(3):
        world.append(1, b"old")
    await settle(world)
    await world.storage.upload_now()
    world.storage.close_stream(1)
    world.objects.ends[1] = 10  # another replica set owned it
    world.stream_epoch = 5
    assert world.open(1, owner_since=5) == 10
    world.append(1, b"new")
    await settle(world)
    await world.storage.upload_now()
    assert world.objects.ends == {1: 11}
    assert world.quarantined == []
    await world.storage.close(upload=False)


@pytest.mark.parametrize("forgotten", [False, True], ids=["in memory", "evicted"])
async def test_a_stream_that_is_opened_again_by_an_answer_older_than_an_upload_ends_where_it_ended(
    forgotten: bool,
) -> None:
    """A move that is given up opens its streams again while their upload goes on: the commit may be the quicker one."""

    world = World()
    world.stream_facts = lambda stream: (world.objects.ends.get(stream, 0), 0)
    await world.boot([1])
    for number in range(3):
        world.append(1, bytes([number]) * 20)
    await settle(world)
    world.storage.close_stream(1)
    answered_end = world.objects.ends.get(1, 0)
    await world.storage.upload_now()
    if forgotten:
        world.storage.forget_uploaded()
        assert world.storage.stats()["streams"] == 0
    assert answered_end < world.objects.ends[1] == 3
    assert world.storage.open_stream(1, world.stream_epoch, 0, answered_end, 0) == 3
    world.append(1, b"new")
    await settle(world)
    await world.storage.upload_now()
    assert world.objects.ends == {1: 4}
    assert await world.read_all(1) == world.acked[1]
    assert world.quarantined == []
    await world.storage.close(upload=False)


async def test_after_a_crash_the_wal_holds_what_was_acknowledged() -> None:
    world = World()
    await world.boot([1, 2])
    for number in range(10):
        world.append(number % 2 + 1, bytes([number]) * 20)
    await settle(world)
    await world.storage.upload_now()
    for number in range(10):
        world.append(number % 2 + 1, bytes([number]) * 30)
    await settle(world)
    world.append(1, b"never durable")
    await world.crash()
    await world.boot([1, 2])
    for stream in (1, 2):
        assert await world.read_all(stream) == world.acked[stream]
        assert world.next_offset(stream) == 10
    await world.storage.close(upload=True)
    assert world.objects.ends == {1: 10, 2: 10}
    await world.check()


async def test_the_wal_is_lost_but_everything_was_uploaded() -> None:
    world = World()
    await world.boot([1])
    for number in range(10):
        world.append(1, bytes([number]) * 20)
    await world.storage.close(upload=True)
    committed = world.objects.committed_wal_offset(1)
    world.media.records.clear()
    world.media.start = world.media.end = 0
    await world.boot([1])
    assert world.wal.start_offset == committed, "the WAL goes on where the bucket ends"
    assert await world.read_all(1) == world.acked[1]
    world.append(1, b"more")
    await world.storage.close(upload=True)
    assert world.objects.ends == {1: 11}
    await world.check()


async def test_records_of_streams_nobody_opened_are_dropped_and_the_range_commits() -> None:
    world = World()
    await world.boot([1, 2])
    for stream in (1, 2, 1, 2):
        world.append(stream, b"x")
    await settle(world)
    await world.crash()
    await world.boot([1], done=False)
    upload = asyncio.create_task(world.storage.upload_now())
    for _ in range(20):
        await asyncio.sleep(0)
    assert world.objects.commits == [], "held until all streams are known"
    world.append(1, b"new")
    world.storage.recovered_done()
    await upload
    await settle(world)
    await world.storage.upload_now()
    assert world.objects.ends == {1: 3}
    assert world.objects.committed_wal_offset(1) == world.wal.end_offset
    world.storage.forget_uploaded()
    assert world.storage.stats()["log_cache_bytes"] == 0
    await world.storage.close(upload=False)


async def test_uploads_wait_for_streams_of_ours_that_are_not_open_yet() -> None:
    world = World()
    await world.boot([1, 2, 3])
    for stream in (1, 2, 3):
        world.append(stream, b"precious")
    await settle(world)
    await world.crash()
    world.owns_stream = lambda stream: stream not in world.objects.deleted
    await world.boot([1])
    upload = asyncio.create_task(world.storage.upload_now())
    for _ in range(30):
        await asyncio.sleep(0)
    assert not upload.done()
    world.objects.deleted.add(3)
    assert world.open(2) == 1
    await upload
    assert world.objects.ends == {1: 1, 2: 1}
    await world.storage.close(upload=False)


async def test_streams_of_ours_that_were_not_opened_are_uploaded_by_what_the_metadata_says() -> None:
    world = World()
    await world.boot([1, 2])
    for stream in (1, 2, 2):
        world.append(stream, b"precious")
    await settle(world)
    await world.crash()
    world.stream_facts = lambda stream: (0, 0) if stream == 2 else None
    await world.boot([1])
    await world.storage.upload_now()
    assert world.objects.ends == {1: 1, 2: 2}
    assert world.open(2) == 2
    assert await world.read_all(2) == world.acked[2]
    world.append(2, b"more")
    await world.storage.close(upload=True)
    assert world.objects.ends == {1: 1, 2: 3}
    assert world.quarantined == []


async def test_a_close_that_was_cancelled_can_be_finished_without_the_upload() -> None:
    world = World()
    await world.boot([1])
    world.append(1, b"x")
    world.store.gate = asyncio.Event()
    closing = asyncio.create_task(world.storage.close(upload=True))
    for _ in range(20):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    await world.storage.close(upload=False)
    await world.storage.close(upload=False)
    assert world.wal.closed
    world.store.gate = None
    await world.boot([1])
    assert await world.read_all(1) == world.acked[1]
    await world.storage.close(upload=False)


async def test_records_of_an_earlier_ownership_do_not_count() -> None:
    world = World()
    await world.boot([1])
    world.append(1, b"of epoch 1")
    await settle(world)
    await world.crash()
    await world.boot(done=False)
    assert world.open(1, owner_since=2) == 0
    world.storage.recovered_done()
    world.append(1, b"of epoch 2")
    await settle(world)
    await world.storage.upload_now()
    assert [bytes(one.payload) for one in await world.read_all(1)] == [b"of epoch 2"]
    assert world.quarantined == []
    await world.check()
    await world.storage.close(upload=False)


@pytest.mark.parametrize("committed", [0, 2, 7])
async def test_a_gap_or_overlap_between_bucket_and_wal_is_never_skipped(committed: int) -> None:
    world = World()
    world.objects.ends[1] = 4
    await world.boot([1, 2])
    for _ in range(3):
        world.append(1, b"x")
    world.append(2, b"y")
    await settle(world)
    await world.crash()
    world.objects.ends[1] = committed
    world.objects.fail_quarantine = 2
    await world.boot([2], done=False)
    for _ in range(2):
        with pytest.raises(StreamQuarantined, match="offset 4"):
            world.open(1)
    world.storage.recovered_done()
    await world.storage.upload_now()
    assert world.objects.ends == {1: committed, 2: 1}
    assert len([info async for info in world.store.list(f"{CLUSTER}/quarantine/")]) == 1
    assert [stream for stream, _ in world.quarantined] == [1]
    with pytest.raises(StreamQuarantined):
        await world.storage.read(1, committed, committed + 1, 10)
    assert "offset 4" in world.objects.quarantines[1]
    await world.crash()
    await world.boot([2], done=False)  # the WAL is trimmed: only the metadata remembers
    with pytest.raises(StreamQuarantined, match="offset 4"):
        world.open(1)
    world.storage.recovered_done()
    world.append(2, b"goes on")
    await settle(world)
    await world.storage.upload_now()
    assert world.objects.ends == {1: committed, 2: 2}
    assert world.storage.is_quarantined(1)
    del world.objects.quarantines[1]  # an operator has decided
    assert world.open(1) == committed and not world.storage.is_quarantined(1)
    world.append(1, b"goes on, too")
    await settle(world)
    await world.storage.upload_now()
    assert world.objects.ends == {1: committed + 1, 2: 2}
    await world.storage.close(upload=False)


async def test_a_quarantine_is_durable_before_the_range_that_leaves_its_records_out_is_committed() -> None:
    world = World()
    await world.boot([1, 2])
    world.append(1, b"x")
    world.append(2, b"y")
    await settle(world)
    await world.crash()
    world.objects.ends[1] = 5
    await world.boot([2], done=False)
    with pytest.raises(StreamQuarantined):
        world.open(1)
    world.objects.fail_quarantine = 1 << 30  # the controller does not answer
    world.storage.recovered_done()
    upload = asyncio.create_task(world.storage.upload_now())
    await settle(world)
    assert world.objects.commits == [] and world.media.trims == [] and not upload.done()
    world.objects.fail_quarantine = 0
    await upload
    assert 1 in world.objects.quarantines and world.objects.ends == {1: 5, 2: 1}
    await world.storage.close(upload=False)


async def test_a_failed_wal_confirms_nothing_more_but_uploads_what_is_confirmed() -> None:
    world = World()
    await world.boot([1], auto_sync=False)
    world.append(1, b"durable")
    world.wal.sync()
    wal_end = world.append(1, b"not durable")
    waiting = asyncio.create_task(world.storage.confirm.wait(wal_end))
    await asyncio.sleep(0)
    world.wal.fail()
    with pytest.raises(StorageFailed):
        await waiting
    with pytest.raises(StorageFailed):
        world.append(1, b"more")
    assert len(world.wal_failed) == 1
    await world.storage.upload_now()
    assert world.objects.ends == {1: 1}
    await world.storage.close(upload=True)


async def test_a_full_wal_at_start_is_waited_for() -> None:
    world = World()
    await world.boot([1], full_epochs=5)
    world.append(1, b"x")
    await world.storage.close(upload=True)
    assert world.objects.ends == {1: 1}


async def test_the_confirm_offset_rides_in_the_wal() -> None:
    world = World()
    await world.boot([1])
    world.append(1, b"x")
    await settle(world)
    assert world.wal.noted == world.wal.end_offset
    await world.storage.close(upload=False)


@pytest.mark.parametrize("seed", range(12))
async def test_any_sequence_of_appends_uploads_faults_and_crashes_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World(size_bytes=rng.choice([200, 1000, 5000]), max_in_flight=rng.randrange(1, 4))
    world.cache.log_bytes = 1 << rng.randrange(15, 20)
    streams = [1, 2, 3]
    await world.boot(streams)
    for _ in range(150):
        action = rng.random()
        if action < 0.7:
            stream = rng.choice(streams)
            with contextlib.suppress(Overloaded):
                world.append(stream, rng.randbytes(rng.randrange(200)), count=rng.randrange(1, 4))
        elif action < 0.8:
            world.store.fail_puts = rng.randrange(3)
            world.objects.fail_after_commit = rng.randrange(2)
            world.objects.fail_before_commit = rng.randrange(2)
        elif action < 0.84:
            await settle(world)
            await world.storage.upload_now()
        elif action < 0.88:
            await world.crash()
            await world.boot(streams)
            for stream in streams:
                got = await world.read_all(stream)
                acked = world.acked.get(stream, [])
                assert got[: len(acked)] == acked
                world.acked[stream] = got
        else:
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
    await settle(world)
    for stream in streams:
        assert await world.read_all(stream, rng.choice([1, 300, 10_000])) == world.acked.get(stream, [])
    await world.storage.close(upload=True)
    await world.check()
    assert world.objects.committed_wal_offset(1) == world.media.end
    assert world.fenced == []
    assert world.quarantined == []


async def test_records_told_of_a_stream_that_was_just_opened_are_taken_only_at_its_committed_end() -> None:
    world = World()
    await world.boot([1])
    storage = world.storage
    right = [StreamEntry(4, 3, b"four"), StreamEntry(7, 3, b"seven")]
    assert storage.open_stream(9, 1, 2, 10, 0) == 10
    for wrong in (
        [],
        right[:1],
        right[1:] + right[:1],
        [StreamEntry(0, 4, b"trimmed"), *right],
        [StreamEntry(3, 0, b"nothing"), *right],
        [*right, StreamEntry(10, 1, b"more than is committed")],
    ):
        assert not storage.warm(9, wrong)
    assert not storage.warm(8, right), "not open"
    before = storage.stats()["log_cache_bytes"]
    assert storage.warm(9, right)
    assert not storage.warm(9, right), "it is there"
    assert storage.read_hot(9, 5, 10, 100) == right
    assert storage.read_hot(9, 2, 10, 100) is None, "what is older is in the bucket"
    stats = storage.stats()
    assert stats["log_cache_bytes"] > before
    assert stats["log_cache_pending_bytes"] == 0, "it may be evicted: it is in the bucket"
    storage.append(StreamAppend(9, 1, 10, 1, [b"next"]))
    assert [one.base_offset for one in storage.tail(9, 100)] == [4, 7, 10]
    assert [one.base_offset for one in storage.tail(9, 9)] == [7, 10]
    await storage.close(upload=False)

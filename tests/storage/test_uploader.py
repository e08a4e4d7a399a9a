"""Uploads under faults: nothing is lost, nothing is doubled, whatever fails and wherever the process stops."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.storage_world import CLUSTER, World, until
from tidelog.runtime.errors import Closed, CorruptData, Fenced, Overloaded
from tidelog.storage.commits import CommitGap, CommitObjects, ObjectKind
from tidelog.storage.objects.key import quarantine_key
from tidelog.storage.objects.report import inspect_object, verify_object
from tidelog.storage.records import StreamQuarantined
from tidelog.storage.uploads.pipeline import REFUSALS
from tidelog.storage.wal.base import WalFull


def payload(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 120))


async def settle(world: World) -> None:
    await until(lambda: world.storage.confirm.value == world.wal.end_offset)


async def test_streams_share_a_set_object_and_large_ones_get_their_own() -> None:
    world = World(size_bytes=10_000)
    await world.boot([1, 2, 3])
    for _ in range(5):
        world.append(2, bytes(100))
    world.append(1, b"a")
    world.append(3, b"c")
    await settle(world)
    await world.storage.upload_now()
    (commit,) = world.objects.commits
    kinds = [(one.kind, [piece.stream_id for piece in one.ranges]) for one in commit.objects]
    assert kinds == [(ObjectKind.STREAM_SET, [1, 3]), (ObjectKind.STREAM, [2])]
    assert world.media.trims == [commit.wal_end]
    await world.check()
    await world.storage.close(upload=False)


async def test_reaching_the_size_uploads_without_being_asked() -> None:
    world = World(size_bytes=1000)
    await world.boot([1])
    for _ in range(50):
        world.append(1, bytes(90))
        await asyncio.sleep(0)
    await until(lambda: world.objects.committed_wal_offset(1) > 4000)
    await world.check()
    await world.storage.close(upload=True)
    assert world.objects.committed_wal_offset(1) == world.media.end
    assert world.objects.ends == {1: 50}


async def test_reaching_the_age_uploads_without_being_asked() -> None:
    world = World(age_ms=20)
    world.clock.monotonic = asyncio.get_running_loop().time  # type: ignore[method-assign]
    await world.boot([1])
    committed = asyncio.Event()
    world.objects.on_commit = lambda commit: committed.set() if commit.objects else None
    world.append(1, b"x")
    async with asyncio.timeout(60):
        await committed.wait()
    await world.storage.close(upload=False)


async def test_uploads_overlap_and_commit_in_order() -> None:
    world = World(size_bytes=200, max_in_flight=3)
    world.store.gate = asyncio.Event()
    await world.boot([1])
    for _ in range(20):
        world.append(1, bytes(90))
    await settle(world)
    await until(lambda: world.storage.stats()["uploads_in_flight"] == 3)
    assert world.objects.commits == []
    world.store.gate.set()
    await world.storage.upload_now()
    await world.check()
    assert len(world.objects.commits) > 5
    await world.storage.close(upload=False)


async def test_a_bucket_that_answers_503_for_long_loses_nothing() -> None:
    world = World(size_bytes=300)
    await world.boot([1, 2])
    world.store.fail_puts, world.objects.fail_prepare, world.objects.fail_before_commit = 40, 10, 10
    rng = random.Random(3)
    for _ in range(40):
        world.append(rng.randrange(1, 3), payload(rng))
    await settle(world)
    await world.storage.upload_now()
    assert world.storage.stats()["upload_retries"] == 60
    assert world.fenced == []
    await world.check()
    for stream in (1, 2):
        assert await world.read_all(stream) == world.acked[stream]
    await world.storage.close(upload=False)


async def test_a_commit_with_unknown_outcome_is_asked_again_and_not_doubled() -> None:
    world = World(size_bytes=300)
    await world.boot([1])
    world.objects.fail_after_commit = 4
    for _ in range(20):
        world.append(1, bytes(60))
    await settle(world)
    await world.storage.upload_now()
    await world.check()
    assert world.objects.ends[1] == 20
    await world.storage.close(upload=False)


@pytest.mark.parametrize("waits", ["upload_now", "send_now"])
async def test_who_waits_for_an_upload_is_told_when_the_storage_is_closed(waits: str) -> None:
    world = World(size_bytes=10_000)
    await world.boot([1])
    world.store.gate = asyncio.Event()
    world.append(1, b"x")
    await settle(world)
    waiting = asyncio.create_task(getattr(world.storage, waits)())
    await until(lambda: bool(world.objects.prepared))
    await world.storage.close(upload=False)
    with pytest.raises(Closed, match="uploads of this term have ended"):
        await waiting


async def test_expired_ids_are_replaced_and_their_objects_put_again() -> None:
    world = World(size_bytes=10_000, prepare_ttl_ms=1000)
    await world.boot([1])
    world.store.gate = asyncio.Event()
    world.append(1, b"x")
    await settle(world)
    upload = asyncio.create_task(world.storage.upload_now())
    await until(lambda: bool(world.objects.prepared))
    world.clock.now_s += 5
    world.store.gate.set()
    await upload
    assert world.objects.commits[-1].objects[0].object_id == 2
    assert world.fenced == []
    await world.check()
    await world.storage.close(upload=False)


async def test_ids_that_the_controller_says_have_expired_are_replaced_however_often() -> None:
    world = World(size_bytes=10_000)
    await world.boot([1])
    left = [REFUSALS + 3]

    def expire(_commit: CommitObjects) -> None:
        if left[0]:
            left[0] -= 1
            world.objects.prepared.clear()  # by the uploader's clock they are young

    world.objects.on_commit = expire
    world.append(1, b"x")
    await settle(world)
    await world.storage.upload_now()
    assert world.objects.ends[1] == 1
    assert world.fenced == []
    await world.check()
    await world.storage.close(upload=False)


async def test_ids_that_expire_while_the_commit_is_retried_are_replaced() -> None:
    world = World(size_bytes=10_000, prepare_ttl_ms=1000)
    await world.boot([1])
    world.append(1, b"x")
    await settle(world)
    world.objects.fail_before_commit = 30
    await world.storage.upload_now()
    assert world.objects.ends[1] == 1
    assert world.fenced == []
    await world.check()
    await world.storage.close(upload=False)


async def test_a_stale_master_epoch_stops_uploads_and_appends_and_acknowledges_nothing() -> None:
    world = World()
    await world.boot([1])
    world.append(1, b"x")
    await settle(world)
    world.objects.master_epoch += 1
    with pytest.raises(Fenced):
        await world.storage.upload_now()
    assert len(world.fenced) == 1
    with pytest.raises(Fenced):
        world.append(1, b"y")
    with pytest.raises(Fenced):
        await world.storage.confirm.wait(world.wal.end_offset + 1)
    with pytest.raises(Fenced):
        await world.storage.writable()
    assert world.media.trims == []
    assert world.objects.commits == []
    await world.storage.close(upload=True)


async def test_a_stream_with_a_gap_is_quarantined_and_the_others_go_on() -> None:
    world = World(size_bytes=150)
    await world.boot([1, 2])
    world.objects.ends[2] = 77  # somebody else committed to it
    for _ in range(10):
        world.append(1, bytes(50))
        world.append(2, bytes(50))
    await settle(world)
    wal_start = world.objects.committed_wal_offset(1)
    await world.storage.upload_now()
    assert [stream for stream, _ in world.quarantined] == [2]
    assert world.fenced == []
    await world.check()
    assert await world.read_all(1) == world.acked[1]
    with pytest.raises(StreamQuarantined):
        world.append(2, b"more")
    with pytest.raises(StreamQuarantined):
        await world.storage.read(2, 0, 10, 100)
    kept = [info.key async for info in world.store.list(f"{CLUSTER}/quarantine/")]
    assert quarantine_key(CLUSTER, 2, world.storage.replica_set_id, wal_start) in kept
    reports = [await inspect_object(world.store, key) for key in kept]
    assert sum(report.records for report in reports) == 10
    for key in kept:
        assert await verify_object(world.store, key) == []
    assert world.storage.stats()["quarantined_streams"] == 1
    await world.storage.close(upload=False)


async def half_set_aside() -> tuple[World, asyncio.Task[None]]:
    """Stream 2 is quarantined, and most of its records are not set aside yet; and the upload that goes on with it."""
    world = World(size_bytes=150, max_in_flight=1)
    await world.boot([1, 2])
    world.objects.ends[2] = 77
    for _ in range(10):
        world.append(1, bytes(50))
        world.append(2, bytes(50))
    await settle(world)
    uploading = asyncio.create_task(world.storage.upload_now())
    await until(lambda: 2 in world.objects.quarantines and bool(world.objects.commits))
    return world, uploading


async def test_a_stream_that_is_released_while_the_rest_of_it_is_set_aside_stays_released() -> None:
    """A bucket that is slow takes minutes for that, and an operator has seen the quarantine by then."""
    world, uploading = await half_set_aside()
    assert world.objects.committed_wal_offset(1) < world.wal.end_offset // 2
    del world.objects.quarantines[2]
    assert world.open(2) == 77
    world.append(2, b"written after the release")
    await uploading
    await settle(world)
    await world.storage.upload_now()
    assert world.objects.quarantines == {} and world.objects.ends[2] == 78
    assert (await world.storage.read(2, 77, 78, 100))[0].payload == b"written after the release"
    kept = [info.key async for info in world.store.list(f"{CLUSTER}/quarantine/")]
    assert sum([(await inspect_object(world.store, key)).records for key in kept]) == 10
    await world.storage.close(upload=False)


async def test_what_was_written_after_a_release_outlives_the_process_beside_what_is_not_set_aside_yet() -> None:
    world, uploading = await half_set_aside()
    world.store.gate = asyncio.Event()  # the bucket takes nothing more
    del world.objects.quarantines[2]
    world.stream_epoch += 1  # the partition has a new leader epoch with its release
    assert world.open(2) == 77
    for number in range(3):
        world.append(2, b"after %d" % number)
    await settle(world)
    await world.crash()
    await asyncio.gather(uploading, return_exceptions=True)
    world.store.gate = None
    await world.boot([1, 2])
    assert world.next_offset(2) == 80 and world.quarantined[1:] == []
    world.append(2, b"after 3")
    await settle(world)
    await world.storage.upload_now()
    assert world.objects.quarantines == {} and world.objects.ends[2] == 81
    records = await world.storage.read(2, 77, 81, 1000)
    assert [bytes(one.payload) for one in records] == [b"after %d" % number for number in range(4)]
    kept = [info.key async for info in world.store.list(f"{CLUSTER}/quarantine/")]
    assert sum([(await inspect_object(world.store, key)).records for key in kept]) == 10
    await world.storage.close(upload=False)


async def test_a_gap_in_the_wal_stops_everything() -> None:
    world = World()
    await world.boot([1])
    world.objects.committed[1] = 5
    world.append(1, b"x")
    await settle(world)
    with pytest.raises(CommitGap, match="committed is 5"):
        await world.storage.upload_now()
    assert len(world.fenced) == 1
    await world.storage.close(upload=False)


async def test_a_stream_deleted_before_or_during_an_upload_is_left_out() -> None:
    world = World(size_bytes=10_000)
    world.owns_stream = lambda stream: stream not in world.objects.deleted
    await world.boot([1, 2, 3])
    for stream in (1, 2, 3):
        world.append(stream, bytes(30))
    await settle(world)
    world.storage.drop_stream(2)
    world.objects.deleted |= {2, 3}  # of 3 nobody has told storage
    await world.storage.upload_now()
    assert world.objects.ends == {1: 1}
    assert world.objects.committed_wal_offset(1) == world.wal.end_offset
    assert world.fenced == []
    await world.check()
    await world.storage.close(upload=False)


async def test_back_pressure_at_the_log_cache_makes_room_by_uploading() -> None:
    world = World(size_bytes=1 << 20)
    world.cache.log_bytes = 20_000
    await world.boot([1])
    waits = 0
    for number in range(200):
        while True:
            try:
                world.append(1, bytes([number]) * 300)
                break
            except Overloaded:
                waits += 1
                await world.storage.writable()
        assert world.storage.stats()["log_cache_bytes"] <= 20_000
    assert waits > 3
    await settle(world)
    assert await world.read_all(1) == world.acked[1]
    await world.storage.close(upload=True)
    await world.check()


async def test_back_pressure_at_the_wal_makes_room_by_uploading() -> None:
    world = World(size_bytes=1 << 20)
    await world.boot([1], max_bytes=2000)
    for number in range(50):
        while True:
            try:
                world.append(1, bytes([number]) * 300)
                break
            except WalFull:
                await world.storage.writable()
    await settle(world)
    assert len(world.acked[1]) == 50
    await world.storage.close(upload=True)
    await world.check()


@pytest.mark.parametrize("faults", [{}, {"fail_after_commit": 2}, {"fail_before_commit": 2, "fail_prepare": 1}])
async def test_a_crash_at_any_step_loses_and_doubles_nothing(faults: dict[str, int]) -> None:
    async def one(steps: int) -> bool:
        world = World(size_bytes=200, max_in_flight=2)
        rng = random.Random(steps)
        await world.boot([1, 2])
        for name, value in faults.items():
            setattr(world.objects, name, value)
        for _ in range(8):
            world.append(rng.randrange(1, 3), payload(rng))

        async def work() -> None:
            await settle(world)
            await world.storage.upload_now()

        upload = asyncio.create_task(work())
        for _ in range(steps):
            await asyncio.sleep(0)
        finished = world.objects.committed_wal_offset(1) == world.wal.end_offset and upload.done()
        await world.crash()
        await world.boot([1, 2])
        for stream in (1, 2):
            acked = world.acked.get(stream, [])
            got = await world.read_all(stream)
            assert got[: len(acked)] == acked, "an acknowledged record is gone"
            world.acked[stream] = got
            world.append(stream, b"after the crash")
        await settle(world)
        await world.storage.upload_now()
        await world.check()
        await world.crash()
        world.media.records.clear()
        world.media.start = world.media.end = 0
        await world.boot([1, 2])
        for stream in (1, 2):
            assert await world.read_all(stream) == world.acked[stream], "the bucket alone must have it all"
        await world.storage.close(upload=False)
        return finished

    finished = [await one(steps) for steps in range(80)]
    assert not any(finished[:10])
    assert all(finished[70:])


async def test_a_wal_and_metadata_that_do_not_meet_are_refused() -> None:
    world = World()
    world.media.start = world.media.end = 500
    with pytest.raises(CorruptData, match="starts at 500"):
        await world.boot()


async def test_ids_at_hand_spare_the_next_upload_the_asking_and_are_used_once_and_not_when_old() -> None:
    world = World(prepare_ttl_ms=10_000)
    await world.boot([1])
    asked: list[int] = []
    prepare = world.objects.prepare_objects

    async def counted(count: int, ttl_ms: int) -> int:
        asked.append(count)
        return await prepare(count, ttl_ms)

    world.objects.prepare_objects = counted  # type: ignore[method-assign]
    await world.storage.reserve_upload()
    await world.storage.reserve_upload()
    assert asked == [2], "two at hand are enough"
    for number in range(4):
        if number == 3:
            await world.storage.reserve_upload()
            world.clock.now_s += 6.0  # over half of the TTL
        world.append(1, b"x")
        await settle(world)
        await world.storage.upload_now()
    assert asked == [2, 1, 2, 1], "two of those at hand, one asked for, two too old, one asked for"
    ids = [one.object_id for commit in world.objects.commits for one in commit.objects]
    assert len(set(ids)) == 4
    await world.check()
    await world.storage.close(upload=False)


async def test_send_now_returns_when_the_commit_is_on_its_way() -> None:
    world = World()
    await world.boot([1])
    world.append(1, b"x")
    await settle(world)
    answer, really = asyncio.Event(), world.objects.commit_objects

    async def late(commit: CommitObjects) -> None:
        await answer.wait()
        await really(commit)

    world.objects.commit_objects = late  # type: ignore[method-assign]
    await world.storage.send_now()
    assert world.storage.committed_offset < world.storage.confirm.value
    answer.set()
    await world.storage.upload_now()
    assert world.storage.committed_offset == world.storage.confirm.value
    await world.check()
    await world.storage.close(upload=False)

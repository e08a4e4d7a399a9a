"""The orphan search deletes what nobody can name, and nothing else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest

from tests.support.compaction_world import CLUSTER, TTL_MS, CompactionWorld
from tests.support.orphan_world import cleaner, metadata
from tests.support.s3_servers import S3Server, new_bucket
from tests.support.storage_world import FastClock, FaultyStore, until
from tidelog.broker.objects.compaction_view import waiting_object
from tidelog.chaos.faulty_s3 import Fault, FaultyS3
from tidelog.controller.model import commands as c
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import CorruptData, Unavailable
from tidelog.storage.bucket.common import StoreRefused
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.s3 import S3ObjectStore
from tidelog.storage.bucket.s3_client import open_client
from tidelog.storage.bucket.store import ObjectInfo
from tidelog.storage.cleaning import orphan_scan
from tidelog.storage.cleaning.orphan_cleaner import CleanRunning
from tidelog.storage.cleaning.orphan_scan import OrphanReport, clean_orphans, find_orphans
from tidelog.storage.objects.key import object_key, quarantine_key
from tidelog.storage.settings import S3Settings

AGE_MS = 10_000


async def clean(world: CompactionWorld, *, dry_run: bool = False, age_ms: int = AGE_MS) -> OrphanReport:
    return await clean_orphans(
        world.store,
        CLUSTER,
        metadata(world),
        now_ms=world.clock.time_ms(),
        orphan_age_ms=age_ms,
        dry_run=dry_run,
    )


async def late_put(world: CompactionWorld) -> int:
    """An id is prepared, given up, deleted and forgotten; then its put arrives."""
    object_id = int(world.metadata.apply(c.PrepareObjects(1, TTL_MS), int))
    await world.pass_time()
    assert object_id not in world.image.objects
    await world.store.put(object_key(CLUSTER, object_id), [b"too late"])
    return object_id


async def test_an_orphan_is_found_and_deleted_once_it_is_old_enough() -> None:
    world = CompactionWorld()
    await world.fill(world.topic("t"), 3)
    orphan = await late_put(world)
    young = await clean(world)
    assert (young.orphans, young.young, young.deleted) == ([], 1, 0)
    world.clock.now_s += AGE_MS / 1000
    dry = await clean(world, dry_run=True)
    assert [one.object_id for one in dry.orphans] == [orphan]
    assert dry.deleted == 0
    assert orphan in await world.in_bucket()
    done = await clean(world)
    assert (done.objects, done.deleted) == (4, 1)
    assert await world.in_bucket() == world.committed()
    assert (await clean(world)).orphans == []
    await world.check()


async def test_whatever_the_metadata_names_in_any_state_is_left_alone() -> None:
    world = CompactionWorld()
    streams = world.topic("t")
    await world.fill(streams, 4)
    await world.settle()  # committed and destroyed
    prepared = int(world.metadata.apply(c.PrepareObjects(1, TTL_MS), int))
    await world.store.put(object_key(CLUSTER, prepared), [b"on its way"])
    world.clock.now_s += AGE_MS / 1000
    before = await world.in_bucket()
    report = await clean(world)
    assert report.orphans == []
    assert await world.in_bucket() == before


async def test_everything_that_is_not_an_object_of_this_cluster_is_left_alone() -> None:
    world = CompactionWorld()
    await world.fill(world.topic("t"), 2)
    others = [
        object_key("another", 1),
        quarantine_key(CLUSTER, 4, 1, 0),
        f"{CLUSTER}/wal/0000/0001",
        f"{CLUSTER}/objects/00/readme",
        f"{CLUSTER}/objects/01/{2:016x}",
    ]
    for key in others:
        await world.store.put(key, [b"x"])
    world.clock.now_s += AGE_MS / 1000
    assert (await clean(world, age_ms=0)).orphans == []
    assert {info.key async for info in world.store.list("")} >= set(others)


async def test_ids_that_were_never_given_out_are_told_and_kept() -> None:
    world = CompactionWorld()
    await world.store.put(object_key(CLUSTER, 10_000), [b"of a newer metadata"])
    world.clock.now_s += AGE_MS / 1000
    report = await clean(world)
    assert (report.unknown_future, report.orphans) == (1, [])
    assert await world.in_bucket() == {10_000}


async def test_an_upload_that_commits_while_the_bucket_is_listed_is_no_orphan() -> None:
    world = CompactionWorld()
    streams = world.topic("t")
    early = int(world.metadata.apply(c.PrepareObjects(1, 1_000), int))
    known = {early}

    async def fence() -> int:
        """What happens between the listing and the comparison."""
        await world.fill(streams, 2)
        known.update(world.image.objects)
        return int(world.metadata.apply(c.PrepareObjects(1, 1), int))

    await world.fill(streams, 2)
    listed = await world.in_bucket()
    blind = metadata(world)._replace(fence=fence, knows=lambda object_id: object_id in known)
    report = await clean_orphans(
        world.store, CLUSTER, blind, now_ms=world.clock.time_ms() + 1, orphan_age_ms=0, dry_run=False
    )
    assert report.objects == len(listed)
    assert report.orphans == []
    await world.check()


async def test_what_the_controller_will_delete_by_itself_is_listed_and_left_to_it() -> None:
    world = CompactionWorld()
    await world.fill(world.topic("t"), 1)
    prepared = int(world.metadata.apply(c.PrepareObjects(1, TTL_MS), int))
    await world.store.put(object_key(CLUSTER, prepared), [b"not committed"])
    ends_ms = world.image.objects[prepared].expires_ms
    known = metadata(world)._replace(waiting=lambda object_id: waiting_object(world.image.objects.get(object_id)))
    report = await find_orphans(world.store, CLUSTER, known, now_ms=world.clock.time_ms(), orphan_age_ms=0)
    [waiting] = report.waiting
    assert (waiting.object_id, waiting.state, waiting.until_ms) == (prepared, "prepared", ends_ms)
    assert report.orphans == []
    done = await clean(world, age_ms=0)
    assert done.deleted == 0
    assert prepared in await world.in_bucket()


class Unlisted(FaultyStore):
    """A bucket that refuses to be listed now and then."""

    def __init__(self, clock: FastClock) -> None:
        super().__init__(clock)
        self.fail_lists = 0

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        await asyncio.sleep(0)
        if self.fail_lists:
            self.fail_lists -= 1
            raise Unavailable("503 on purpose")
        async for info in super().list(prefix, start_after=start_after):
            yield info


async def test_it_searches_by_itself_only_while_it_is_active_and_survives_a_bucket_that_fails() -> None:
    store = Unlisted(FastClock())
    world = CompactionWorld(store)
    await world.fill(world.topic("t"), 1)
    orphan = await late_put(world)
    world.clock.now_s += 10
    active: list[bool] = []
    mine = cleaner(world, lambda: bool(active), orphan_age_ms=1000, interval_ms=100)
    mine.start()
    for _ in range(50):
        await asyncio.sleep(0)
    assert (mine.searches, mine.last_error) == (0, "")
    active.append(True)
    store.fail_lists = 1
    async with asyncio.timeout(30):
        while store.fail_lists or not mine.deleted:  # noqa: ASYNC110  # waiting moves this clock
            await asyncio.sleep(0)
    assert orphan not in await world.in_bucket()
    assert mine.figures() == {"searches": mine.searches, "deletes": 1, "aborts": 0}
    await mine.close()


async def test_one_search_at_a_time() -> None:
    world = CompactionWorld(Unlisted(FastClock()))
    mine = cleaner(world)
    first, second = await asyncio.gather(mine.clean(), mine.clean(), return_exceptions=True)
    assert isinstance(first, OrphanReport)
    assert isinstance(second, CleanRunning)
    assert isinstance(await mine.clean(), OrphanReport)


@pytest.mark.servers("moto")
async def test_multipart_uploads_that_a_crash_interrupted_are_found_and_aborted(moto_server: S3Server) -> None:
    settings = S3Settings(
        endpoint=moto_server.endpoint,
        bucket=new_bucket(),
        prefix="shared/bucket",
        access_key_id=moto_server.access_key_id,
        secret_access_key=moto_server.secret_access_key,
    )
    backend = S3ObjectStore(settings, SystemClock(), random.Random(1))
    store = GuardedObjectStore(backend, PriorityGate(4), SystemClock())
    await store.probe()
    world = CompactionWorld(store)
    mine, other = object_key(CLUSTER, 5), object_key("another-cluster", 5)
    async with AsyncExitStack() as resources:
        client = await open_client(settings, resources)
        for key in (mine, other):
            await client.create_multipart_upload(Bucket=settings.bucket, Key=f"{settings.prefix}/{key}")
        now_ms = max(one.started_ms for one in await store.unfinished(""))  # moto has a date of its own

        async def search(later_ms: int, *, dry_run: bool) -> OrphanReport:
            return await clean_orphans(
                store, CLUSTER, metadata(world), now_ms=now_ms + later_ms, orphan_age_ms=AGE_MS, dry_run=dry_run
            )

        assert (await search(0, dry_run=False)).unfinished == []  # somebody may be carrying it out
        found = await search(2 * AGE_MS, dry_run=True)
        assert [one.key for one in found.unfinished] == [mine]
        assert found.aborted == 0
        done = await search(2 * AGE_MS, dry_run=False)
        assert done.aborted == 1
        await store.abort(found.unfinished[0])  # it is gone already: that is success
        assert (await search(2 * AGE_MS, dry_run=True)).unfinished == []
        left = await client.list_multipart_uploads(Bucket=settings.bucket)
        assert [one["Key"] for one in left["Uploads"]] == [f"{settings.prefix}/{other}"]
    await store.close()


@pytest.mark.servers("moto")
async def test_a_policy_that_forbids_to_list_uploads_is_told_and_the_search_goes_on(moto_server: S3Server) -> None:
    async with FaultyS3(moto_server) as proxy:
        settings = S3Settings(
            endpoint=proxy.server.endpoint,
            bucket=new_bucket(),
            access_key_id=moto_server.access_key_id,
            secret_access_key=moto_server.secret_access_key,
        )
        store = S3ObjectStore(settings, SystemClock(), random.Random(1))
        await store.probe()
        world = CompactionWorld(store)
        orphan = await late_put(world)
        proxy.fault = lambda seen: Fault(status=403, code="AccessDenied") if "uploads" in seen.query else None
        now_ms = SystemClock().time_ms() + 2 * AGE_MS
        report = await clean_orphans(store, CLUSTER, metadata(world), now_ms=now_ms, orphan_age_ms=AGE_MS)
        assert "refused" in report.unfinished_problem
        assert [one.object_id for one in report.orphans] == [orphan]
        assert report.deleted == 1
        await store.close()


@pytest.mark.servers("moto")
async def test_a_policy_that_forbids_to_abort_uploads_is_told_and_the_search_goes_on(moto_server: S3Server) -> None:
    """With the right to list them, and without the one to abort them, no orphan was ever deleted."""
    async with FaultyS3(moto_server) as proxy:
        settings = S3Settings(
            endpoint=proxy.server.endpoint,
            bucket=new_bucket(),
            access_key_id=moto_server.access_key_id,
            secret_access_key=moto_server.secret_access_key,
        )
        store = S3ObjectStore(settings, SystemClock(), random.Random(1))
        await store.probe()
        world = CompactionWorld(store)
        orphan = await late_put(world)
        unfinished = await store.begin_upload(object_key(CLUSTER, 5))
        proxy.fault = lambda seen: Fault(status=403, code="AccessDenied") if "uploadId" in seen.query else None
        [listed] = await store.unfinished("")
        now_ms = max(SystemClock().time_ms(), listed.started_ms) + 2 * AGE_MS  # moto has a date of its own
        report = await clean_orphans(store, CLUSTER, metadata(world), now_ms=now_ms, orphan_age_ms=AGE_MS)
        assert [one.key for one in report.unfinished] == [unfinished.key]
        assert "abort upload was refused" in report.unfinished_problem
        assert (report.aborted, report.deleted) == (0, 1)
        assert orphan not in await world.in_bucket()
        await store.close()


class Locking(FaultyStore):
    """A bucket that refuses to delete one key, and deletes the others of a batch."""

    def __init__(self, clock: FastClock) -> None:
        super().__init__(clock)
        self.locked = ""

    async def delete(self, keys: Sequence[str]) -> None:
        await super().delete([key for key in keys if key != self.locked])
        if self.locked in keys:
            raise StoreRefused(f"delete of {self.locked} was refused")


async def test_an_orphan_that_the_bucket_refuses_to_delete_holds_up_no_other_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orphan_scan, "MAX_BATCH", 2)
    store = Locking(FastClock())
    world = CompactionWorld(store)
    orphans = sorted([await late_put(world) for _ in range(6)])
    store.locked = object_key(CLUSTER, orphans[0])
    world.clock.now_s += AGE_MS / 1000
    with pytest.raises(StoreRefused):
        await clean(world)
    assert await world.in_bucket() == {orphans[0]}


async def test_a_search_that_failed_is_not_told_of_when_another_process_searches() -> None:
    """Or `tidelog status` would show it for as long as the process lives."""
    store = Unlisted(FastClock())
    world = CompactionWorld(store)
    is_active = True
    mine = cleaner(world, lambda: is_active, interval_ms=100)
    store.fail_lists = 1_000_000
    mine.start()
    await until(lambda: bool(mine.last_error))
    is_active = False
    await until(lambda: not mine.last_error)
    await mine.close()


async def test_an_image_that_lacks_live_objects_deletes_none_of_them() -> None:
    world = CompactionWorld()
    await world.fill(world.topic("t"), 6)
    live = await world.in_bucket()
    orphan = await late_put(world)
    world.clock.now_s += AGE_MS / 1000
    partial = metadata(world)._replace(knows=lambda object_id: object_id in sorted(live)[:2])
    with pytest.raises(CorruptData, match="4 objects"):
        await clean_orphans(world.store, CLUSTER, partial, now_ms=world.clock.time_ms(), orphan_age_ms=0)
    assert await world.in_bucket() >= live
    assert (await clean(world)).deleted == 1
    assert orphan not in await world.in_bucket()


async def test_a_dry_run_does_not_list_as_orphans_what_the_controller_knows() -> None:
    world = CompactionWorld()
    await world.fill(world.topic("t"), 2)
    world.clock.now_s += AGE_MS / 1000
    empty = metadata(world)._replace(knows=lambda object_id: False)
    with pytest.raises(CorruptData, match="2 objects"):
        await clean_orphans(world.store, CLUSTER, empty, now_ms=world.clock.time_ms(), orphan_age_ms=0, dry_run=True)


async def test_the_controller_is_asked_before_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphan_scan, "MAX_BATCH", 2)
    world = CompactionWorld()
    orphans = sorted([await late_put(world) for _ in range(5)])
    answers = [orphans[:2], orphans[2:3]]  # the fourth is known when the second batch is due

    async def unknown(object_ids: Sequence[int]) -> Sequence[int]:
        return answers.pop(0)

    asked = metadata(world)._replace(unknown=unknown)
    report = OrphanReport()
    now_ms = world.clock.time_ms() + 1
    with pytest.raises(CorruptData, match=f"the first is {orphans[3]}"):
        await clean_orphans(world.store, CLUSTER, asked, now_ms=now_ms, orphan_age_ms=0, report=report)
    assert report.deleted == 2
    assert await world.in_bucket() == set(orphans[2:])


async def test_nothing_is_deleted_while_no_active_controller_answers() -> None:
    world = CompactionWorld()
    orphan = await late_put(world)

    async def unknown(object_ids: Sequence[int]) -> Sequence[int]:
        raise Unavailable("no controller is active")

    asked = metadata(world)._replace(unknown=unknown)
    with pytest.raises(Unavailable):
        await clean_orphans(world.store, CLUSTER, asked, now_ms=world.clock.time_ms() + 1, orphan_age_ms=0)
    assert orphan in await world.in_bucket()

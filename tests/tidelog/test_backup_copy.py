"""Copying a cluster while it changes, and over a bucket that lies (`tidelog.process.backup`)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.controller.controller_helpers import TOPIC, Driver, until
from tests.e2e.backends import s3_flags
from tests.support.cli import Cli
from tests.support.s3_servers import S3Server
from tidelog.cli.options import load_config
from tidelog.controller.model import commands as c
from tidelog.controller.model.bucket_state import BucketState, backup_key, encode_state, owner_key, state_key
from tidelog.controller.rebuild.source import claim
from tidelog.process.backup import BackupReport, back_up, restore
from tidelog.process.data_dir import UP_LOCK_FILE, WrongDataDirectory, lock_file
from tidelog.process.rebuild import UNFINISHED_FILE, prepare
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import CorruptData, InvalidInput, NotFound, Unavailable
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.commits import NewObject, ObjectKind, pack_ranges
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.writer import build_object
from tidelog.storage.records import StreamEntry

CLUSTER = "cluster"
CLOCK = SystemClock()
Copying = asyncio.Task[BackupReport]


class Bucket(MemoryObjectStore):
    """A source whose answers a test can change."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.epoch = self.driver.broker()
        [first] = self.driver.topic()
        self.stream = first + 1
        self.driver.run(c.OpenStreams(0, self.epoch, ((self.stream, self.epoch),)))
        self.end = 0
        self.short_by = 0
        self.held: dict[str, asyncio.Event] = {}
        """Objects that are given out only when a test lets them go, from when it says so."""
        self.asked: set[str] = set()

    async def upload(self) -> str:
        """Commit one more object; return its key."""
        object_id = self.driver.prepare()
        built = build_object(
            object_id=object_id,
            kind=ObjectKind.STREAM_SET,
            cluster_id=CLUSTER,
            created_ms=0,
            parts=[(self.stream, [StreamEntry(self.end, 1, b"x" * 1000)])],
            block_bytes=4096,
        )
        await self.put(object_key(CLUSTER, object_id), built.body)
        ranges = pack_ranges([(self.stream, self.end, self.end + 1)])
        new = NewObject(object_id, int(ObjectKind.STREAM_SET), built.size, ranges)
        self.driver.commit(self.epoch, (100 * self.end, 100 * self.end + 100), new)
        self.end += 1
        return object_key(CLUSTER, object_id)

    async def write_state(self, generation: int = 1) -> str:
        """Write the metadata of now; return its key."""
        state = self.driver.state
        key = state_key(CLUSTER, generation, state.applied_index)
        body = BucketState(CLUSTER, generation, state.applied_index, state.version, 1, 0, False, state.dump())
        await self.put(key, [encode_state(body)])
        return key

    def hold(self, key: str) -> asyncio.Event:
        """Give an object out only after the returned event, to whoever asks for it from now until `hold` of another."""
        self.held, self.asked = {key: asyncio.Event()}, set()
        return self.held[key]

    async def get(self, key: str) -> bytes:
        self.asked.add(key)
        if key in self.held:
            await self.held[key].wait()
        data = await super().get(key)
        return data[: len(data) - self.short_by] if "/objects/" in key else data


async def keys(store: MemoryObjectStore | LocalObjectStore, part: str) -> set[str]:
    return {info.key async for info in store.list("") if part in info.key}


async def test_only_what_is_new_is_copied_and_only_what_no_kept_state_names_is_removed(tmp_path: Path) -> None:
    source, target = Bucket(), LocalObjectStore(tmp_path / "backup")
    first = await source.upload()
    states = [await source.write_state()]
    report = await back_up(source, target, CLUSTER, CLOCK, kept=2)
    assert (report.objects, report.copied, report.removed) == (1, 1, 0)
    second = await source.upload()
    states.append(await source.write_state())
    report = await back_up(source, target, CLUSTER, CLOCK, kept=2)
    assert (report.objects, report.copied, report.removed) == (2, 1, 0)
    source.driver.run(c.DeleteTopic(TOPIC))
    while source.driver.state.tables.index.live_slices:
        source.driver.run(c.Barrier())
    states.append(await source.write_state())
    report = await back_up(source, target, CLUSTER, CLOCK, kept=2)
    assert (report.objects, report.copied, report.removed) == (0, 0, 0)
    assert await keys(target, "/objects/") == {first, second}
    assert await keys(target, "/state-") == set(states[1:])
    report = await back_up(source, target, CLUSTER, CLOCK, kept=1)
    assert report.removed == 2 and await keys(target, "/objects/") == set()
    await target.close()


async def test_an_object_that_goes_during_the_copy_is_looked_for_in_newer_metadata(tmp_path: Path) -> None:
    source, target = Bucket(), LocalObjectStore(tmp_path / "backup")
    first = await source.upload()
    second = await source.upload()
    old = await source.write_state()
    await source.delete([second])
    with pytest.raises(CorruptData, match=f"1 objects .* the first being {second}"):
        await back_up(source, target, CLUSTER, CLOCK, kept=1, wait_s=0.0)
    assert await keys(target, "/state-") == set(), "what is not whole has no state"

    class Late(SystemClock):
        async def sleep(self, seconds: float) -> None:
            source.driver.run(c.DeleteTopic(TOPIC))
            while source.driver.state.tables.index.live_slices:
                source.driver.run(c.Barrier())
            await source.write_state()

    report = await back_up(source, target, CLUSTER, Late(), kept=1)
    assert report.objects == 0 and report.removed == 1
    assert old not in await keys(target, "/state-")
    assert first not in await keys(target, "/objects/")
    await target.close()


async def test_a_short_answer_is_not_copied_and_a_second_attempt_goes_on(tmp_path: Path) -> None:
    source, target = Bucket(), LocalObjectStore(tmp_path / "backup")
    key = await source.upload()
    await source.write_state()
    source.short_by = 1
    with pytest.raises(CorruptData, match=key):
        await back_up(source, target, CLUSTER, CLOCK, kept=1)
    assert await keys(target, "/objects/") == set()
    source.short_by = 0
    assert (await back_up(source, target, CLUSTER, CLOCK, kept=1)).copied == 1
    await target.close()


class Place(MemoryObjectStore):
    """Where a backup is."""

    @property
    def url(self) -> str:
        return "memory:backup"


async def two_at_once(source: Bucket, target: Place) -> tuple[Copying, Copying, list[asyncio.Event]]:
    """Two backups to one place, each on its way: one of an object, the next one of newer metadata with two more."""
    keys_of = [await source.upload()]
    await source.write_state()
    events = [source.hold(keys_of[0])]
    older = asyncio.create_task(back_up(source, target, CLUSTER, CLOCK, kept=1))
    await until(lambda: keys_of[0] in source.asked)
    keys_of += [await source.upload(), await source.upload()]
    await source.write_state()
    events.append(source.hold(keys_of[2]))
    newer = asyncio.create_task(back_up(source, target, CLUSTER, CLOCK, kept=1))
    await until(lambda: keys_of[2] in source.asked)
    await until(lambda: " ".join(target.keys()).count("/objects/") == 2)
    return older, newer, events


@pytest.mark.parametrize("older_first", [True, False])
async def test_of_two_backups_at_the_same_time_the_newer_one_is_whole(older_first: bool, tmp_path: Path) -> None:
    source, target, new = Bucket(), Place(), LocalObjectStore(tmp_path / "new")
    older, newer, (of_older, of_newer) = await two_at_once(source, target)
    if older_first:
        of_older.set()
        await older
        of_newer.set()
        await newer
    else:
        of_newer.set()
        await newer
        of_older.set()
        with pytest.raises(Unavailable, match="newer metadata"):
            await older
        assert len(await keys(target, "/state-")) == 1
    assert (await restore(target, new, CLUSTER)).copied == 3
    assert (await back_up(source, target, CLUSTER, CLOCK, kept=1)).copied == 0
    await new.close()


async def test_a_backup_of_a_rebuilt_cluster_is_not_pruned_by_one_of_the_old_cluster(tmp_path: Path) -> None:
    """Nor is the old cluster's new backup deleted at once because the other's are of a later generation."""
    old, rebuilt, target = Bucket(), Bucket(), LocalObjectStore(tmp_path / "backup")
    await old.upload()
    await old.write_state()
    await back_up(old, target, CLUSTER, CLOCK, kept=1)
    await rebuilt.upload()
    await rebuilt.write_state(generation=2)
    await back_up(rebuilt, target, CLUSTER, CLOCK, kept=1)
    before = await keys(target, "")
    await old.upload()
    await old.write_state()
    with pytest.raises(InvalidInput, match="generation 2"):
        await back_up(old, target, CLUSTER, CLOCK, kept=1)
    assert await keys(target, "") == before
    await target.close()


async def test_a_cluster_is_restored_only_where_it_is_not(tmp_path: Path) -> None:
    source = Bucket()
    backup, new = LocalObjectStore(tmp_path / "backup"), LocalObjectStore(tmp_path / "new")
    key = await source.upload()
    state = await source.write_state()
    await back_up(source, backup, CLUSTER, CLOCK, kept=1)
    assert (await restore(backup, new, CLUSTER)).copied == 1
    assert {key, state} == await keys(new, "")
    with pytest.raises(InvalidInput, match="not a backup"):
        await back_up(source, new, CLUSTER, CLOCK, kept=1)
    await new.put(owner_key(CLUSTER), [b"a controller is active"])
    with pytest.raises(InvalidInput, match="already holds"):
        await restore(backup, new, CLUSTER)
    with pytest.raises(InvalidInput, match="already holds"):
        await restore(backup, backup, CLUSTER)
    for store in (backup, new):
        await store.close()


@pytest.mark.parametrize("what", ["missing", "short", "damaged"])
async def test_a_backup_that_is_not_whole_is_refused_with_a_way_to_what_is_left(tmp_path: Path, what: str) -> None:
    """`rebuild` takes it; the hint of a backup names commands for the cluster, which may not exist any more."""
    source, place, data = Bucket(), LocalObjectStore(tmp_path / "place"), tmp_path / "data"
    key = await source.upload()
    await source.write_state()
    await back_up(source, place, CLUSTER, CLOCK, kept=1)
    if what == "missing":
        await place.delete([key])
    else:
        body = bytearray(await place.get(key))
        body[len(body) // 2] ^= 1
        await place.put(key, [bytes(body[:-1] if what == "short" else body)])
    with pytest.raises(CorruptData, match=key) as refused:
        await restore(place, LocalObjectStore(tmp_path / "other"), CLUSTER)
    assert "tidelog cluster rebuild" in (refused.value.hint or "")
    copy = LocalObjectStore(data / "bucket")
    async for info in place.list(""):
        if info.key != backup_key(CLUSTER):
            await copy.put(info.key, [await place.get(info.key)])
    left = await prepare(load_config(None, (), node__data_dir=str(data)).config, copy, 1, "")
    assert left.report.objects == (0 if what == "missing" else 1)
    for store in (place, copy):
        await store.close()


async def test_a_restore_that_was_cut_off_at_its_end_goes_on_also_with_a_newer_backup(tmp_path: Path) -> None:
    source = Bucket()
    backup, new = LocalObjectStore(tmp_path / "backup"), LocalObjectStore(tmp_path / "new")
    first = await source.upload()
    await source.write_state()
    await back_up(source, backup, CLUSTER, CLOCK, kept=1)
    await restore(backup, new, CLUSTER)
    assert (await restore(backup, new, CLUSTER)).copied == 0
    await claim(new, CLUSTER, 2, "by this restore, or by another one")
    with pytest.raises(InvalidInput, match="claim-00000002"):
        await restore(backup, new, CLUSTER)
    second = await source.upload()
    newest = await source.write_state()
    await back_up(source, backup, CLUSTER, CLOCK, kept=1)
    assert (await restore(backup, new, CLUSTER, had_claimed=True)).copied == 1
    assert {first, second, newest} <= await keys(new, "")
    older = LocalObjectStore(tmp_path / "older")
    source.driver = Bucket().driver
    await source.write_state()
    await source.delete([newest])
    await back_up(source, older, CLUSTER, CLOCK, kept=1)
    with pytest.raises(InvalidInput, match="already holds"):
        await restore(older, new, CLUSTER, had_claimed=True)
    for store in (backup, new, older):
        await store.close()


async def test_a_restore_takes_nothing_from_a_cluster_that_started_there_meanwhile(tmp_path: Path) -> None:
    backup, new = Bucket(), LocalObjectStore(tmp_path / "new")
    key = await backup.upload()
    await backup.write_state()
    let_go = backup.hold(key)
    slow: Copying = asyncio.create_task(restore(backup, new, CLUSTER))
    await until(lambda: key in backup.asked)
    await new.put(owner_key(CLUSTER), [b"a controller is active"])
    let_go.set()
    with pytest.raises(InvalidInput, match="already holds"):
        await slow
    assert not await keys(new, "/state-")
    await new.close()


async def test_a_cluster_is_not_copied_over_itself(tmp_path: Path) -> None:
    source = LocalObjectStore(tmp_path / "bucket")
    with pytest.raises(InvalidInput, match="over its source"):
        await back_up(source, source, CLUSTER, CLOCK, kept=1)
    assert not await keys(source, "")


async def test_no_cluster_is_rebuilt_over_a_backup(tmp_path: Path) -> None:
    """It would delete from its only copy; to look at what a backup holds is another thing."""
    source, target = Bucket(), LocalObjectStore(tmp_path / "backup")
    await source.upload()
    await source.write_state()
    await back_up(source, target, CLUSTER, CLOCK, kept=1)
    config = load_config(None, (), node__data_dir=str(tmp_path / "data")).config
    with pytest.raises(InvalidInput, match=f"is a backup of cluster {CLUSTER}") as refused:
        await prepare(config, target, 1, CLUSTER)
    assert "tidelog cluster restore" in (refused.value.hint or "")
    assert (await prepare(config, target, 1, CLUSTER, of_backup=True)).report.cluster_id == CLUSTER
    assert (await prepare(config, source, 1, CLUSTER)).report.cluster_id == CLUSTER


@pytest.mark.processes
@pytest.mark.parametrize("name", ["cluster.json", "identity.json"])
@pytest.mark.parametrize("place", ["", "backups"])
def test_a_backup_into_a_data_directory_is_refused(tmp_path: Path, name: str, place: str) -> None:
    """It would be lost with that directory."""
    cluster = tmp_path / "cluster"
    bucket = cluster / "bucket"
    bucket.mkdir(parents=True)
    (cluster / name).write_text("{}")
    refused = Cli()("cluster", "backup", "--data-dir", cluster, "--to", cluster / place, code=InvalidInput.exit_code)
    assert f"{cluster / name} exists" in refused.err and "give --to another place" in refused.err
    assert sorted(each.name for each in cluster.iterdir()) == ["bucket", name]
    assert not list(bucket.iterdir())


@pytest.mark.processes
def test_a_directory_that_is_no_backup_is_left_as_it_is(tmp_path: Path) -> None:
    """Such as /tmp: others use it."""
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(0o1777)
    (place / "of others").touch()
    asked = Cli()("cluster", "restore", "--from", place, "--data-dir", tmp_path / "new", "--dry-run", code=3)
    assert "holds no metadata" in asked.err and "--from" in asked.err
    assert [each.name for each in place.iterdir()] == ["of others"]
    assert place.stat().st_mode & 0o7777 == 0o1777


async def test_no_backup_of_a_cluster_that_does_not_exist_is_begun(tmp_path: Path) -> None:
    source, target = Bucket(), LocalObjectStore(tmp_path / "place")
    await source.write_state()
    with pytest.raises(NotFound, match="'another'"):
        await back_up(source, target, "another", CLOCK, kept=1)
    assert not await keys(target, "")
    await target.put(backup_key(CLUSTER), [b"of a backup that was cut off"])
    config = load_config(None, (), node__data_dir=str(tmp_path / "data")).config
    with pytest.raises(NotFound) as refused:
        await prepare(config, target, 1, "", of_backup=True)
    assert "cut off" in (refused.value.hint or "") and "--from" in (refused.value.hint or "")
    await target.close()


async def test_a_place_beside_other_things_keeps_its_access(tmp_path: Path) -> None:
    source, place = Bucket(), tmp_path / "place"
    await source.upload()
    await source.write_state()
    place.mkdir()
    place.chmod(0o1777)
    target = LocalObjectStore(place, is_place=True)
    assert await keys(target, "") == set() and not list(place.iterdir())
    await back_up(source, target, CLUSTER, CLOCK, kept=1)
    assert place.stat().st_mode & 0o7777 == 0o1777
    assert (place / CLUSTER).stat().st_mode & 0o077 == 0
    await target.close()


@pytest.mark.processes
async def test_a_restore_that_could_not_write_the_data_directory_goes_on_as_it_says(tmp_path: Path) -> None:
    source, place, new = Bucket(), tmp_path / "backup", tmp_path / "new"
    backup = LocalObjectStore(place)
    await source.upload()
    await source.write_state()
    await back_up(source, backup, CLUSTER, CLOCK, kept=1)
    await backup.close()
    command = ("cluster", "restore", "--from", place, "--data-dir", new, "--yes")
    lock = lock_file(new, UP_LOCK_FILE)
    try:
        await asyncio.to_thread(Cli(), *command, code=WrongDataDirectory.exit_code)
    finally:
        os.close(lock)
    (new / UNFINISHED_FILE).touch()
    await claim(there := LocalObjectStore(new / "bucket"), CLUSTER, 2, "and then it was killed")
    await there.close()
    await asyncio.to_thread(Cli(), *command)
    assert (new / "controller").is_dir() and not (new / UNFINISHED_FILE).exists()


async def test_objects_without_metadata_are_no_place_for_a_backup(tmp_path: Path) -> None:
    source, target = Bucket(), LocalObjectStore(tmp_path / "backup")
    await source.upload()
    await source.write_state()
    await target.put(object_key(CLUSTER, 77), [b"of a cluster of an older version"])
    with pytest.raises(InvalidInput, match="holds objects of the cluster"):
        await back_up(source, target, CLUSTER, CLOCK, kept=1)
    assert await keys(target, "") == {object_key(CLUSTER, 77)}
    await target.close()


@pytest.mark.processes
async def test_a_dry_run_says_that_a_restore_would_be_refused_and_makes_nothing(
    tmp_path: Path, moto_server: S3Server
) -> None:
    source, place = Bucket(), tmp_path / "backup"
    backup = LocalObjectStore(place)
    await source.upload()
    await source.write_state()
    await back_up(source, backup, CLUSTER, CLOCK, kept=1)
    await backup.close()
    flags, new = s3_flags(moto_server), tmp_path / "new"
    name = flags[flags.index("--bucket") + 1]
    command: tuple[str | Path, ...] = ("cluster", "restore", "--data-dir", new, *flags)
    missing = ("--from-s3-endpoint", moto_server.endpoint, "--from-bucket", name, "--dry-run")

    def run(*more: str | Path, code: int = 0) -> str:
        return Cli()(*command, *more, code=code).err

    for _ in range(2):
        text = await asyncio.to_thread(run, *missing, code=NotFound.exit_code)
        assert f"bucket {name} does not exist" in text and "check --from-bucket" in text
        await asyncio.to_thread(run, "--from", place, "--dry-run")
        assert not new.exists() or not list(new.iterdir())
    await asyncio.to_thread(run, "--from", place, "--yes")
    command = ("cluster", "restore", "--data-dir", tmp_path / "other", *flags)
    text = await asyncio.to_thread(run, "--from", place, "--dry-run", code=InvalidInput.exit_code)
    assert f"already holds cluster {CLUSTER}" in text

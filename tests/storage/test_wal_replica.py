"""A replica of a WAL among several: promises, receiving, truncation, starting over, reading for sending.

What must hold on disk and in memory is tested on both; what is about files, on the disk.
"""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.storage.faulty_disk import FaultyDisk
from tests.storage.wal_harness import SEGMENT, append, durable, make_wal, recovered, small, until
from tests.storage.wal_replicas import MasterLog, line_of, ship
from tests.storage.wal_s3_world import FakeClock
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import CorruptData, Fenced, InvalidInput, NotFound
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import ReplicatedWal, WalFull, WalRecord, WalRecordType, replicated
from tidelog.storage.wal.disk.inspect import inspect, verify
from tidelog.storage.wal.disk.wal import DiskWal
from tidelog.storage.wal.epochs import EPOCH_FILE, NO_MARKS, NOTHING_OWN, decode_epoch_file, decode_marks
from tidelog.storage.wal.memory import MemoryWal
from tidelog.storage.wal.s3.wal import S3Wal

MAX_BYTES = 20 * SEGMENT


class Opened:
    """WALs of one kind in one directory, closed at the end."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self._open: list[tuple[ReplicatedWal, FileDisk | None]] = []

    async def wal(self, name: str) -> ReplicatedWal:
        if self.kind == "memory":
            wal: ReplicatedWal = MemoryWal(small(max_bytes=MAX_BYTES))
            await wal.recover(lambda _record: None)
            self._open.append((wal, None))
            return wal
        disk = FileDisk(self.path / name)
        wal = make_wal(disk, max_bytes=MAX_BYTES, flush="async" if self.kind == "async" else "sync")
        await wal.recover(lambda _record: None)
        await wal.writable()  # a file is ready
        self._open.append((wal, disk))
        return wal

    async def close(self) -> None:
        for wal, disk in self._open:
            await wal.close()
            if disk is not None:
                await disk.close()
        self._open.clear()


@pytest.fixture(params=["disk", "async", "memory"])
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opened]:
    them = Opened(request.param, tmp_path)
    yield them
    await them.close()


async def write(wal: ReplicatedWal, count: int, size: int = 1000, base: int = 0) -> None:
    for i in range(base, base + count):
        await wal.writable(size)
        wal.append(StreamAppend(1, 1, i, 1, [bytes([i % 251]) * size]))
    await durable(wal)


async def contents(wal: ReplicatedWal) -> bytes:
    parts, at = [], wal.start_offset
    while (raw := await wal.read_raw(at, 5000)) is not None:
        parts += [bytes(buffer) for buffer in raw.buffers]
        assert sum(map(len, raw.buffers)) == raw.end_offset - raw.offset and raw.offset == at
        at = raw.end_offset
    assert at == wal.durable_offset
    return b"".join(parts)


async def test_a_follower_gets_the_same_bytes_at_the_same_offsets(opened: Opened) -> None:
    master, follower = await opened.wal("master"), await opened.wal("follower")
    durables: list[int] = []
    follower.set_on_durable(durables.append)
    for epoch in (2, 5):
        await master.begin_epoch(epoch)
        await write(master, 25, base=epoch * 25)
    seen = await ship(master, follower)
    await durable(follower)
    assert durables[-1] == follower.end_offset == master.end_offset
    assert await contents(follower) == await contents(master)
    assert follower.epoch_history == master.epoch_history
    assert [record.base_offset for record in seen if record.count] == [*range(50, 75), *range(125, 150)]
    assert follower.promised_epoch == 5 and follower.master_epoch == -1


async def test_a_sent_batch_is_of_one_epoch_and_says_where_it_begins(opened: Opened) -> None:
    master = await opened.wal("master")
    await master.begin_epoch(1)
    await write(master, 2, 100)
    second = master.end_offset
    await master.begin_epoch(7)
    await write(master, 1, 100)
    first = await master.read_raw(0, 1 << 20)
    assert first is not None and (first.epoch, first.epoch_start, first.end_offset) == (1, 0, second)
    then = await master.read_raw(second, 1 << 20)
    assert then is not None and (then.epoch, then.epoch_start, then.end_offset) == (7, second, master.end_offset)
    one = await master.read_raw(second, 1)
    assert one is not None and one.end_offset == second + 64
    assert await master.read_raw(master.end_offset, 100) is None
    await master.trim(second)
    with pytest.raises(NotFound):
        await master.read_raw(64, 100)
    rest = await master.read_raw(master.start_offset, 1 << 20)
    assert rest is not None and rest.offset == second, "a log starts at a record boundary"


async def test_a_promise_refuses_every_older_master(opened: Opened) -> None:
    wal = await opened.wal("one")
    log = MasterLog()
    log.begin(3)
    _, raw, epoch, start = log.batch(0, 9)
    await wal.promise(5)
    await wal.promise(5)
    with pytest.raises(Fenced):
        await wal.receive(0, epoch, start, raw, master_epoch=4)
    with pytest.raises(Fenced):
        await wal.promise(4)
    with pytest.raises(Fenced):
        await wal.begin_epoch(4)
    with pytest.raises(Fenced):
        await wal.truncate(0, master_epoch=4)
    with pytest.raises(Fenced):
        await wal.restart_at(0, master_epoch=4)
    assert wal.end_offset == 0 and wal.promised_epoch == 5
    # The promise is about who sends. The bytes of an older epoch come from the new master, too.
    await wal.receive(0, epoch, start, raw, master_epoch=5)
    await durable(wal)
    await wal.begin_epoch(5)
    assert wal.master_epoch == 5


async def test_a_promise_ends_the_mastership_of_an_older_epoch(opened: Opened) -> None:
    wal = await opened.wal("one")
    await wal.begin_epoch(3)
    wal.append(StreamAppend(1, 1, 0, 1, [b"x"]))
    await wal.promise(3)
    assert wal.master_epoch == 3
    wal.append(StreamAppend(1, 1, 1, 1, [b"y"]))
    end = wal.end_offset
    with pytest.raises(InvalidInput, match="master"):
        await wal.truncate(end, master_epoch=9)
    await wal.promise(9)
    assert (wal.master_epoch, wal.durable_offset) == (-1, end)
    with pytest.raises(Fenced):
        wal.append(StreamAppend(1, 1, 2, 1, [b"z"]))
    assert wal.end_offset == end


async def test_what_does_not_continue_the_log_is_refused(opened: Opened) -> None:
    wal = await opened.wal("one")
    log = MasterLog()
    log.begin(2)
    log.write(0, b"a")
    log.write(1, b"b")
    _, raw, epoch, start = log.batch(0, 2)
    for arguments in ((64, epoch, start), (0, epoch, 1), (0, epoch, -1)):
        with pytest.raises(InvalidInput):
            await wal.receive(*arguments, raw, master_epoch=2)
    with pytest.raises(InvalidInput):
        await wal.receive(0, epoch, start, raw, master_epoch=1)
    with pytest.raises(CorruptData, match="epoch"):
        await wal.receive(0, 1, 0, raw, master_epoch=2)
    await wal.receive(0, epoch, start, raw, master_epoch=2)
    at = wal.end_offset
    _, rest, _, _ = log.batch(at, 1)
    for epoch, start in ((2, 1), (1, 0), (4, 3)):
        with pytest.raises((InvalidInput, CorruptData)):
            await wal.receive(at, epoch, start, rest, master_epoch=4)
    with pytest.raises(InvalidInput, match="over the limit"):
        log.write(2, bytes(3 * SEGMENT))
        _, large, epoch, start = log.batch(at, 5)
        await wal.receive(at, epoch, start, large, master_epoch=4)
    assert wal.end_offset == at and wal.epoch_history == log.upto(at).history
    assert await wal.receive(at, 2, 0, b"", master_epoch=4) == [], "a heartbeat makes no epoch"


async def test_a_damaged_record_is_refused_with_all_that_came_with_it(opened: Opened) -> None:
    wal = await opened.wal("one")
    log = MasterLog()
    log.begin(1)
    for i in range(4):
        log.write(i, bytes([i]) * 50)
    _, raw, epoch, start = log.batch(0, 9)
    rng = random.Random(3)
    for _ in range(80):
        broken = bytearray(raw)
        bit = rng.randrange(len(raw) * 8)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptData):
            await wal.receive(0, epoch, start, broken, master_epoch=1)
        with pytest.raises(CorruptData, match="ends inside"):
            cut = rng.choice([n for n in range(1, len(raw)) if n not in (64, 178, 292, 406)])
            await wal.receive(0, epoch, start, raw[:cut], master_epoch=1)
    assert wal.end_offset == 0 and not wal.epoch_history.entries


async def test_a_follower_cuts_what_its_master_does_not_have_and_goes_on(opened: Opened) -> None:
    old, new, follower = await opened.wal("old"), await opened.wal("new"), await opened.wal("follower")
    await old.begin_epoch(1)
    await write(old, 12)
    await ship(old, new)
    confirmed = old.end_offset
    for one in (old, new):
        one.note_confirmed(confirmed)
    await old.promise(2)
    await old.begin_epoch(2)
    await write(old, 30, base=100)  # over several files
    await ship(old, follower)
    await durable(follower)
    await new.promise(3)
    await new.begin_epoch(3)
    await write(new, 9, base=500)
    for one in (old, follower):
        await one.promise(3)
        cut = one.epoch_history.common_point(one.end_offset, new.epoch_history, new.end_offset)
        assert cut == confirmed
        await one.truncate(cut, master_epoch=3)
        assert (one.end_offset, one.durable_offset) == (cut, cut)
        await one.truncate(cut, master_epoch=3)
        await ship(new, one)
        await durable(one)
        assert await contents(one) == await contents(new)
        assert one.epoch_history.entries == ((1, 0), (3, confirmed))


async def test_nothing_confirmed_and_no_part_of_a_record_is_cut(opened: Opened) -> None:
    wal = await opened.wal("one")
    await wal.begin_epoch(1)
    await write(wal, 6, 100)
    end = wal.end_offset
    wal.note_confirmed(64 + 164)
    await wal.promise(2)
    for offset, error in ((64, CorruptData), (64 + 165, CorruptData), (end + 1, InvalidInput), (-1, InvalidInput)):
        with pytest.raises(error):
            await wal.truncate(offset, master_epoch=2)
    assert wal.end_offset == end and wal.epoch_history.entries == ((1, 0),)
    await wal.truncate(64 + 164, master_epoch=2)
    assert wal.end_offset == 64 + 164


async def test_an_epoch_without_a_byte_is_forgotten_even_if_no_byte_is_cut(opened: Opened) -> None:
    wal = await opened.wal("one")
    log = MasterLog()
    log.begin(4)
    log.write(0, b"x")
    lines, raw, epoch, start = log.batch(0, 9)
    await wal.receive(0, epoch, start, raw, master_epoch=4)
    await wal.begin_epoch(6)
    end = lines[-1].end_offset
    await wal.promise(7)
    await wal.truncate(end, master_epoch=7)
    log.write(1, b"y")
    _, raw, epoch, start = log.batch(end, 9)
    await wal.receive(end, epoch, start, raw, master_epoch=7)
    assert wal.epoch_history.entries == ((4, 0),)


async def test_a_follower_starts_over_in_the_middle_of_an_epoch(opened: Opened) -> None:
    master, follower = await opened.wal("master"), await opened.wal("follower")
    await follower.begin_epoch(1)
    await write(follower, 10)
    await master.begin_epoch(2)
    await write(master, 30)
    boundary = 64 + 20 * 1064
    await master.trim(boundary)
    await follower.promise(2)
    await follower.restart_at(boundary, master_epoch=2)
    assert (follower.start_offset, follower.end_offset, follower.durable_offset) == (boundary, boundary, boundary)
    await ship(master, follower)
    await durable(follower)
    assert await contents(follower) == await contents(master)
    assert follower.epoch_history.entries == master.epoch_history.entries == ((2, 0),)
    await follower.restart_at(64 + 10 * 1064, master_epoch=2)  # lower is possible, too
    assert follower.end_offset == 64 + 10 * 1064


async def test_a_full_follower_takes_what_fits_and_goes_on_after_a_trim(opened: Opened) -> None:
    wal = await opened.wal("one")
    log = MasterLog()
    log.begin(1)
    for i in range(200):
        log.write(i, bytes(1000))
    refused = 0
    while wal.end_offset < log.end_offset:
        lines, raw, epoch, start = log.batch(wal.end_offset, 30)
        try:
            accepted = await wal.receive(wal.end_offset, epoch, start, raw, master_epoch=1)
            assert [line_of(record) for record in accepted] == lines[: len(accepted)]
        except WalFull:
            refused += 1
            await durable(wal)
            wal.note_confirmed(wal.end_offset)
            await wal.trim(wal.end_offset)
            await asyncio.wait_for(wal.receivable(raw), 60)
    assert refused


def test_a_log_in_the_bucket_has_one_member() -> None:
    wal = S3Wal(MemoryObjectStore(), small(), cluster_id="c", replica_set_id=1, clock=FakeClock(), rng=random.Random(1))
    with pytest.raises(InvalidInput, match="bucket"):
        replicated(wal)
    memory = MemoryWal(small())
    assert replicated(memory) is memory


# On disk


async def look(path: Path) -> tuple[DiskWal, list[WalRecord]]:
    """What recovers from a copy of the directory, as after a crash now."""
    copy = path.parent / f"{path.name}-copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.tmp", "*.spare"))
    disk = FileDisk(copy)
    wal = make_wal(disk, max_bytes=MAX_BYTES)
    records = await recovered(wal)
    await wal.close()
    await disk.close()
    return wal, records


async def test_promise_history_and_confirm_offset_outlive_the_process(tmp_path: Path) -> None:
    them = Opened("disk", tmp_path)
    master, follower = await them.wal("master"), await them.wal("follower")
    await master.begin_epoch(2)
    await write(master, 12)
    await ship(master, follower)
    await durable(follower)
    confirmed = 64 + 5 * 1064
    follower.note_confirmed(confirmed)
    await follower.promise(8)
    wal, _ = await look(tmp_path / "follower")
    assert (wal.promised_epoch, wal.confirm_offset) == (8, confirmed)
    assert wal.end_offset == master.end_offset and wal.epoch_history == master.epoch_history
    marks = decode_marks((tmp_path / "follower" / EPOCH_FILE).read_bytes())
    assert marks == (8, NOTHING_OWN, -1, confirmed)
    await follower.begin_epoch(8)
    marks = decode_marks((tmp_path / "follower" / EPOCH_FILE).read_bytes())
    assert marks == (8, master.end_offset, -1, confirmed)
    report = await verify(FileDisk(tmp_path / "follower"))
    assert report.is_sound
    assert (report.info.promised_epoch, report.info.own_from) == (8, master.end_offset)
    await them.close()


async def test_a_log_that_is_alone_writes_what_older_releases_read(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path)
    wal = make_wal(disk, max_bytes=MAX_BYTES)
    await recovered(wal)
    for epoch in (1, 2):
        await wal.begin_epoch(epoch)
        await write(wal, 20)
        wal.note_confirmed(wal.durable_offset)
        await wal.trim(wal.durable_offset - 1064)
    await wal.close()
    await disk.close()
    data = (tmp_path / EPOCH_FILE).read_bytes()
    assert data[4:6] == b"\x00\x01" and decode_marks(data) == NO_MARKS
    assert decode_epoch_file(data).durable_offset == wal.end_offset


async def test_the_promise_outlives_the_files(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path / "wal")
    wal = make_wal(disk)
    await recovered(wal)
    await wal.promise(4)
    await wal.close()
    await disk.close()
    again, _ = await look(tmp_path / "wal")
    assert again.promised_epoch == 4 and again.end_offset == 0


async def test_a_crash_while_starting_over_leaves_a_log_that_recovers() -> None:
    """After each operation of the disk."""
    steps, finished = 0, False
    while not finished:
        disk = FaultyDisk()
        wal = make_wal(disk, max_bytes=MAX_BYTES)
        await recovered(wal)
        await wal.begin_epoch(1)
        await write(wal, 30)
        await wal.promise(2)
        disk.crash_after = steps
        task = asyncio.create_task(wal.restart_at(1 << 30, master_epoch=2))
        await until(lambda task=task, disk=disk: task.done() or disk.crashed)  # type: ignore[misc]
        finished = not disk.crashed
        back = make_wal(disk.power_loss(random.Random(steps)), max_bytes=MAX_BYTES)
        records = await recovered(back)
        assert back.promised_epoch == 2
        if records:
            assert back.end_offset == records[-1].end_offset
        else:
            assert back.end_offset in ((1 << 30,) if finished else (0, 1 << 30))
        await back.close()
        task.cancel()
        steps += 1
    assert steps > 8


async def test_a_log_that_has_started_over_and_received_nothing_is_found_where_it_ends(tmp_path: Path) -> None:
    """Its follower has told the end, and is in sync with it: a crash must not make it look like a lost log."""
    disk = FileDisk(tmp_path / "wal")
    wal = make_wal(disk, max_bytes=MAX_BYTES)
    await recovered(wal)
    await wal.restart_at(5_000_000, master_epoch=3)
    killed, records = await look(tmp_path / "wal")
    assert not records
    assert (killed.start_offset, killed.end_offset, killed.confirm_offset) == (5_000_000, 5_000_000, 5_000_000)
    assert killed.promised_epoch == 3 and not killed.epoch_history.entries
    await wal.close()
    assert (await verify(disk)).is_sound
    await disk.close()
    stopped, _ = await look(tmp_path / "wal")
    assert (stopped.start_offset, stopped.end_offset) == (5_000_000, 5_000_000)


async def test_a_log_that_received_something_and_lost_its_files_is_not_taken_for_one_that_did_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "wal"
    disk, other = FileDisk(path), FileDisk(tmp_path / "master")
    wal, master = make_wal(disk, max_bytes=MAX_BYTES), make_wal(other, max_bytes=MAX_BYTES)
    await recovered(wal)
    await recovered(master)
    await master.begin_epoch(3)
    await write(master, 30)
    boundary = 64 + 20 * 1064
    await master.trim(boundary)
    await wal.restart_at(boundary, master_epoch=3)
    await ship(master, wal)
    await durable(wal)
    for file in path.glob("*.wal"):
        file.unlink()
    lost, _ = await look(path)
    assert lost.end_offset == 0 and lost.promised_epoch == 3
    for each in (wal, master):
        await each.close()
    await disk.close()
    await other.close()


async def test_an_unfinished_truncation_is_told_and_completed(tmp_path: Path) -> None:
    disk = FaultyDisk()
    wal = make_wal(disk, max_bytes=MAX_BYTES)
    await recovered(wal)
    await wal.begin_epoch(1)
    await write(wal, 30)
    await wal.promise(2)
    cut = 64 + 4 * 1064
    task = asyncio.create_task(wal.truncate(cut, master_epoch=2))
    await until(lambda: decode_marks(bytes(disk.files[EPOCH_FILE].seen)).cut_at == cut)
    disk.crashed = True
    again = FaultyDisk(disk.files)
    report = await verify(again)
    assert report.is_sound and [finding.kind for finding in report.findings] == ["leftover"]
    assert (report.info.cut_at, report.info.end_offset) == (cut, cut)
    back = make_wal(again, max_bytes=MAX_BYTES)
    records = await recovered(back)
    assert back.end_offset == records[-1].end_offset == cut
    assert (await inspect(again)).cut_at == -1
    await back.close()
    task.cancel()


async def test_the_bytes_before_a_promise_or_an_epoch_are_synced_first() -> None:
    disk = FaultyDisk()
    wal = make_wal(disk)
    await recovered(wal)
    log = MasterLog()
    log.begin(1)
    log.write(0, b"x")
    log.begin(2)
    _, raw, epoch, start = log.batch(0, 9)
    await until(lambda: wal.stats()["spares"])
    await wal.receive(0, epoch, start, raw, master_epoch=2)
    disk.stalled = True
    _, raw, epoch, start = log.batch(wal.end_offset, 9)
    receiving = asyncio.create_task(wal.receive(wal.end_offset, epoch, start, raw, master_epoch=2))
    await resumed(disk, receiving)
    assert wal.durable_offset >= start
    disk.stalled = True
    log.write(1, b"y")
    _, raw, epoch, start = log.batch(wal.end_offset, 9)
    await wal.receive(wal.end_offset, epoch, start, raw, master_epoch=2)
    promising = asyncio.create_task(wal.promise(3))
    await resumed(disk, promising)
    assert wal.durable_offset == wal.end_offset == log.end_offset
    await wal.close()


async def resumed(disk: FaultyDisk, task: asyncio.Task[object]) -> None:
    """Check that the task waits for the stalled disk, and let both go on."""
    for _ in range(50):
        await asyncio.sleep(0)
    assert not task.done()
    disk.stalled = False
    disk.run()
    await asyncio.wait_for(task, 60)


async def test_a_truncation_waits_for_a_file_that_is_being_named() -> None:
    disk = FaultyDisk()
    wal = make_wal(disk)
    await recovered(wal)
    await wal.begin_epoch(1)
    wal.append(StreamAppend(1, 1, 0, 1, [bytes(SEGMENT - 64 - 64 - 10)]))
    await durable(wal)
    await wal.promise(2)
    await until(lambda: wal.stats()["spares"])
    disk.stalled = True
    disk.fail_at["replace"] = (1, errno.ENOSPC)
    with pytest.raises(WalFull):
        await wal.begin_epoch(2)  # has taken the next file
    assert wal.stats()["segments"] == 2
    await resumed(disk, asyncio.create_task(wal.truncate(64, master_epoch=2)))
    assert (wal.end_offset, wal.stats()["segments"]) == (64, 1)
    await wal.begin_epoch(2)
    assert wal.durable_offset == 128
    await wal.close()


async def test_removed_files_of_a_truncation_are_not_used_again(tmp_path: Path) -> None:
    """Their records would lie in their old places, whole."""
    them = Opened("disk", tmp_path)
    wal = await them.wal("one")
    await wal.begin_epoch(1)
    await write(wal, 40)
    before = {each.stat().st_ino: each.name for each in (tmp_path / "one").glob("*.wal")}
    await wal.promise(2)
    await wal.truncate(64, master_epoch=2)
    left = [each for each in (tmp_path / "one").glob("*.*") if each.stat().st_ino in before]
    assert [each.name for each in left] == [min(before.values())]
    assert not any(left[0].read_bytes()[64:])
    await wal.begin_epoch(2)
    await write(wal, 40)
    again, records = await look(tmp_path / "one")
    assert again.end_offset == wal.end_offset
    assert {record.master_epoch for record in records if record.type is WalRecordType.DATA} == {2}
    await them.close()


async def test_a_cancelled_call_leaves_nothing_half_done(tmp_path: Path) -> None:
    them = Opened("disk", tmp_path)
    wal = await them.wal("one")
    await wal.begin_epoch(1)
    await write(wal, 20)
    for work in (wal.promise(2), wal.truncate(64, master_epoch=2)):
        task = asyncio.create_task(work)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (wal.promised_epoch, wal.end_offset) == (2, 64)
    again, _ = await look(tmp_path / "one")
    assert (again.promised_epoch, again.end_offset) == (2, 64)
    await them.close()


async def test_appending_as_master_goes_on_after_what_was_received(tmp_path: Path) -> None:
    them = Opened("disk", tmp_path)
    master, follower = await them.wal("master"), await them.wal("follower")
    await master.begin_epoch(1)
    await write(master, 12)
    await ship(master, follower)
    await follower.promise(2)
    await follower.begin_epoch(2)
    assert isinstance(follower, DiskWal)
    await append(follower, 99, b"mine")
    await durable(follower)
    again, records = await look(tmp_path / "follower")
    assert bytes(records[-1].payload) == b"mine" and again.epoch_history.entries == ((1, 0), (2, master.end_offset))
    await them.close()


@pytest.mark.parametrize("kept_as", ["", ".replaced-3"])
@pytest.mark.parametrize("writes", [1, 2])
async def test_a_log_that_finds_the_disk_full_when_it_starts_over_is_as_it_was_and_may_be_asked_again(
    kept_as: str, writes: int
) -> None:
    disk = FaultyDisk()
    wal = make_wal(disk, max_bytes=MAX_BYTES)
    failures: list[Exception] = []
    wal.set_on_failed(failures.append)
    await recovered(wal)
    await wal.begin_epoch(1)
    await write(wal, 30)
    await wal.promise(3)
    end, history = wal.end_offset, wal.epoch_history.entries
    disk.fail_at["replace"] = (writes if kept_as else 1, errno.ENOSPC)
    with pytest.raises(WalFull):
        await wal.restart_at(5_000_000, master_epoch=3, kept_as=kept_as)
    assert (wal.end_offset, wal.epoch_history.entries, failures) == (end, history, [])
    await wal.restart_at(5_000_000, master_epoch=3, kept_as=kept_as)
    assert (wal.start_offset, wal.end_offset) == (5_000_000, 5_000_000)
    await wal.close()

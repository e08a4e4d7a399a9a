"""A full disk is back-pressure: nothing acknowledged is lost, appends say `WalFull`, and go on when there is room."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.faulty_disk import FaultyDisk
from tests.storage.wal_harness import SEGMENT, append, durable, make_wal, recovered, until
from tests.support.missing import lacking
from tidelog.runtime.disk import FileDisk, FileDiskFile
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import WalFailed, WalFull
from tidelog.storage.wal.disk.segments import SegmentPool
from tidelog.storage.wal.disk.wal import DiskWal


async def fill(wal: DiskWal) -> int:
    """Append until the WAL is full. Returns how many records it took."""
    count = 0
    while True:
        try:
            wal.append(StreamAppend(1, 1, count, 1, [bytes(1000)]))
        except WalFull as error:
            if "prepared" in error.message and "cannot" not in error.message:
                await asyncio.sleep(0.001)
                continue
            assert error.retriable and "No space" in error.message, error
            return count
        count += 1
        await durable(wal)


async def test_no_space_for_the_next_file_is_back_pressure_until_there_is_some() -> None:
    disk = FaultyDisk()
    wal = make_wal(disk)
    failures: list[Exception] = []
    wal.set_on_failed(failures.append)
    await recovered(wal)
    await wal.begin_epoch(1)
    await until(lambda: wal.stats()["spares"] == 1)
    disk.capacity_bytes = disk.used_bytes + 100
    count = await fill(wal)
    assert count >= 12, "the current file and the spare took what they were made for"
    end = wal.end_offset
    assert wal.durable_offset == end and not failures
    disk.capacity_bytes = 1 << 40
    assert await asyncio.wait_for(append(wal, count, bytes(1000)), 60) == end + 1064
    await wal.close()


async def test_an_epoch_that_finds_the_disk_full_is_refused_whole_and_may_be_asked_again() -> None:
    disk = FaultyDisk()
    wal = make_wal(disk)
    await recovered(wal)
    disk.capacity_bytes = 10
    with pytest.raises(WalFull):
        await wal.begin_epoch(1)
    assert wal.master_epoch == -1
    disk.capacity_bytes = SEGMENT
    with pytest.raises(WalFull, match="epoch file"):
        await asyncio.wait_for(begin_when_there_is_a_spare(wal), 60)
    disk.capacity_bytes = 1 << 40
    await wal.begin_epoch(1)
    assert wal.durable_offset == 64
    await wal.close()


async def begin_when_there_is_a_spare(wal: DiskWal) -> None:
    await until(lambda: wal.stats()["spares"] == 1)
    await wal.begin_epoch(1)


async def test_a_disk_that_breaks_while_preparing_fails_the_wal() -> None:
    disk = FaultyDisk()
    wal = make_wal(disk)
    failures: list[Exception] = []
    wal.set_on_failed(failures.append)
    await recovered(wal)
    await wal.begin_epoch(1)
    await until(lambda: wal.stats()["spares"] == 1)
    disk.fail_at["fill"] = (1, errno.EIO)
    wal.append(StreamAppend(1, 1, 0, 1, [bytes(SEGMENT - 100)]))  # takes the spare
    await until(lambda: failures)
    with pytest.raises(WalFailed):
        wal.append(StreamAppend(1, 1, 1, 1, [b"x"]))
    await wal.close()


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "small"
    where.mkdir()
    if os.geteuid() != 0:
        lacking("root, to mount a small tmpfs")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={5 * SEGMENT}", "tmpfs", str(where)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        lacking(f"the right to mount a tmpfs ({mounted.stderr.decode().strip()})")
    yield where
    subprocess.run(["umount", str(where)], check=True)


@pytest.mark.processes
async def test_a_really_full_file_system(small_file_system: Path) -> None:
    disk = FileDisk(small_file_system / "wal")
    wal = make_wal(disk, max_bytes=100 * SEGMENT)
    await recovered(wal)
    await wal.begin_epoch(1)
    count = await fill(wal)
    assert await disk.free_bytes() < SEGMENT
    end = wal.end_offset
    wal.note_confirmed(wal.durable_offset)
    await wal.trim(wal.durable_offset)
    for i in range(5):
        await asyncio.wait_for(append(wal, count + i, bytes(1000)), 60)
    await durable(wal)
    count += 5
    more = await fill_on(wal, count)
    await wal.close()
    await disk.close()
    disk = FileDisk(small_file_system / "wal")  # and a start on the full disk works
    wal = make_wal(disk, max_bytes=100 * SEGMENT)
    records = await recovered(wal)
    assert wal.end_offset > end
    assert [r.base_offset for r in records if r.count][-1] == count + more - 1
    await wal.close()
    await disk.close()


async def fill_on(wal: DiskWal, base: int) -> int:
    count = 0
    while True:
        try:
            wal.append(StreamAppend(1, 1, base + count, 1, [bytes(1000)]))
        except WalFull as error:
            if "No space" in error.message:
                return count
            await asyncio.sleep(0.001)
            continue
        count += 1
        await durable(wal)


async def test_a_disk_that_is_full_at_the_end_does_not_fail_the_shutdown() -> None:
    disk = FaultyDisk()
    wal = make_wal(disk)
    await recovered(wal)
    await wal.begin_epoch(1)
    end = await append(wal, 0, b"x")
    disk.fail_at["replace"] = (1, errno.ENOSPC)
    await wal.close()
    again = make_wal(FaultyDisk(disk.files))
    await recovered(again)
    assert again.end_offset == end
    await again.close()


async def test_closing_while_a_spare_is_being_created_leaves_no_file(tmp_path: Path) -> None:
    opened = asyncio.Event()

    class SlowToTell(FileDisk):
        async def open(self, name: str, *, create: bool = False, read_only: bool = False) -> FileDiskFile:
            file = await super().open(name, create=create, read_only=read_only)
            if create:
                opened.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    await file.close()  # as `FileDisk.open` does when its caller is cancelled
                    raise
            return file

    disk = SlowToTell(tmp_path)
    pool = SegmentPool(
        disk,
        segment_bytes=SEGMENT,
        max_bytes=4 * SEGMENT,
        rng=random.Random(1),
        on_change=lambda: None,
        on_failed=lambda error: pytest.fail(str(error)),
    )
    pool.start()
    await opened.wait()
    assert [each.name for each in await disk.entries()] == ["00000000.tmp"]
    await pool.close()
    assert await disk.entries() == []
    await disk.close()

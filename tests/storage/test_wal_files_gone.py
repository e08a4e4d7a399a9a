"""WAL files that are removed or replaced while the log has them open."""

from __future__ import annotations

import asyncio

from tests.storage.faulty_disk import FaultyDisk, Inode
from tests.storage.wal_harness import append, durable, make_wal, recovered
from tests.support.loops import VIRTUAL_LOOP
from tidelog.broker.wal_files import missing_wal_files
from tidelog.storage.wal.disk.wal import DiskWal
from tidelog.storage.wal.disk.watch import LOOK_S

LOOPS = VIRTUAL_LOOP
TWO_LOOKS_S = 2 * LOOK_S + 1


async def _filled(disk: FaultyDisk) -> DiskWal:
    wal = make_wal(disk)
    await recovered(wal)
    await wal.begin_epoch(1)
    for base in range(12):
        await append(wal, base, bytes(2000))
    await durable(wal)
    return wal


def _segments(disk: FaultyDisk) -> list[str]:
    return sorted(name for name in disk.files if name.endswith(".wal"))


async def test_a_file_that_was_removed_or_replaced_is_told_of_and_nothing_else_is() -> None:
    disk = FaultyDisk()
    wal = await _filled(disk)
    await asyncio.sleep(TWO_LOOKS_S)
    assert missing_wal_files(7, 1, wal.missing_files) == []
    first, second, *_ = _segments(disk)
    removed = disk.files.pop(first)
    disk.files[second], replaced = Inode(bytes(disk.files[second].seen)), disk.files[second]
    await asyncio.sleep(TWO_LOOKS_S)
    assert wal.missing_files == (first, second)
    (told,) = missing_wal_files(7, 1, wal.missing_files)
    assert "replica set 7" in told and first in told and "wal drain" in told
    disk.files[first], disk.files[second] = removed, replaced  # as a mount that was covered, and is not any more
    await asyncio.sleep(TWO_LOOKS_S)
    assert missing_wal_files(7, 1, wal.missing_files) == []
    await wal.close()


async def test_files_that_the_log_itself_renames_and_frees_are_not_missing() -> None:
    disk = FaultyDisk()
    wal = await _filled(disk)
    async with asyncio.timeout(100):
        for base in range(12, 60):
            await append(wal, base, bytes(2000))
            await durable(wal)
            await wal.trim(max(0, wal.durable_offset - 10_000))
            await asyncio.sleep(LOOK_S / 4)
            assert not wal.missing_files
    await wal.close()


async def test_a_log_without_its_files_goes_on_until_everything_is_uploaded() -> None:
    """To end where the first of them is freed, or the next begins, would lose what is in the others."""
    disk = FaultyDisk()
    wal = await _filled(disk)
    kept = disk.files
    disk.files = {name: inode for name, inode in kept.items() if not name.endswith((".wal", ".spare"))}
    await asyncio.sleep(TWO_LOOKS_S)
    assert wal.missing_files
    async with asyncio.timeout(100):
        for base in range(12, 60):
            await append(wal, base, bytes(2000))
            await durable(wal)
            await wal.trim(max(0, wal.durable_offset - 10_000))
    assert set(_segments(disk)).isdisjoint(kept)
    await asyncio.sleep(TWO_LOOKS_S)
    assert not wal.missing_files
    await wal.close()


async def test_a_copy_in_the_place_of_a_file_is_removed_with_it_and_is_no_spare() -> None:
    disk = FaultyDisk()
    wal = await _filled(disk)
    first = _segments(disk)[0]
    copy = disk.files[first] = Inode(bytes(disk.files[first].seen))
    await wal.trim(wal.durable_offset)
    assert copy not in disk.files.values()
    await wal.close()


def test_many_files_are_counted() -> None:
    (told,) = missing_wal_files(1, 1, tuple(f"{n}.wal" for n in range(5)))
    assert "(0.wal, 1.wal, 2.wal and 2 more)" in told

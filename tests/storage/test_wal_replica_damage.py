"""What proves damage on a replica's disk, and what is a torn group (docs/design/0015-hot-tier.md, section 6)."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from tests.storage.faulty_disk import FaultyDisk, FaultyFile, Inode
from tests.storage.wal_harness import durable, flip_bit, recovered, small, until
from tests.storage.wal_replicas import MasterLog
from tidelog.runtime.disk import Done, FileDisk
from tidelog.runtime.errors import CorruptData
from tidelog.runtime.types import Buffer
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.disk.inspect import verify
from tidelog.storage.wal.disk.segments import segment_name
from tidelog.storage.wal.disk.wal import DiskWal
from tidelog.storage.wal.epochs import EPOCH_FILE
from tidelog.storage.wal.format import HEADER_BYTES

LARGE = 4 << 20
"""One file for all."""
GROUP = 5000
SIZE = 1000
RECORD = HEADER_BYTES + SIZE


def wal_on(disk: FileDisk, group_bytes: int = GROUP) -> DiskWal:
    settings = small(segment_bytes=LARGE, max_bytes=4 * LARGE)
    return DiskWal(disk, settings, rng=random.Random(1), group_bytes=group_bytes)


async def received_log(path: Path, count: int = 40, *, master_after: int = 0) -> tuple[Path, int]:
    """A copy of a follower's directory as a crash leaves it, and where its log ends.

    Every header claims that all before it was confirmed and durable, on the master's disk. With `master_after` the
    follower then writes as many records as master, and knows them confirmed.
    """
    log = MasterLog()
    log.begin(1)
    for i in range(count):
        log.write(i, bytes([i + 1]) * SIZE, log.end_offset)
    disk = FileDisk(path)
    wal = wal_on(disk)
    await recovered(wal)
    while wal.end_offset < log.end_offset:
        _, raw, epoch, start = log.batch(wal.end_offset, 3)
        await wal.receivable(raw)
        await wal.receive(wal.end_offset, epoch, start, raw, master_epoch=1)
        await durable(wal)
    if master_after:
        await wal.promise(2)
        await wal.begin_epoch(2)
        for i in range(master_after):
            wal.append(StreamAppend(1, 1, i, 1, [b"m" * SIZE]))
            await durable(wal)
            wal.note_confirmed(wal.durable_offset)
    end = wal.end_offset
    crashed = path.parent / "crashed"
    shutil.copytree(path, crashed, ignore=shutil.ignore_patterns("*.tmp"))
    await wal.close()
    await disk.close()
    return crashed, end


async def recover(path: Path, group_bytes: int = GROUP) -> int:
    disk = FileDisk(path)
    wal = wal_on(disk, group_bytes)
    try:
        await recovered(wal)
        return wal.end_offset
    finally:
        await wal.close()
        await disk.close()


def damaged(path: Path, offset: int) -> Path:
    copy = path.parent / "damaged"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    flip_bit(copy / segment_name(0), (offset + HEADER_BYTES + 5) * 8)
    return copy


async def test_a_bad_record_within_the_last_group_is_a_torn_tail(tmp_path: Path) -> None:
    crashed, end = await received_log(tmp_path / "wal")
    for back in range(1, 1 + GROUP // RECORD):
        bad = end - back * RECORD
        assert end - GROUP <= bad
        assert await recover(damaged(crashed, bad)) == bad, "headers of the master prove nothing here"


async def test_a_bad_record_further_back_than_a_group_is_damage(tmp_path: Path) -> None:
    crashed, end = await received_log(tmp_path / "wal")
    for number in range(40):
        bad = HEADER_BYTES + number * RECORD
        if bad >= end - GROUP:
            break
        copy = damaged(crashed, bad)
        before = (copy / segment_name(0)).read_bytes()
        with pytest.raises(CorruptData, match="was received when everything before"):
            await recover(copy)
        assert (copy / segment_name(0)).read_bytes() == before
    assert number > 30


async def test_a_record_larger_than_a_group_proves_all_before_it(tmp_path: Path) -> None:
    crashed, end = await received_log(tmp_path / "wal")
    with pytest.raises(CorruptData, match="was received when"):
        await recover(damaged(crashed, end - 2 * RECORD), group_bytes=RECORD - 1)


async def test_what_a_replica_wrote_as_master_proves_what_its_headers_say(tmp_path: Path) -> None:
    crashed, end = await received_log(tmp_path / "wal", master_after=6)
    for back in range(2, 5):  # within a group of the end; the last two headers are the first to prove so much
        with pytest.raises(CorruptData, match=r"says .* was durable"):
            await recover(damaged(crashed, end - back * RECORD))
    assert await recover(damaged(crashed, end - RECORD)) == end - RECORD
    with pytest.raises(CorruptData):  # the epoch's start proves what was received before it
        await recover(damaged(crashed, end - 6 * RECORD - HEADER_BYTES - RECORD))


async def test_verify_judges_as_recovery_does(tmp_path: Path) -> None:
    """With the usual group, of which this log is smaller."""
    crashed, end = await received_log(tmp_path / "wal")
    disk = FileDisk(damaged(crashed, end - 3 * RECORD))
    assert [one.kind for one in (await verify(disk)).findings if one.kind != "leftover"] == ["torn"]
    (tmp_path / "damaged" / EPOCH_FILE).unlink()  # without it nobody knows that the records were received
    assert "corrupt" in [one.kind for one in (await verify(disk)).findings]
    await disk.close()


async def test_after_a_clean_close_every_byte_is_proven(tmp_path: Path) -> None:
    _, end = await received_log(tmp_path / "wal")
    flip_bit(tmp_path / "wal" / segment_name(0), (end - RECORD + HEADER_BYTES) * 8)
    with pytest.raises(CorruptData, match="epoch file says"):
        await recover(tmp_path / "wal")


class WatchedFile(FaultyFile):
    """Counts what was submitted and is not known to be synced."""

    def write(self, offset: int, buffers: Sequence[Buffer], *, sync: bool, done: Done, may_block: bool = False) -> None:
        watch = self.disk
        assert isinstance(watch, WatchedDisk)
        watch.unsynced.append((self.inode, sum(map(len, buffers))))
        watch.widest.append((sum(length for _, length in watch.unsynced), len(watch.unsynced)))
        told = watch.told(self.inode, done) if sync else done
        super().write(offset, buffers, sync=sync, done=told, may_block=may_block)

    def sync(self, done: Done) -> None:
        watch = self.disk
        assert isinstance(watch, WatchedDisk)
        super().sync(watch.told(self.inode, done))


class WatchedDisk(FaultyDisk):
    def __init__(self) -> None:
        super().__init__()
        self.unsynced: list[tuple[Inode, int]] = []
        self.widest: list[tuple[int, int]] = []
        """After each write: the bytes that are not synced, and in how many writes."""

    def told(self, inode: Inode, done: Done) -> Done:
        """`done`; and when it is called, what was submitted for this file until now is synced."""
        covered = [each for each in self.unsynced if each[0] is inode]

        def and_count(error: OSError | None) -> None:
            self.unsynced = [each for each in self.unsynced if not any(each is one for one in covered)]
            done(error)

        return and_count

    async def open(self, name: str, *, create: bool = False, read_only: bool = False) -> FaultyFile:
        file = await super().open(name, create=create, read_only=read_only)
        return WatchedFile(self, file.name, file.inode)


@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_no_more_than_a_group_is_written_and_not_synced(flush: Literal["sync", "async"]) -> None:
    """Whatever the disk merges; one larger record is written alone."""
    disk = WatchedDisk()
    settings = small(flush=flush, segment_bytes=LARGE >> 7, max_bytes=4 * LARGE)
    wal = DiskWal(disk, settings, rng=random.Random(1), group_bytes=GROUP)
    await recovered(wal)
    log = MasterLog()
    log.begin(1)
    rng = random.Random(5)
    for i in range(200):
        log.write(i, bytes(rng.choice([10, 900, 2000, 7000])))
    while wal.end_offset < log.end_offset:
        _, raw, epoch, start = log.batch(wal.end_offset, rng.choice([1, 1, 1, 20]))
        await until(lambda: wal.stats()["spares"])  # so that batches cross files
        await wal.receive(wal.end_offset, epoch, start, raw, master_epoch=1)
    await durable(wal)
    assert [(size, writes) for size, writes in disk.widest if size > GROUP and writes > 1] == []
    assert max(size for size, writes in disk.widest if writes > 1) > GROUP // 2, "writes overlap within a group"
    assert wal.stats()["segments"] > 5
    await wal.close()

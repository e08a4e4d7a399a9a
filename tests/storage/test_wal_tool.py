"""`tidelog wal inspect|verify`: reading a WAL directory offline. (Damage: test_wal_corruption.py.)"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from tests.storage.wal_harness import SEGMENT, append, durable, flip_bit, make_wal, recovered
from tidelog.runtime.disk import Disk, FileDisk
from tidelog.storage.wal.base import WalRecord
from tidelog.storage.wal.disk.inspect import inspect, verify
from tidelog.storage.wal.disk.wal import DiskWal


async def write(path: Path, epochs: Sequence[int] = (1, 2), count: int = 10) -> DiskWal:
    for epoch in epochs:
        disk = FileDisk(path)
        wal = make_wal(disk)
        await recovered(wal)
        await wal.begin_epoch(epoch)
        for i in range(count):
            await append(wal, i, bytes(1500), stream=i % 3)
        await wal.close()
        await disk.close()
    return wal


P = ParamSpec("P")
T = TypeVar("T")


async def with_disk(
    path: Path, function: Callable[Concatenate[Disk, P], Awaitable[T]], *args: P.args, **options: P.kwargs
) -> T:
    disk = FileDisk(path)
    try:
        return await function(disk, *args, **options)
    finally:
        await disk.close()


async def test_inspect_tells_what_is_there(tmp_path: Path) -> None:
    wal = await write(tmp_path)
    records: list[WalRecord] = []
    progress: list[tuple[int, int]] = []
    info = await with_disk(
        tmp_path, inspect, on_record=records.append, progress=lambda done, total: progress.append((done, total))
    )
    assert (info.start_offset, info.end_offset) == (0, wal.end_offset)
    assert info.epochs == [(1, 0), (2, 10 * 1564 + 64)]
    assert (info.epoch_file, info.noted_durable_offset) == ("ok", wal.end_offset)
    assert sum(segment.records for segment in info.segments) == len(records) == 22
    assert sum(segment.payload_bytes for segment in info.segments) == 30_000
    first = info.segments[0]
    assert (first.streams, first.first_epoch, first.file_bytes, first.stopped) == (3, 1, SEGMENT, "")
    assert info.segments[-1].last_epoch == 2
    assert progress[-1] == (SEGMENT * len(info.segments),) * 2


async def test_a_sound_directory_has_no_findings(tmp_path: Path) -> None:
    await write(tmp_path)
    report = await with_disk(tmp_path, verify)
    assert report.findings == [] and report.is_sound


async def test_an_empty_or_missing_directory_is_sound(tmp_path: Path) -> None:
    report = await with_disk(tmp_path / "nothing", verify)
    assert report.is_sound and report.info.segments == [] and report.info.epoch_file == "missing"
    assert not (tmp_path / "nothing").exists()


async def test_epoch_file_problems_are_found(tmp_path: Path) -> None:
    await write(tmp_path)
    os.rename(tmp_path / "epochs", tmp_path / "aside")
    report = await with_disk(tmp_path, verify)
    assert [finding.kind for finding in report.findings] == ["missing"] and report.is_sound
    await write(tmp_path / "other", epochs=(7,))
    os.replace(tmp_path / "other" / "epochs", tmp_path / "epochs")
    report = await with_disk(tmp_path, verify)
    assert {finding.kind for finding in report.findings} == {"epochs"} and not report.is_sound
    flip_bit(tmp_path / "epochs", 50)
    report = await with_disk(tmp_path, verify)
    assert [finding.message for finding in report.findings] == ["epochs: the epoch file fails its CRC32C check"]


async def test_verifying_beside_a_running_writer_finds_nothing(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path)
    wal = make_wal(disk)
    await recovered(wal)
    await wal.begin_epoch(1)
    stop = asyncio.Event()

    async def writer() -> None:
        base = 0
        while not stop.is_set():
            await append(wal, base, bytes(base % 2000))
            base += 1
            if base % 16 == 0:  # before the WAL is at its bound: nobody else trims it
                await durable(wal)
                wal.note_confirmed(wal.durable_offset)
                await wal.trim(wal.durable_offset)
            await asyncio.sleep(0)

    writing = asyncio.create_task(writer())
    for _ in range(60):
        report = await with_disk(tmp_path, verify)
        assert [finding for finding in report.findings if finding.kind not in ("leftover", "torn")] == []
    stop.set()
    await writing
    await wal.close()
    await disk.close()

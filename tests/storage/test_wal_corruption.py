"""Damage to a WAL's files: acknowledged bytes that are not whole any more are refused, a torn tail is cut."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storage.wal_harness import SEGMENT, append, durable, flip_bit, make_wal, recovered
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import CorruptData
from tidelog.storage.wal.base import WalRecord
from tidelog.storage.wal.disk.inspect import verify
from tidelog.storage.wal.disk.segments import segment_name
from tidelog.storage.wal.disk.wal import DiskWal
from tidelog.storage.wal.format import HEADER_BYTES


async def write_log(path: Path, count: int = 12, size: int = 2000, *, clean: bool = False) -> list[tuple[int, int]]:
    """A log whose every record but the last is known confirmed. Returns (offset, end) of each DATA record."""
    disk = FileDisk(path)
    wal = make_wal(disk)
    await recovered(wal)
    await wal.begin_epoch(1)
    places = []
    for i in range(count):
        await wal.writable(size)
        start = wal.end_offset
        places.append((start, await append(wal, i, bytes([i + 1]) * size)))
        await durable(wal)
        wal.note_confirmed(wal.durable_offset)
    if clean:
        await wal.close()
    else:
        crash(path, lambda copy: None)
    await disk_of(wal, disk)
    return places


async def disk_of(wal: DiskWal, disk: FileDisk) -> None:
    await wal.close()
    await disk.close()


def crash(path: Path, change: Callable[[Path], None]) -> None:
    """Keep a copy of the directory as a crash would leave it now."""
    copy = path.parent / (path.name + "-crashed")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.tmp"))  # one being prepared may be renamed
    change(copy)


async def recover_at(path: Path) -> tuple[list[WalRecord], int]:
    disk = FileDisk(path)
    wal = make_wal(disk)
    try:
        return await recovered(wal), wal.end_offset
    finally:
        await wal.close()
        await disk.close()


async def kinds_of(path: Path) -> list[str]:
    """What `verify` finds, but for the spare that was being prepared at the crash."""
    disk = FileDisk(path)
    try:
        return [finding.kind for finding in (await verify(disk)).findings if finding.kind != "leftover"]
    finally:
        await disk.close()


def place_of(path: Path, offset: int) -> tuple[Path, int]:
    """The file and byte that hold a WAL offset."""
    starts = sorted(int(name[:20]) for name in os.listdir(path) if name.endswith(".wal"))
    start = max(start for start in starts if start <= offset)
    return path / segment_name(start), offset - start


async def test_a_flipped_bit_anywhere_in_confirmed_bytes_is_found(tmp_path: Path) -> None:
    places = await write_log(tmp_path / "wal")
    crashed = tmp_path / "wal-crashed"
    confirmed = places[-1][0]  # the last header proves all before it
    rng = random.Random(5)
    for _ in range(60):
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(crashed, broken)
        bit = rng.randrange(confirmed * 8)
        file, at = place_of(broken, bit // 8)
        flip_bit(file, at * 8 + bit % 8)
        before = file.read_bytes()
        with pytest.raises(CorruptData, match=r"damaged at byte \d+ \(WAL offset \d+\)") as caught:
            await recover_at(broken)
        assert "tidelog wal verify" in str(caught.value) and file.name in str(caught.value)
        assert file.read_bytes() == before, "nothing is changed"
        assert await kinds_of(broken) == ["corrupt"]


async def test_a_torn_tail_is_cut_and_zeroed(tmp_path: Path) -> None:
    places = await write_log(tmp_path / "wal")
    crashed = tmp_path / "wal-crashed"
    start, end = places[-1]
    rng = random.Random(6)
    for _ in range(20):
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(crashed, broken)
        file, at = place_of(broken, start)
        cut = rng.randrange(at, at + end - start)
        raw = bytearray(file.read_bytes())
        raw[cut : at + end - start] = bytes(at + end - start - cut)
        file.write_bytes(raw)
        kinds = await kinds_of(broken)
        assert kinds == (["torn"] if cut >= at + 24 else [])  # magic and WAL offset are there
        records, recovered_end = await recover_at(broken)
        assert recovered_end == start and records[-1].end_offset == start
        assert not any(file.read_bytes()[at:])
        assert await kinds_of(broken) == []


async def test_after_a_clean_shutdown_the_last_record_is_protected_too(tmp_path: Path) -> None:
    places = await write_log(tmp_path / "wal", clean=True)
    file, at = place_of(tmp_path / "wal", places[-1][0])
    flip_bit(file, (at + HEADER_BYTES) * 8)
    with pytest.raises(CorruptData, match="epoch file says"):
        await recover_at(tmp_path / "wal")
    assert await kinds_of(tmp_path / "wal") == ["corrupt"]


async def test_a_missing_or_truncated_file_in_the_middle_is_refused(tmp_path: Path) -> None:
    await write_log(tmp_path / "wal")
    crashed = tmp_path / "wal-crashed"
    names = sorted(name for name in os.listdir(crashed) if name.endswith(".wal"))
    assert len(names) >= 4
    for change in (os.unlink, lambda path: os.truncate(path, 3000), lambda path: os.truncate(path, 0)):
        broken = tmp_path / "broken"
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(crashed, broken)
        change(broken / names[1])
        with pytest.raises(CorruptData, match="is damaged"):
            await recover_at(broken)
        assert "corrupt" in await kinds_of(broken)


async def test_a_last_file_cut_short_by_somebody_is_refused_when_bytes_are_missing(tmp_path: Path) -> None:
    await write_log(tmp_path / "wal", clean=True)
    last = max(name for name in os.listdir(tmp_path / "wal") if name.endswith(".wal"))
    os.truncate(tmp_path / "wal" / last, 1000)
    with pytest.raises(CorruptData):
        await recover_at(tmp_path / "wal")


async def test_a_record_of_a_later_version_stops_recovery_with_a_clear_word(tmp_path: Path) -> None:
    import struct

    from crc32c import crc32c

    places = await write_log(tmp_path / "wal", 2, 100)
    file, at = place_of(tmp_path / "wal-crashed", places[-1][0])
    raw = bytearray(file.read_bytes())
    raw[at + 8] = 9
    size = places[-1][1] - places[-1][0]
    raw[at + 4 : at + 8] = struct.pack(">I", crc32c(raw[at + 8 : at + size]))
    file.write_bytes(raw)
    with pytest.raises(CorruptData, match="version 9"):
        await recover_at(tmp_path / "wal-crashed")


async def test_segments_of_the_right_size_only(tmp_path: Path) -> None:
    """A log written with other settings is read; its spares of another size are not kept."""

    await write_log(tmp_path / "wal")
    (tmp_path / "wal-crashed" / "00000099.spare").write_bytes(bytes(SEGMENT * 2))
    (tmp_path / "wal-crashed" / "00000100.tmp").write_bytes(b"half")
    await recover_at(tmp_path / "wal-crashed")
    assert not {"00000099.spare", "00000100.tmp"} & set(os.listdir(tmp_path / "wal-crashed"))

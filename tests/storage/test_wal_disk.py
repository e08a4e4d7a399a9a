"""The disk WAL on real files: appending, recovery, epochs, trim, bounds."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Self, Unpack

import pytest

from tests.storage.wal_harness import SEGMENT, WalChanges, append, durable, flip_bit, make_wal, recovered, small, until
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import Closed, ConfigError, CorruptData, Fenced, InvalidInput, NotFound
from tidelog.runtime.types import Buffer
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import WalFull, WalRecord, WalRecordType
from tidelog.storage.wal.disk.wal import check_settings
from tidelog.storage.wal.epochs import EPOCH_FILE, decode_epoch_file
from tidelog.storage.wal.format import HEADER_BYTES


class Life:
    """One life of a WAL in `path`; leaving it closes it unless it was abandoned."""

    def __init__(self, path: Path, epoch: int | None = 1, **changes: Unpack[WalChanges]) -> None:
        self.disk = FileDisk(path)
        self.wal = make_wal(self.disk, **changes)
        self.epoch = epoch

    async def __aenter__(self) -> Self:
        self.records = await recovered(self.wal)
        if self.epoch is not None:
            await self.wal.begin_epoch(self.epoch)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.wal.close()
        await self.disk.close()


def data_of(records: list[WalRecord]) -> list[bytes]:
    return [bytes(record.payload) for record in records if record.type is WalRecordType.DATA]


def contents(path: Path, suffix: str) -> dict[str, bytes]:
    """The contents of the files with a suffix, by their names without it."""
    return {each.name.removesuffix(suffix): each.read_bytes() for each in path.glob(f"*{suffix}")}


def files_of(path: Path) -> set[int]:
    """The inodes of segments and spares."""
    return {each.stat().st_ino for each in path.glob("*.*") if each.suffix in (".wal", ".spare")}


async def test_an_empty_directory_starts_at_zero_with_an_epoch_record(tmp_path: Path) -> None:
    async with Life(tmp_path / "wal", 4) as life:
        assert life.records == []
        assert (life.wal.start_offset, life.wal.end_offset, life.wal.durable_offset) == (0, 64, 64)
        assert life.wal.master_epoch == 4
    async with Life(tmp_path / "wal", None) as life:
        (record,) = life.records
        assert (record.type, record.master_epoch, record.count) == (WalRecordType.EPOCH_START, 4, 0)


async def test_records_come_back_as_they_were_appended(tmp_path: Path) -> None:
    durables: list[int] = []
    async with Life(tmp_path) as life:
        life.wal.set_on_durable(durables.append)
        end = life.wal.append(StreamAppend(7, 3, 1 << 40, 5, [b"ab", memoryview(b"cd"), bytearray(b"ef")]))
        assert end == 64 + HEADER_BYTES + 6
        empty = life.wal.append(StreamAppend(8, 1, 0, 1, []))
        await durable(life.wal)
        assert durables[-1] == empty
    async with Life(tmp_path, 2) as life:
        _, first, second = life.records
        assert (first.stream_id, first.stream_epoch, first.base_offset, first.count) == (7, 3, 1 << 40, 5)
        assert (first.offset, first.end_offset, bytes(first.payload)) == (64, end, b"abcdef")
        assert (second.stream_id, second.offset, second.end_offset) == (8, end, empty)
        assert life.wal.end_offset == empty + HEADER_BYTES


async def test_the_log_goes_on_over_files_at_the_same_linear_offsets(tmp_path: Path) -> None:
    sent = [bytes([i]) * 3000 for i in range(20)]
    async with Life(tmp_path, max_bytes=20 * SEGMENT) as life:
        for i, payload in enumerate(sent):
            await append(life.wal, i, payload)
        assert life.wal.stats()["segments"] == 10
    async with Life(tmp_path, 2, max_bytes=20 * SEGMENT) as life:
        assert data_of(life.records) == sent
        ends = [0, *(record.end_offset for record in life.records)]
        assert ends[:-1] == [record.offset for record in life.records]


async def test_a_record_larger_than_a_segment_gets_a_file_of_its_size(tmp_path: Path) -> None:
    big = os.urandom(2 * SEGMENT)
    async with Life(tmp_path) as life:
        with pytest.raises(WalFull):
            life.wal.append(StreamAppend(1, 1, 0, 1, [big]))
        await append(life.wal, 0, big)
        await append(life.wal, 1, b"after")
    async with Life(tmp_path, 2) as life:
        assert data_of(life.records) == [big, b"after"]


async def test_what_cannot_be_appended_is_refused_before_anything_is_queued(tmp_path: Path) -> None:
    async with Life(tmp_path) as life:
        with pytest.raises(InvalidInput, match="max_record_bytes"):
            life.wal.append(StreamAppend(1, 1, 0, 1, [bytes(2 * SEGMENT + 1)]))
        assert life.wal.end_offset == 64
    with pytest.raises(Closed):
        life.wal.append(StreamAppend(1, 1, 0, 1, [b"x"]))


async def test_a_full_wal_says_so_and_goes_on_after_a_trim(tmp_path: Path) -> None:
    async with Life(tmp_path, max_bytes=3 * SEGMENT, max_record_bytes=4000) as life:
        wal, accepted = life.wal, []
        with pytest.raises(WalFull):
            for i in range(1000):
                accepted.append(wal.append(StreamAppend(1, 1, i, 1, [bytes(1000)])))
                await durable(wal)
                await until(lambda: wal.stats()["spares"] or wal.stats()["disk_bytes"] >= 3 * SEGMENT)
        assert wal.end_offset == accepted[-1]
        assert wal.stats()["disk_bytes"] == 3 * SEGMENT
        waiting = asyncio.create_task(wal.writable(1000))
        await asyncio.sleep(0)
        assert not waiting.done()
        wal.note_confirmed(wal.durable_offset)
        await wal.trim(wal.durable_offset)
        await asyncio.wait_for(waiting, 60)
        wal.append(StreamAppend(1, 1, 1000, 1, [bytes(1000)]))
        assert wal.start_offset == accepted[-1]


async def test_files_that_a_trim_frees_together_are_enough_for_the_next_ones(tmp_path: Path) -> None:
    """What uploads free in one go is not removed while other files are filled with zeros."""

    async with Life(tmp_path, max_bytes=20 * SEGMENT) as life:
        wal, kept = life.wal, []
        for turn in range(3):
            for i in range(10):
                await append(wal, turn * 10 + i, bytes(3000))
            await durable(wal)
            await until(lambda: wal.stats()["spares"] >= 1)
            await wal.trim(wal.durable_offset)
            kept.append(files_of(tmp_path))
        assert len(kept[0]) >= 5
        assert kept[0] <= kept[1] <= kept[2], "a file was removed"
        assert len(kept[2]) <= len(kept[0]) + 1, "a turn begins at any place in a file, and may touch one more"


async def test_trimmed_files_are_reused_and_their_stale_records_never_read(tmp_path: Path) -> None:
    async with Life(tmp_path) as life:
        for i in range(100):
            await append(life.wal, i, bytes([i]) * 1500)
            await durable(life.wal)
            await life.wal.trim(life.wal.durable_offset)
        assert life.wal.stats()["disk_bytes"] <= 4 * SEGMENT
        assert life.wal.stats()["spares"] >= 1
        end = life.wal.end_offset
    async with Life(tmp_path, 2) as life:
        assert life.wal.end_offset == end + HEADER_BYTES
        assert life.wal.start_offset > 64
        assert data_of(life.records)[-1] == bytes([99]) * 1500


async def test_epochs_are_recorded_in_file_and_log_and_never_go_back(tmp_path: Path) -> None:
    async with Life(tmp_path, 1) as life:
        await append(life.wal, 0, b"one")
    async with Life(tmp_path, 3) as life:
        with pytest.raises(Fenced):
            await life.wal.begin_epoch(3)
        await life.wal.begin_epoch(5)
        await append(life.wal, 1, b"two")
        starts = [(r.master_epoch, r.offset) for r in life.records if r.type is WalRecordType.EPOCH_START]
        assert starts == [(1, 0)]
        assert life.wal.epoch_history.entries == ((1, 0), (3, 131), (5, 195))
    async with Life(tmp_path, None) as life:
        assert [r.master_epoch for r in life.records] == [1, 1, 3, 5, 5]
        with pytest.raises(Fenced):
            await life.wal.begin_epoch(4)


async def test_a_missing_epoch_file_is_made_anew_from_the_records(tmp_path: Path) -> None:
    for epoch in (1, 4):
        async with Life(tmp_path, epoch) as life:
            await append(life.wal, epoch, b"x")
    before = life.wal.epoch_history
    os.unlink(tmp_path / "epochs")
    async with Life(tmp_path, None) as life:
        assert life.wal.epoch_history == before


async def test_a_damaged_or_contradicting_epoch_file_is_refused(tmp_path: Path) -> None:
    async with Life(tmp_path, 1) as life:
        await append(life.wal, 0, b"x")
    flip_bit(tmp_path / "epochs", 99)
    with pytest.raises(CorruptData, match="epochs"):
        async with Life(tmp_path):
            pass


async def test_headers_carry_a_confirm_offset_that_is_durable_here(tmp_path: Path) -> None:
    async with Life(tmp_path) as life:
        first = await append(life.wal, 0, b"x")
        await durable(life.wal)
        life.wal.note_confirmed(first)
        life.wal.note_confirmed(5)  # never goes back
        await append(life.wal, 1, b"y")
        life.wal.note_confirmed(1 << 40)  # confirmed by others, not durable here
        second = await append(life.wal, 2, b"z")
        await durable(life.wal)
    disk = FileDisk(tmp_path)
    wal = make_wal(disk)
    assert first <= await wal.recover(lambda _record: None) < second
    await wal.close()
    await disk.close()


async def test_reset_starts_an_empty_log_at_the_committed_offset(tmp_path: Path) -> None:
    async with Life(tmp_path, 1) as life:
        for i in range(10):
            await append(life.wal, i, bytes(2000))
    async with Life(tmp_path, None) as life:
        await life.wal.reset(1 << 50)
        await life.wal.begin_epoch(2)
        await append(life.wal, 0, b"new")
        assert (life.wal.start_offset, life.wal.durable_offset) == (1 << 50, (1 << 50) + 64)
    async with Life(tmp_path, 3) as life:
        assert data_of(life.records) == [b"new"]
        assert life.records[0].offset == 1 << 50


async def test_async_flush_acknowledges_the_write_and_syncs_behind(tmp_path: Path) -> None:
    async with Life(tmp_path, flush="async", flush_interval_ms=1) as life:
        for i in range(30):
            await append(life.wal, i, bytes(1000))
        await until(lambda: life.wal.stats()["unsynced_bytes"] == 0)
    async with Life(tmp_path, 2) as life:
        assert len(data_of(life.records)) == 30


async def test_records_are_read_back_by_offset(tmp_path: Path) -> None:
    async with Life(tmp_path) as life:
        wal = life.wal
        offsets = [await append(wal, i, bytes([i]) * 1000) for i in range(20)]
        await durable(wal)
        seen, at = [], 0
        while records := await wal.read_records(at, 3000):
            seen += records
            at = records[-1].end_offset
        assert at == wal.end_offset
        assert data_of(seen) == [bytes([i]) * 1000 for i in range(20)]
        (one,) = await wal.read_records(offsets[3], 1)
        assert one.base_offset == 4
        with pytest.raises(CorruptData):
            await wal.read_records(offsets[3] + 1, 1)
        await wal.trim(offsets[10])
        with pytest.raises(NotFound):
            await wal.read_records(offsets[3], 1)


async def test_a_cancelled_trim_or_epoch_leaves_nothing_half_done(tmp_path: Path) -> None:
    async with Life(tmp_path) as life:
        for i in range(20):
            await append(life.wal, i, bytes(1500))
        await durable(life.wal)
        for work in (life.wal.trim(life.wal.durable_offset), life.wal.begin_epoch(2)):
            task = asyncio.create_task(work)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert life.wal.stats()["segments"] == 1
        assert life.wal.master_epoch == 2
        await append(life.wal, 20, b"x")
    async with Life(tmp_path, 3) as life:
        assert data_of(life.records)[-1] == b"x"


@pytest.mark.parametrize(
    "changes",
    [
        {"segment_bytes": 100},
        {"max_record_bytes": 1 << 32},
        {"max_record_bytes": 0},
        {"max_bytes": SEGMENT},
        {"flush_interval_ms": 0},
    ],
)
def test_sizes_that_cannot_work_are_refused(changes: WalChanges) -> None:
    with pytest.raises(ConfigError, match=r"wal\."):
        check_settings(small(**changes))


async def test_a_missing_newest_file_is_found_after_a_crash(tmp_path: Path) -> None:
    async with Life(tmp_path / "wal") as life:
        for base in range(40):
            await append(life.wal, base, b"x" * 1000)
        await durable(life.wal)
        newest = max((tmp_path / "wal").glob("*.wal"))
        assert newest != min((tmp_path / "wal").glob("*.wal"))

        def noted() -> bool:
            return decode_epoch_file((tmp_path / "wal" / EPOCH_FILE).read_bytes()).durable_offset > int(newest.stem)

        await until(noted, 10.0)
        shutil.copytree(tmp_path / "wal", tmp_path / "crashed")
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "crashed", whole)
    async with Life(whole, None) as life:
        assert len(data_of(life.records)) == 40
    (tmp_path / "crashed" / newest.name).unlink()
    with pytest.raises(CorruptData, match="was durable"):
        async with Life(tmp_path / "crashed", None):
            pass


async def test_a_file_that_begins_while_another_is_being_noted_is_noted_too(tmp_path: Path) -> None:
    class HeldNotes(FileDisk):
        """Epoch files are stored only while `go` is set."""

        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.go = asyncio.Event()
            self.go.set()
            self.held = 0

        async def replace(self, name: str, data: Buffer) -> None:
            self.held += not self.go.is_set()
            await self.go.wait()
            await super().replace(name, data)

    def noted_end() -> int:
        return decode_epoch_file((tmp_path / EPOCH_FILE).read_bytes()).durable_offset

    def newest() -> int:
        return max(int(each.stem) for each in tmp_path.glob("*.wal"))

    disk = HeldNotes(tmp_path)
    wal = make_wal(disk)
    await recovered(wal)
    await wal.begin_epoch(1)
    disk.go.clear()
    base = 0
    while not disk.held:
        await append(wal, base, b"x" * 1000)
        base += 1
    noted = newest()
    while newest() == noted:
        await append(wal, base, b"x" * 1000)
        base += 1
    await durable(wal)
    disk.go.set()
    await until(lambda: noted_end() > newest(), 10.0)  # although nothing more is written
    await wal.close()
    await disk.close()


async def test_a_log_that_is_not_continued_is_kept_under_another_name(tmp_path: Path) -> None:
    async with Life(tmp_path) as life:
        for base in range(40):
            await append(life.wal, base, b"x" * 1000)
        await durable(life.wal)
    files = contents(tmp_path, ".wal")
    epochs = (tmp_path / EPOCH_FILE).read_bytes()
    async with Life(tmp_path, None) as life:
        await life.wal.reset(5_000_000, ".rejected-2")
        await life.wal.begin_epoch(2)
        await append(life.wal, 0, b"new")
        await durable(life.wal)
    assert contents(tmp_path, ".wal.rejected-2") == files
    assert decode_epoch_file((tmp_path / f"{EPOCH_FILE}.rejected-2").read_bytes()) == decode_epoch_file(epochs)
    async with Life(tmp_path, None) as life:
        assert data_of(life.records) == [b"new"]
        assert life.wal.start_offset == 5_000_000

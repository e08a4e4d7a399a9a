"""`RaftConsensus`: pysyncobj hardened, as a member that is alone. Several members: `test_quorum.py`."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.controller.controller_helpers import until
from tests.support.fillable_files import FillableFiles
from tidelog.controller.model.errors import NotController, OutcomeUnknown
from tidelog.controller.raft import files as files_module
from tidelog.controller.raft.runner import system_surroundings
from tidelog.controller.raft.thread import RaftConsensus, RaftSettings
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError, CorruptData, InvalidInput, StorageFailed
from tidelog.runtime.task_errors import ERRORS


class Counter:
    """A state machine that remembers what it was given."""

    def __init__(self) -> None:
        self.applied: list[bytes] = []
        self.indexes: list[int] = []

    def apply(self, blob: bytes, index: int) -> bytes:
        self.applied.append(blob)
        self.indexes.append(index)
        return b"done " + blob

    def flush(self) -> None:
        pass

    def level(self) -> int:
        return 1

    def freeze(self) -> Callable[[], bytes]:
        data = b"\n".join(self.applied)
        return lambda: data

    def load(self, data: bytes) -> None:
        self.applied = data.split(b"\n") if data else []


async def started(directory: Path, **kwargs: object) -> tuple[RaftConsensus, Counter]:
    raft = RaftConsensus(RaftSettings(directory=directory, **kwargs), SystemClock())  # type: ignore[arg-type]
    machine = Counter()
    await raft.start(machine)
    return raft, machine


async def leads(raft: RaftConsensus) -> None:
    await until(lambda: raft.role.is_leader)


async def leave_a_snapshot(directory: Path) -> None:
    """Have a member leave a snapshot and a journal behind."""
    raft, _ = await started(directory, snapshot_entries=10)
    await leads(raft)
    for step in range(30):
        await raft.propose(b"%d" % step, 60)
    await until((directory / "snapshot").exists)
    await raft.close()


async def test_a_single_member_leads_at_once_and_remembers_everything(tmp_path: Path) -> None:
    begin = time.monotonic()
    expected: list[bytes] = []
    for turn in range(3):
        raft, machine = await started(tmp_path)
        await leads(raft)
        await raft.barrier(60)
        assert machine.applied == expected
        assert raft.role.term == turn + 1
        for step in range(10):
            blob = b"%d.%d" % (turn, step)
            assert await raft.propose(blob, 60) == b"done " + blob
            expected.append(blob)
        assert machine.indexes == sorted(set(machine.indexes))
        await raft.close()
    assert time.monotonic() - begin < 30


async def test_snapshots_keep_the_journal_short_and_the_state_whole(tmp_path: Path) -> None:
    raft, machine = await started(tmp_path, snapshot_entries=50)
    await until(lambda: raft.role.is_leader)
    for step in range(200):
        await raft.propose(b"%d" % step, 60)
    await until(lambda: int(raft.status()["journal_entries"]) < 50)
    await raft.propose(b"last", 60)
    expected = list(machine.applied)
    await raft.close()
    raft, machine = await started(tmp_path, snapshot_entries=50)
    await until(lambda: raft.role.is_leader)
    await raft.barrier(60)
    assert machine.applied == expected and len(expected) == 201
    await raft.close()


async def test_snapshots_keep_the_journal_short_in_bytes_too(tmp_path: Path) -> None:
    """However few entries it has: 10,000 commits of many streams would be 570 MB, in memory and at each start."""
    bound, size = 200_000, 10_000
    raft, machine = await started(tmp_path, snapshot_bytes=bound)
    await until(lambda: raft.role.is_leader)
    for step in range(60):
        await raft.propose(b"%d".ljust(size) % step, 60)
    await until(lambda: int(raft.status()["journal_bytes"]) <= bound)
    await raft.propose(b"last", 60)
    expected = list(machine.applied)
    await raft.close()
    raft, machine = await started(tmp_path, snapshot_bytes=bound)
    await until(lambda: raft.role.is_leader)
    await raft.barrier(60)
    assert machine.applied == expected and len(expected) == 61
    await raft.close()


async def test_a_damaged_snapshot_or_journal_stops_the_start(tmp_path: Path) -> None:
    await leave_a_snapshot(tmp_path)
    for name in ("journal", "snapshot"):
        path = tmp_path / name
        whole = path.read_bytes()
        path.write_bytes(whole[:40] + bytes([whole[40] ^ 4]) + whole[41:])
        with pytest.raises(CorruptData, match=name):
            await started(tmp_path)
        path.write_bytes(whole)
    (tmp_path / "snapshot").unlink()
    with pytest.raises(CorruptData, match="missing"):
        await started(tmp_path)


async def test_a_state_that_cannot_be_loaded_ends_the_start_whatever_the_reason(tmp_path: Path) -> None:
    class Full(Counter):
        def load(self, data: bytes) -> None:
            raise MemoryError

    await leave_a_snapshot(tmp_path)
    raft = RaftConsensus(RaftSettings(directory=tmp_path), SystemClock())
    async with asyncio.timeout(60):
        with pytest.raises(StorageFailed, match=r"cannot open the Raft log: MemoryError"):
            await raft.start(Full())


async def test_a_full_disk_stalls_commands_and_lets_them_through_later(tmp_path: Path) -> None:
    files = FillableFiles()
    surroundings = dataclasses.replace(system_surroundings(), files=files)
    raft, machine = RaftConsensus(RaftSettings(directory=tmp_path), SystemClock(), surroundings), Counter()
    await raft.start(machine)
    await until(lambda: raft.role.is_leader)
    await raft.barrier(60)
    files.full = True
    with pytest.raises(OutcomeUnknown):
        await raft.propose(b"waits", 0.3)
    assert machine.applied == []
    files.full = False
    assert await raft.propose(b"next", 60) == b"done next"
    assert machine.applied == [b"waits", b"next"]  # the unknown outcome became known
    await raft.close()


async def test_a_failed_fdatasync_ends_the_member_and_acknowledges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Exception] = []
    raft = RaftConsensus(RaftSettings(directory=tmp_path), SystemClock())
    raft.set_on_failed(failures.append)
    machine = Counter()
    await raft.start(machine)
    await until(lambda: raft.role.is_leader)
    await raft.barrier(60)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OutcomeUnknown):
        await raft.propose(b"lost", 5)
    assert len(failures) == 1 and machine.applied == []
    with pytest.raises(NotController):
        await raft.propose(b"more", 5)
    await raft.close()


async def test_an_idle_member_sleeps(tmp_path: Path) -> None:
    raft, _ = await started(tmp_path)
    await until(lambda: raft.role.is_leader)
    begin = time.process_time()
    await asyncio.sleep(1.0)
    assert time.process_time() - begin < 0.25
    await raft.close()


async def test_bounds_and_unsafe_settings_are_refused(tmp_path: Path) -> None:
    raft, _ = await started(tmp_path)
    await until(lambda: raft.role.is_leader)
    with pytest.raises(InvalidInput):
        await raft.propose(bytes((4 << 20) + 1), 5)
    await raft.close()
    with pytest.raises(NotController):
        await raft.propose(b"late", 5)
    members = {1: "127.0.0.1:1", 2: "127.0.0.1:2", 3: "127.0.0.1:3"}
    RaftConsensus(
        RaftSettings(directory=tmp_path, members=members, credentials=Credentials(bytes(16), 1)), SystemClock()
    )
    for credentials in (None, Credentials(bytes(16), 4)):
        with pytest.raises(ConfigError):
            RaftConsensus(RaftSettings(directory=tmp_path, members=members, credentials=credentials), SystemClock())


async def test_a_log_that_cannot_be_written_is_told_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raft, _ = await started(tmp_path)
    await leads(raft)
    await raft.barrier(60)
    assert raft.status()["problem"] == ""

    def full(path: object, data: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        waits = asyncio.create_task(raft.propose(b"waits", 60))
        await until(lambda: "no space left" in raft.status()["problem"])
    assert await waits == b"done waits"
    await until(lambda: raft.status()["problem"] == "")
    await raft.close()


async def test_a_disk_that_is_nearly_full_is_told_before_a_write_fails(tmp_path: Path) -> None:
    class SmallDisk(files_module.SystemFiles):
        left = 1 << 40

        def free_bytes(self, path: Path) -> int:
            return self.left

    files = SmallDisk()
    surroundings = dataclasses.replace(system_surroundings(), files=files)
    raft = RaftConsensus(RaftSettings(directory=tmp_path), SystemClock(), surroundings)
    await raft.start(Counter())
    await leads(raft)
    await until(lambda: raft.status().get("free_bytes") == files.left)
    assert raft.status()["problem"] == ""
    files.left = 5_000
    await until(lambda: "5,000 bytes left" in raft.status()["problem"])
    await raft.close()


async def test_a_turn_that_meets_an_unexpected_exception_is_counted(tmp_path: Path) -> None:
    """It is made up for by the next one; an operator hears of it all the same."""

    class OddDisk(files_module.SystemFiles):
        left = 1

        def free_bytes(self, path: Path) -> int:
            self.left -= 1
            if self.left >= 0:
                raise KeyError("planted")
            return 1 << 40

    heard: list[tuple[str, str, bool]] = []
    unlisten = ERRORS.listen(lambda place, error, ended: heard.append((place, repr(error), ended)))
    surroundings = dataclasses.replace(system_surroundings(), files=OddDisk())
    raft = RaftConsensus(RaftSettings(directory=tmp_path), SystemClock(), surroundings)
    try:
        await raft.start(Counter())
        await leads(raft)
        assert await raft.propose(b"x", 60) == b"done x"
        await until(lambda: bool(heard))
    finally:
        await raft.close()
        unlisten()
    assert heard == [("the Raft thread", "KeyError('planted')", False)]

"""A directory's file system, its free space, and how long it takes to sync: a short probe as a WAL would write.

The probe overwrites blocks of a zero-filled file and syncs each with fdatasync, as the WAL does. Its file has no name
(`O_TMPFILE`, or it is unlinked as soon as it is open), so nothing is left of it, however the process ends.

A disk that hangs answers no probe. So whoever may not wait for it has the probe made by a thread that it need not wait
for, either at the end of the process: `DiskProbes`.

Entry: `probe_disk`; `probe_disks` for several directories, each device once; `DiskProbes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tidelog.runtime.clock import Clock
from tidelog.runtime.text import decoded_mount

BLOCK_BYTES: Final = 4096
FILE_BLOCKS: Final = 64
MAX_SYNCS: Final = 200
BUDGET_S: Final = 1.0
"""A probe ends after so many syncs, or when this is over and `LEAST_SYNCS` were made."""
LEAST_SYNCS: Final = 3
HANGS_S: Final = 20.0
"""Probes that take longer are waited for by nobody: the disk hangs, or is of no use."""
MOUNTS: Final = Path("/proc/self/mountinfo")


class DiskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe saw of one directory."""

    path: str
    """The directory that was asked about."""
    probed: str = ""
    """The directory that was probed: the nearest one above it that exists. Empty: nothing was."""
    holds: list[str] = []
    """Which of a node's folders are on this device."""
    file_system: str = ""
    """The type, as the kernel names it: `ext4`, `tmpfs`, … Empty: not known."""
    mode: int = 0
    """Permission bits of `path`; 0: it does not exist."""
    free_bytes: int = 0
    """What an ordinary user may still write."""
    total_bytes: int = 0
    free_files: int = -1
    """Inodes that are free; -1: the file system has no such limit."""
    syncs: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    error: str = ""
    """Why a file could not be written or synced, in the system's words."""

    @property
    def exists(self) -> bool:
        """Whether the directory itself is there."""
        return self.path == self.probed


def probe_disks(folders: Iterable[Path], clock: Clock, *, budget_s: float = BUDGET_S) -> list[DiskFacts]:
    """Probe the directories, each device once; `holds` names those that share it. The first of each counts."""
    return list(_each_disk(folders, clock, budget_s))


def _each_disk(folders: Iterable[Path], clock: Clock, budget_s: float) -> Iterator[DiskFacts]:
    devices: dict[object, list[Path]] = {}
    for folder in folders:
        found = nearest_existing(folder)
        devices.setdefault(os.stat(found).st_dev if found is not None else folder, []).append(folder)
    for same in devices.values():
        facts = probe_disk(same[0], clock, budget_s=budget_s)
        yield msgspec.structs.replace(facts, holds=[str(each) for each in same])


class DiskProbes:
    """The probes of some directories, as often as they are asked for. Used on the event loop's thread.

    One thread probes at a time. What a disk that hangs has not answered is waited for again by the next one who asks.
    """

    def __init__(self, folders: Sequence[Path], clock: Clock) -> None:
        self._folders = folders
        self._clock = clock
        self._ended: asyncio.Future[None] | None = None
        """Of the newest probe; its thread has ended then."""
        self._found: list[DiskFacts] = []

    async def run(self) -> list[DiskFacts]:
        """Probe as `probe_disks` does, for `HANGS_S` at most: what has no answer by then is told as hanging."""
        if self._ended is None or self._ended.done():
            loop = asyncio.get_running_loop()
            ended, self._found = loop.create_future(), []
            self._ended = ended
            threading.Thread(target=self._probe, args=(loop, ended, self._found), daemon=True, name="probe").start()
        await asyncio.wait([self._ended], timeout=HANGS_S)
        if self._ended.done():
            self._ended.result()
            return self._found
        answered = {each for facts in self._found for each in facts.holds}
        return self._found + [
            DiskFacts(path=str(each), error=f"a probe has had no answer for {HANGS_S:.0f} s: the disk hangs")
            for each in self._folders
            if str(each) not in answered
        ]

    def _probe(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None], found: list[DiskFacts]) -> None:
        error: Exception | None = None
        try:
            found.extend(_each_disk(self._folders, self._clock, BUDGET_S))
        except Exception as failure:  # noqa: BLE001  # raised again where the probe is waited for
            error = failure

        def end() -> None:
            if error is not None:
                ended.set_exception(error)
                ended.exception()  # nobody may ask any more
            else:
                ended.set_result(None)

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(end)


def probe_disk(path: Path, clock: Clock, *, budget_s: float = BUDGET_S) -> DiskFacts:
    """Look at the file system under `path`, and sync a nameless file on it for at most about `budget_s`."""
    probed = nearest_existing(path)
    if probed is None:
        return DiskFacts(path=str(path), error="no directory above it exists")
    try:
        space = os.statvfs(probed)
    except OSError as error:
        return DiskFacts(path=str(path), probed=str(probed), error=error.strerror or str(error))
    facts = DiskFacts(
        path=str(path),
        probed=str(probed),
        file_system=file_system_of(probed),
        mode=path.stat().st_mode & 0o7777 if probed == path else 0,
        free_bytes=space.f_bavail * space.f_frsize,
        total_bytes=space.f_blocks * space.f_frsize,
        free_files=space.f_favail if space.f_files else -1,
    )
    try:
        took_ms = sorted(_sync_times_ms(probed, clock, budget_s))
    except OSError as error:
        return msgspec.structs.replace(facts, error=error.strerror or str(error))
    return msgspec.structs.replace(
        facts,
        syncs=len(took_ms),
        p50_ms=quantile(took_ms, 0.5),
        p99_ms=quantile(took_ms, 0.99),
        max_ms=took_ms[-1],
    )


def nearest_existing(path: Path) -> Path | None:
    """Return `path` if it is a directory that this user can see, else the nearest one above it that is."""
    for each in (path, *path.absolute().parents):
        if os.path.isdir(each):  # of what it may not look at, `Path.is_dir` raises
            return each
    return None


def quantile(ordered: list[float], share: float) -> float:
    """Return the smallest of the values that at least `share` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _sync_times_ms(directory: Path, clock: Clock, budget_s: float) -> Iterator[float]:
    with _nameless_file(directory) as file:
        os.pwrite(file, bytes(BLOCK_BYTES * FILE_BLOCKS), 0)
        os.fsync(file)
        block = os.urandom(BLOCK_BYTES)
        started = clock.monotonic()
        for count in range(MAX_SYNCS):
            before = clock.monotonic()
            if count >= LEAST_SYNCS and before - started > budget_s:
                return
            os.pwrite(file, block, count % FILE_BLOCKS * BLOCK_BYTES)
            os.fdatasync(file)
            yield (clock.monotonic() - before) * 1000


@contextlib.contextmanager
def _nameless_file(directory: Path) -> Iterator[int]:
    """Open a new file without a name in `directory`."""
    try:
        file = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # a file system that has no such files; what else is wrong, the next line tells
        file, name = tempfile.mkstemp(prefix=".doctor-", dir=directory)
        os.unlink(name)
    try:
        yield file
    finally:
        os.close(file)


def file_system_of(directory: Path) -> str:
    """Return the type of the file system that holds `directory`; empty where the system does not tell."""
    try:
        text = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
    return file_system_in(text, directory.resolve())


def file_system_in(mounts: str, directory: Path) -> str:
    """As `file_system_of`, from the text of `/proc/self/mountinfo`: of nested mounts the last of the deepest."""
    best, found = -1, ""
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        columns = fields.split(" ")
        if len(columns) < 5 or not rest:
            continue
        point = Path(decoded_mount(columns[4]))
        depth = len(point.parts)
        if depth >= best and (point == directory or point in directory.parents):
            best, found = depth, rest.split(" ")[0]
    return found

"""The files of a WAL: their names, and the pool that prepares the next one before it is needed.

A segment file `<start offset, 20 digits>.wal` holds the WAL from that offset on; byte i of the file is WAL offset
start + i. The next file begins exactly where the records of this one end, so WAL offsets do not depend on how a member
divides its log into files. Spare files `<number>.spare` are whole files of zeros actually written (or of stale records,
when recycled), synced before they get that name; `*.tmp` is an incomplete spare, removed at recovery.

Appends write only to allocated blocks, so an append never meets a full disk. The pool does:
it retries with back-off, and while it has no spare the WAL raises `WalFull` where it would need one.

Invariant: live files + spares (ready and in preparation) ≤ max_bytes, except for the 64 bytes of an epoch's start
record that a log at its limit still takes.

Entry: `WalSegment`, `SegmentPool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from tidelog.runtime.backoff import Backoff
from tidelog.runtime.disk import Disk, DiskFile
from tidelog.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

SEGMENT_SUFFIX = ".wal"
SPARE_SUFFIX = ".spare"
TEMPORARY_SUFFIX = ".tmp"
_DIGITS = 20
_MAX_RECYCLED = 8
"""Files kept for reuse after a trim; further ones are removed.

Uploads commit several at a time, so several files become free at once, as many as are needed until the next commits.
With 2 kept, one segment in five to eight was removed and another filled with zeros under full load.
8 of 64 MiB are the log cache's size.
"""
AT_BOUND = "the WAL is at its bound (wal.max_bytes) and waits for uploads"
"""Why there is no spare: a value of `SegmentPool.blocked`."""
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})


def is_passing(error: OSError) -> bool:
    """Return whether the error is a temporary shortage (a full disk, too many files) and not a broken disk."""
    return error.errno in _PASSING


def segment_name(start_offset: int) -> str:
    """Return the file name of the segment that begins at `start_offset`."""
    return f"{start_offset:0{_DIGITS}d}{SEGMENT_SUFFIX}"


def parse_segment_name(name: str) -> int | None:
    """Return the start offset in a segment's file name; None for any other name."""
    stem = name.removesuffix(SEGMENT_SUFFIX)
    if len(stem) != _DIGITS or stem == name or not (stem.isascii() and stem.isdigit()):
        return None
    return int(stem)


def is_kept_segment(name: str) -> bool:
    """Return whether a file is a segment that a log has kept, under a suffix, when it started over."""
    return f"{SEGMENT_SUFFIX}." in name


@dataclass(slots=True)
class WalSegment:
    """One file of the log."""

    start: int
    """WAL offset of its first byte."""
    file: DiskFile

    @property
    def limit(self) -> int:
        """Return the WAL offset after the file's last byte; the records may end before."""
        return self.start + self.file.size


class SegmentPool:
    """Keeps a zero-filled (or recycled) file ready for when the current one is full."""

    def __init__(
        self,
        disk: Disk,
        *,
        segment_bytes: int,
        max_bytes: int,
        rng: random.Random,
        on_change: Callable[[], None],
        on_failed: Callable[[OSError], object],
    ) -> None:
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._max_bytes = max_bytes
        self._rng = rng
        self._on_change = on_change
        self._on_failed = on_failed
        self._spares: list[DiskFile] = []
        self._next_number = 0
        self._wanted = segment_bytes
        self._wake = asyncio.Event()
        self._tasks = TaskSet("wal.spares")
        self.live_bytes = 0
        """Total size of all segment files; updated by the log."""
        self.blocked = ""
        """Why there is no spare now; empty if nothing prevents one."""

    @property
    def spare_bytes(self) -> int:
        """Return the total size of the ready spares."""
        return sum(file.size for file in self._spares)

    @property
    def spares(self) -> int:
        """Return the number of ready spares."""
        return len(self._spares)

    async def adopt(self, name: str) -> None:
        """Adopt a spare that an earlier process left; remove one of another size."""
        stem = name.removesuffix(SPARE_SUFFIX)
        file = await self._disk.open(name)
        fits = self.live_bytes + self.spare_bytes + file.size <= self._max_bytes
        if file.size == self._segment_bytes and stem.isdigit() and fits and len(self._spares) <= _MAX_RECYCLED:
            self._next_number = max(self._next_number, int(stem) + 1)
            self._spares.append(file)
            return
        await file.close()
        await self._disk.remove(name)

    def start(self) -> None:
        """Start keeping a spare ready."""
        self._tasks.keep(self._prepare_spares, "prepare")

    def holds(self, size: int) -> bool:
        """Return whether a spare of at least `size` bytes is ready; if not, request one."""
        if any(file.size >= size for file in self._spares):
            return True
        if size > self._wanted:
            self._wanted = size
            self._wake.set()
        return False

    def take(self, size: int) -> DiskFile | None:
        """Return the smallest ready spare of at least `size` bytes; prepare the next one in the background."""
        if not self.holds(size):
            return None
        file = min((spare for spare in self._spares if spare.size >= size), key=lambda spare: spare.size)
        self._spares.remove(file)
        self.live_bytes += file.size
        self._wanted = self._segment_bytes
        self._wake.set()
        return file

    async def drop_missing(self) -> None:
        """Forget spares that somebody has removed or replaced: others are prepared. Raises `OSError`."""
        for file in list(self._spares):
            if not await file.is_linked() and file in self._spares:  # else it was taken meanwhile, and renamed
                self._spares.remove(file)
                self._wake.set()
                await file.close()

    async def release(self, file: DiskFile) -> None:
        """Keep the file of a trimmed segment for reuse, or remove it, unless it is gone. Durable on return."""
        size = file.size
        if await self._recycle(file):
            self._spares.append(file)
        else:
            await file.close()
            with contextlib.suppress(FileNotFoundError):  # its records are in the bucket; those behind may not be
                await self._disk.remove(file.name)
        self.live_bytes -= size
        self._wake.set()

    async def discard(self, file: DiskFile) -> None:
        """Remove the file of a segment whose records must not be seen again. Durable on return."""
        await file.close()
        await self._disk.remove(file.name)
        self.live_bytes -= file.size
        self._wake.set()

    async def discard_spares(self) -> None:
        """Remove the ready spares; others are prepared instead. Durable on return."""
        while self._spares:
            spare = self._spares.pop()
            await spare.close()
            await self._disk.remove(spare.name)
        self._wake.set()

    async def _recycle(self, file: DiskFile) -> bool:
        if file.size != self._segment_bytes or len(self._spares) >= _MAX_RECYCLED:
            return False
        try:
            if not await file.is_linked():
                return False
            await file.rename(f"{self._number():08d}{SPARE_SUFFIX}")
        except OSError as error:
            if not is_passing(error):
                raise
            return False  # no room for a new name: removing the file frees some
        return True

    async def close(self) -> None:
        """Stop preparing and release the files."""
        await self._tasks.close()
        while self._spares:
            await self._spares.pop().close()

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    async def _prepare_spares(self) -> None:
        """As `_keep_ready`, first of all what is missing: it may have been interrupted."""
        self._wake.set()
        await self._keep_ready()

    async def _keep_ready(self) -> None:
        backoff = Backoff(0.05, 2.0, self._rng)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while not self.holds(self._wanted):
                if not await self._make_room():
                    break  # at the limit: a trim wakes this task
                try:
                    await self._prepare(self._wanted)
                except OSError as error:
                    if not is_passing(error):
                        self._on_failed(error)
                        return
                    self._note_blocked(f"the next WAL file cannot be prepared: {error.strerror}")
                    await self._pause(backoff.next_delay_s())
                else:
                    backoff.reset()
            else:
                self._note_free()

    async def _make_room(self) -> bool:
        """Return whether a file of the wanted size stays within the limit; remove spares that are too small."""
        while self.live_bytes + self.spare_bytes + self._wanted > self._max_bytes:
            if not self._spares:
                self._note_blocked(AT_BOUND)
                return False
            spare = self._spares.pop()
            await spare.close()
            await self._disk.remove(spare.name)
        return True

    async def _prepare(self, size: int) -> None:
        name = f"{self._number():08d}"
        file: DiskFile | None = None
        try:
            file = await self._disk.open(name + TEMPORARY_SUFFIX, create=True)
            await file.fill_zeros(0, size)
            await file.rename(name + SPARE_SUFFIX)
        except BaseException:
            if file is not None:
                await file.close()
            with contextlib.suppress(FileNotFoundError):  # cancelled after the rename: a spare for the next process
                await self._disk.remove(name + TEMPORARY_SUFFIX if file is None else file.name)
            raise
        self._spares.append(file)

    async def prepare_beyond_bound(self, size: int) -> None:
        """Prepare a spare of `size` bytes although the limit is reached. Raises `OSError`.

        For an epoch's start record: a log at its limit must start, or it could never be uploaded and trimmed.
        """
        await self._prepare(size)

    async def _pause(self, seconds: float) -> None:
        """Wait until the delay or the next trim, which may have made room."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()

    def _note_blocked(self, reason: str) -> None:
        if reason != self.blocked:
            logger.warning("the WAL has no spare file", extra={"reason": reason, "live_bytes": self.live_bytes})
        self.blocked = reason
        self._on_change()

    def _note_free(self) -> None:
        if self.blocked:
            logger.info("the WAL has a spare file again")
        self.blocked = ""
        self._on_change()

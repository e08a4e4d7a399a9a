"""`Disk`, the interface to the files of a write-ahead log.

A disk is one flat directory of files. It has two lanes:

- The *ordered lane*: `DiskFile.write`, `sync` and `publish` return at once and run strictly in the order of submission,
  over all files of the disk. Each ends with one call of its `done` on the event loop, in that order, and after the
  submitting call has returned, except for a write with `may_block`.
- The *background lane*: all `async` methods (open, read, fill with zeros, list, rename, remove, replace). Calls on one
  file must not conflict with writes of the ordered lane that are in progress.

Invariants for the log above:
1. `done(None)` of a write with `sync=True`, or of a sync, means: those bytes, and all bytes submitted for the same file
   before them, survive a power loss.
2. After a failed operation in the ordered lane every later one of the disk fails with the same error. A failed fsync is
   never repeated, because the kernel may already have dropped the dirty pages. An exception that is no `OSError` is a
   failure, too, and is reported as EIO. So is a writer thread that has ended by itself, when the next operation is
   submitted: what it had taken may be missing before what follows.
3. `publish`, `rename`, `remove`, `replace` and a newly created file's name are durable (directory fsync) when they
   report success.

Errors are plain `OSError`s with their errno. The log above decides which cause back-pressure and which are fatal.

`FileDisk`, the real implementation, has one writer thread that merges everything that arrived during the last fdatasync
into one `pwritev` and one `fdatasync` (group commit), and two helper threads for the background lane.

A single small write is answered faster if the loop waits for it than if it is called back, because its wake-up costs as
much as a good part of a sync. The calling thread, the event loop's, therefore waits for a write with `may_block` while
the disk is fast and lightly loaded:
- The last group took no longer than `QUICK_S`. For a slower one, and for the first one, the loop does not wait.
- The lane has been idle since the last group for `REST` times as long as that took. The loop therefore spends at most a
  fifth of its time on such syncs. Under load the lane is hardly ever idle, and writes are merged.

It waits for `WAIT_S` at most: a disk that hangs right after a fast sync does not stop the loop, which is called back
when the disk answers.

The two threads wake each other with eventfds, not with locks. A lock's release wakes the other thread while the GIL is
still held, and both then contend for it; a write to an eventfd gives up the GIL first, so the woken thread finds it
free.

Entry: `FileDisk`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from tidelog.runtime.scheduling import wake_promptly
from tidelog.runtime.types import Buffer

logger = logging.getLogger(__name__)

Done = Callable[[OSError | None], None]
T = TypeVar("T")

_IOV_MAX = 1024
"""The kernel's bound on buffers in one vectored write (UIO_MAXIOV)."""
_GROUP_BYTES = 16 << 20
"""Bound on one group commit, so that its first record does not wait for megabytes of later ones."""
_ZERO_PIECE = 4 << 20
"""Zeros are written and synced in pieces, so that filling a spare file does not saturate the device's queue."""
_ZEROS = memoryview(bytes(_ZERO_PIECE))
QUICK_S = 0.001
"""If the last group took longer, the loop's thread does not wait for the next one."""
WAIT_S = 0.005
"""The longest time that the loop's thread waits for a group."""
REST = 4
"""Idle time after a group before the loop's thread may wait for one, as a multiple of the group's duration."""
INLINE_BYTES = 64 << 10
"""The loop does not wait for larger writes: copying them would block it too long."""
_ONE = struct.pack("=Q", 1)
"""What is written to an eventfd to add one."""
_TEMPORARY = ".tmp"
"""Suffix of files that a crash may leave incomplete; their owner removes them at recovery."""


class FileInfo(NamedTuple):
    """One directory entry."""

    name: str
    size: int
    """Bytes."""


class DiskFile(Protocol):
    """One open file. Offsets and sizes are bytes (int64)."""

    @property
    def name(self) -> str:
        """Return the file's current name (after the last submitted rename or publish)."""
        ...

    @property
    def size(self) -> int:
        """Return the size when opened, or after `fill_zeros`. Writes of the ordered lane stay below it."""
        ...

    def write(self, offset: int, buffers: Sequence[Buffer], *, sync: bool, done: Done, may_block: bool = False) -> None:
        """Submit a write of the concatenated `buffers` at `offset`; with `sync` it is durable when done.

        The buffers (contiguous, of bytes) must not change until `done` was called. With `may_block` the write may run
        in the calling thread if the disk is fast, and `done` may be called before this method returns.
        """
        ...

    def sync(self, done: Done) -> None:
        """Submit a sync of everything submitted for this file so far."""
        ...

    def publish(self, name: str, done: Done) -> None:
        """Submit a durable rename to `name`. Later writes start only after it is durable."""
        ...

    async def rename(self, name: str) -> None:
        """Rename the file durably, in the background lane."""
        ...

    async def read(self, offset: int, length: int) -> bytes:
        """Return up to `length` bytes from `offset`; fewer only at the end of the file."""
        ...

    async def fill_zeros(self, offset: int, length: int) -> None:
        """Write zeros over the range and sync, growing the file if needed. Not atomic."""
        ...

    async def is_linked(self) -> bool:
        """Return whether the file's name still leads to it: nobody has removed it, or put another in its place.

        May be wrong while the file is renamed or removed. Raises `OSError`.
        """
        ...

    async def settle(self) -> None:
        """Sync, and make later reads return the content of the device.

        After an fsync error the page cache may return bytes that never reached the device (and mark them clean).
        """
        ...

    async def close(self) -> None:
        """Close the file after all its operations have ended."""
        ...


class Disk(Protocol):
    """One flat directory of files. Names hold no '/'."""

    async def open(self, name: str, *, create: bool = False, read_only: bool = False) -> DiskFile:
        """Open a file. `create` creates an empty one, and raises `FileExistsError` if the file exists.

        Raises `FileNotFoundError` and other `OSError`s.
        """
        ...

    async def entries(self) -> list[FileInfo]:
        """Return all files, sorted by name; empty if the directory does not exist."""
        ...

    async def remove(self, name: str) -> None:
        """Remove a file durably. Raises `FileNotFoundError`."""
        ...

    async def load(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""
        ...

    async def replace(self, name: str, data: Buffer) -> None:
        """Replace the content of a small file atomically and durably: after a crash it is the old or the new one."""
        ...

    async def free_bytes(self) -> int:
        """Return the bytes that an unprivileged process may still write to the file system."""
        ...

    async def close(self) -> None:
        """Stop the threads after all submitted operations. The caller closes its open files first."""
        ...


class _Event:
    """An eventfd that one thread sets and another one waits for (see the module docstring). It may be set early."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def set(self) -> None:
        """End the present wait, or the next one."""
        os.write(self._fd, _ONE)

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until it was set since the last wait; False if it was not within `timeout_s`."""
        if timeout_s < math.inf and not self._poll.poll(timeout_s * 1000):
            return False
        os.read(self._fd, len(_ONE))
        return True

    def close(self) -> None:
        """Release the descriptor. Nobody may wait, or set it afterwards."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass(slots=True)
class _Operation:
    """One submitted operation of the ordered lane: a write, a publish (`new_name`), a sync, or a close."""

    file: FileDiskFile
    done: Done
    offset: int = 0
    buffers: Sequence[Buffer] = ()
    size: int = 0
    """Bytes in all buffers."""
    sync: bool = False
    close: bool = False
    old_name: str = ""
    new_name: str = ""


def _pwritev(fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all of `buffers` at `offset`, continuing after partial writes."""
    for first in range(0, len(buffers), _IOV_MAX):
        chunk = buffers[first : first + _IOV_MAX]
        total = sum(map(len, chunk))
        written = os.pwritev(fd, chunk, offset)
        if written < total:
            _pwrite_rest(fd, chunk, offset, written)
        offset += total


def _pwrite_rest(fd: int, buffers: Sequence[Buffer], offset: int, skip: int) -> None:
    offset += skip
    for buffer in buffers:
        view = memoryview(buffer)[skip:]
        skip = max(0, skip - len(buffer))
        while view:
            written = os.pwrite(fd, view, offset)
            if written == 0:
                raise OSError(errno.EIO, "the device accepted no bytes")
            view = view[written:]
            offset += written


def _fsync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class FileDiskFile:
    """A `DiskFile` on a real file system. Made by `FileDisk.open`."""

    def __init__(self, disk: FileDisk, name: str, fd: int, opened: os.stat_result) -> None:
        self._disk = disk
        self._name = name
        self._fd = fd
        self._opened = opened
        self._size = opened.st_size
        self._closed: asyncio.Future[None] | None = None

    @property
    def name(self) -> str:
        """See `DiskFile.name`."""
        return self._name

    @property
    def size(self) -> int:
        """See `DiskFile.size`."""
        return self._size

    def write(self, offset: int, buffers: Sequence[Buffer], *, sync: bool, done: Done, may_block: bool = False) -> None:
        """See `DiskFile.write`."""
        disk, size = self._disk, sum(map(len, buffers))
        operation = _Operation(self, done, offset, buffers, size, sync)
        if may_block and size <= INLINE_BYTES and disk._is_quick():
            disk._write_here(operation)
        else:
            disk._submit(operation)

    def sync(self, done: Done) -> None:
        """See `DiskFile.sync`."""
        self._disk._submit(_Operation(self, done, sync=True))

    def publish(self, name: str, done: Done) -> None:
        """See `DiskFile.publish`."""
        self._disk._submit(_Operation(self, done, old_name=self._name, new_name=name))
        self._name = name

    async def rename(self, name: str) -> None:
        """See `DiskFile.rename`."""
        await self._disk._run(self._disk._rename, self._name, name)
        self._name = name

    async def read(self, offset: int, length: int) -> bytes:
        """See `DiskFile.read`."""
        return await self._disk._run(self._read, offset, length)

    async def fill_zeros(self, offset: int, length: int) -> None:
        """See `DiskFile.fill_zeros`."""
        end = offset + length
        while offset < end:
            piece = min(_ZERO_PIECE, end - offset)
            await self._disk._run(self._fill_piece, offset, piece)
            offset += piece
            self._size = max(self._size, offset)
        await self._disk._run(os.fsync, self._fd)

    async def is_linked(self) -> bool:
        """See `DiskFile.is_linked`. No other file gets the inode's number while this one is open."""
        try:
            named = await self._disk._run(os.stat, self._disk._full(self._name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(named, self._opened)

    async def settle(self) -> None:
        """See `DiskFile.settle`."""
        await self._disk._run(self._settle)

    async def close(self) -> None:
        """See `DiskFile.close`."""
        if self._closed is None:
            closed = self._closed = asyncio.get_running_loop().create_future()
            self._disk._submit(_Operation(self, lambda _error: closed.set_result(None), close=True))
        await asyncio.shield(self._closed)

    def _read(self, offset: int, length: int) -> bytes:
        data = os.pread(self._fd, length, offset)
        if len(data) == length or not data:
            return data
        parts = [data]
        got = len(data)
        while got < length and (data := os.pread(self._fd, length - got, offset + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def _fill_piece(self, offset: int, length: int) -> None:
        _pwritev(self._fd, (_ZEROS[:length],), offset)
        os.fdatasync(self._fd)

    def _settle(self) -> None:
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _commit(self, operations: Sequence[_Operation]) -> None:
        """Run consecutive operations of this file (writer thread): one write per contiguous range, one fdatasync."""
        buffers: list[Buffer] = []
        start = end = 0
        sync = False
        for operation in operations:
            if operation.new_name:
                if buffers:
                    _pwritev(self._fd, buffers, start)
                    buffers = []
                self._disk._rename(operation.old_name, operation.new_name)
            if operation.buffers:
                if buffers and operation.offset != end:
                    _pwritev(self._fd, buffers, start)
                    buffers = []
                if not buffers:
                    start = end = operation.offset
                buffers.extend(operation.buffers)
                end += operation.size
            sync = sync or operation.sync
        if buffers:
            _pwritev(self._fd, buffers, start)
        if sync:
            os.fdatasync(self._fd)


class FileDisk:
    """A `Disk` in a directory of a real file system. The directory is created with the first file.

    Belongs to the event loop that first used it. `name` is used for its threads.
    """

    def __init__(self, path: str | os.PathLike[str], *, name: str = "wal") -> None:
        self._path = os.fspath(path)
        self._name = name
        self._queue: deque[_Operation | None] = deque()
        self._idle = False
        """Whether the writer thread waits for `_submitted`, or is about to."""
        self._submitted = _Event()
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix=f"{name}-disk")
        self._writer: threading.Thread | None = None
        self._error: OSError | None = None  # set by the thread that commits; only one does at a time
        # The loop's view of the ordered lane:
        self._under_way = 0  # operations that the writer thread has not completed
        self._rests_until = 0.0
        self._last_group_s = math.inf
        self.groups = 0
        """Number of committed groups; operations per group measure the merging."""
        self.groups_here = 0
        """Number of groups that the loop's thread has waited for."""
        self._handing = threading.Lock()
        """Held to decide whether a group is reported to the waiting loop, or by a call."""
        self._awaited = False
        self._arrived = _Event()
        """Set once for each group put into `_reported`, for the loop that waits for it."""
        self._reported: deque[tuple[list[tuple[Done, OSError | None]], float]] = deque()

    @property
    def path(self) -> str:
        """Return the directory."""
        return self._path

    async def open(self, name: str, *, create: bool = False, read_only: bool = False) -> FileDiskFile:
        """See `Disk.open`."""
        opened: list[tuple[int, os.stat_result]] = []
        try:
            await self._run(lambda: opened.append(self._open(name, create, read_only)))
        except asyncio.CancelledError:
            for fd, _ in opened:  # the caller was cancelled and cannot close it
                os.close(fd)
            raise
        return FileDiskFile(self, name, *opened[0])

    async def entries(self) -> list[FileInfo]:
        """See `Disk.entries`."""
        return await self._run(self._entries)

    async def remove(self, name: str) -> None:
        """See `Disk.remove`."""
        await self._run(self._remove, name)

    async def load(self, name: str) -> bytes | None:
        """See `Disk.load`."""
        return await self._run(self._load, name)

    async def replace(self, name: str, data: Buffer) -> None:
        """See `Disk.replace`."""
        await self._run(self._replace, name, data)

    async def free_bytes(self) -> int:
        """See `Disk.free_bytes`."""
        status = await self._run(os.statvfs, self._path)
        return status.f_bavail * status.f_frsize

    async def close(self) -> None:
        """See `Disk.close`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            self._put(None)
            await asyncio.get_running_loop().run_in_executor(self._executor, writer.join)
        self._executor.shutdown(wait=True)
        self._submitted.close()
        self._arrived.close()

    # Background lane

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        """Run `function` on a helper thread. A cancelled caller still waits until it has ended.

        Otherwise a file could be closed, and its descriptor reused, during a call that uses it.
        """
        future = asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            future.exception()  # marks it as retrieved: the caller was cancelled
            raise

    def _full(self, name: str) -> str:
        assert name and "/" not in name and name not in (".", ".."), name
        return os.path.join(self._path, name)

    def _ensure_directory(self) -> None:
        if os.path.isdir(self._path):
            return
        os.makedirs(self._path, exist_ok=True)
        _fsync_directory(os.path.dirname(os.path.abspath(self._path)))

    def _open(self, name: str, create: bool, read_only: bool) -> tuple[int, os.stat_result]:
        flags = os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)
        if create:
            self._ensure_directory()
            flags |= os.O_CREAT | os.O_EXCL
        fd = os.open(self._full(name), flags, 0o640)
        if create:
            _fsync_directory(self._path)
        return fd, os.fstat(fd)

    def _entries(self) -> list[FileInfo]:
        if not os.path.isdir(self._path):
            return []
        found = []
        with os.scandir(self._path) as entries:
            for entry in entries:
                try:
                    if entry.is_file():
                        found.append(FileInfo(entry.name, entry.stat().st_size))
                except FileNotFoundError:  # removed in the meantime
                    continue
        return sorted(found)

    def _remove(self, name: str) -> None:
        os.unlink(self._full(name))
        _fsync_directory(self._path)

    def _rename(self, old: str, new: str) -> None:
        os.rename(self._full(old), self._full(new))
        _fsync_directory(self._path)

    def _load(self, name: str) -> bytes | None:
        try:
            with open(self._full(name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def _replace(self, name: str, data: Buffer) -> None:
        self._ensure_directory()
        temporary = self._full(name + _TEMPORARY)
        fd = os.open(temporary, os.O_CLOEXEC | os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
        try:
            _pwritev(fd, (data,), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, self._full(name))
        _fsync_directory(self._path)

    # Ordered lane

    def _submit(self, operation: _Operation) -> None:
        if self._writer is None or not self._writer.is_alive():
            if self._writer is not None:  # the next one reports everything that is queued as failed
                logger.critical("the writer thread has ended by itself", extra={"path": self._path})
                self._error = self._error or OSError(errno.EIO, "the writer thread has ended")
            loop = asyncio.get_running_loop()
            self._writer = threading.Thread(
                target=self._write_forever, args=(loop,), name=f"{self._name}-writer", daemon=True
            )
            self._writer.start()
        self._under_way += 1
        self._put(operation)

    def _put(self, operation: _Operation | None) -> None:
        self._queue.append(operation)
        if self._idle:
            self._idle = False
            self._submitted.set()

    def _is_quick(self) -> bool:
        """Whether the loop's thread should wait for a small write (see the module docstring)."""
        if self._under_way or self._last_group_s > QUICK_S or self._error is not None:
            return False
        return time.perf_counter() >= self._rests_until

    def _write_here(self, operation: _Operation) -> None:
        """Have an operation carried out, and wait for it on the loop's thread, for `WAIT_S` at most.

        No other is in progress, so that what is reported meanwhile is this one.
        """
        assert not self._under_way and self._error is None
        with self._handing:
            self._awaited = True
        self._submit(operation)
        if not self._arrived.wait(WAIT_S):
            with self._handing:
                self._awaited = False
                if not self._reported:
                    return  # the writer thread will call the loop
            self._arrived.wait()
        self.groups_here += 1
        self._committed(*self._reported.popleft())

    def _note_group(self, group_s: float) -> None:
        self._last_group_s = group_s
        self._rests_until = max(self._rests_until, time.perf_counter() + REST * group_s)

    def _committed(self, finished: Sequence[tuple[Done, OSError | None]], group_s: float) -> None:
        """Handle a group that the writer thread has committed (on the loop)."""
        self._under_way -= len(finished)
        self._note_group(group_s)
        _report(finished)

    def _write_forever(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the writer thread: commit all submitted operations as one group, report, repeat."""
        wake_promptly()
        while (group := self._next_group()) is not None:
            started = time.perf_counter()
            finished = self._commit(group)
            took_s = time.perf_counter() - started
            self.groups += 1
            with self._handing:
                is_awaited, self._awaited = self._awaited, False
                if is_awaited:
                    self._reported.append((finished, took_s))
            if is_awaited:
                self._arrived.set()
                continue
            try:
                loop.call_soon_threadsafe(self._committed, finished, took_s)
            except RuntimeError:  # the loop was closed: there is no caller
                return

    def _next_group(self) -> list[_Operation] | None:
        """Wait for an operation and return all submitted ones, up to `_GROUP_BYTES`. None: close was requested."""
        waiting = self._queue
        while not waiting:
            self._idle = True
            if not waiting:  # nothing was submitted before the flag was seen
                self._submitted.wait()
            self._idle = False
        operation = waiting.popleft()
        if operation is None:
            return None
        group = [operation]
        size = operation.size
        while size < _GROUP_BYTES and waiting:
            operation = waiting[0]
            if operation is None:  # close comes last by contract: taken after this group
                break
            group.append(operation)
            size += operation.size
            del waiting[0]
        return group

    def _commit(self, group: list[_Operation]) -> list[tuple[Done, OSError | None]]:
        finished: list[tuple[Done, OSError | None]] = []
        first = 0
        while first < len(group):
            file = group[first].file
            last = first + 1
            while last < len(group) and group[last].file is file:
                last += 1
            operations = group[first:last]
            if self._error is None:
                self._error = _failure(file._commit, operations)
            if operations[-1].close:  # the last operation of its file by contract; also after a failure
                self._error = _failure(os.close, file._fd) or self._error
            finished.extend((operation.done, self._error) for operation in operations)
            first = last
        return finished


def _failure(work: Callable[..., None], *args: object) -> OSError | None:
    """Do work of the writer thread; return the error that it ended with."""
    try:
        work(*args)
    except OSError as error:
        return error
    except Exception as error:
        logger.exception("an unexpected error of the writer thread is taken for one of the disk")
        return OSError(errno.EIO, f"{type(error).__name__}: {error}")
    return None


def _report(finished: Sequence[tuple[Done, OSError | None]]) -> None:
    """Call each `done`, in order, before those of a later group. An exception does not prevent the remaining calls."""
    for done, error in finished:
        try:
            done(error)
        except Exception:
            logger.exception("a disk callback raised an exception")

"""`LocalObjectStore`: a bucket in a directory, the embedded default of `tidelog up`.

The object `a/b/c` is the file `<directory>/a/b/c`. The directory holds nothing else but `.tidelog-tmp/`, where
bodies are written before they get their name. Several processes of one user may use one directory; nobody else can read
it.

Invariants, which hold through a crash at any point (`tests/storage/test_object_store_local.py` kills at each):
- A name appears only after the whole body is on disk: write, fsync, then link (create) or rename (replace).
- What was acknowledged is durable: the directory entry, and those of the directories above it, are fsynced before the
  acknowledgement (`tidelog.storage.bucket.directories`).
- Of several concurrent conditional creates one succeeds: link(2) fails where the name exists.
- A file in `.tidelog-tmp/` whose lock is free has no writer any more; opening the store removes it.

Large bodies bypass the page cache (`tidelog.storage.bucket.direct`).
A put makes few system calls: each releases the GIL and has to reacquire it from a busy event loop.
An fsync error fails the put and discards the written file: bytes that a failed fsync covered are never served.
A key that the kernel rejects as a name (one that is also a "directory" of others: `a` and `a/b`) is `InvalidInput`.

Entry: `LocalObjectStore`.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import copy
import errno
import fcntl
import itertools
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from tidelog.runtime.clock import Clock, SystemClock
from tidelog.runtime.errors import Closed, ConfigError, InvalidInput, Unavailable
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.accounts import Account
from tidelog.storage.bucket.common import (
    PlainViews,
    StoreAccessDenied,
    StoreFull,
    check_key,
    check_ranges,
    merge_ranges,
    past_end,
    probe_store,
    split_merged,
)
from tidelog.storage.bucket.direct import BodyWriter
from tidelog.storage.bucket.directories import OpenDirectories, OpenDirectory, close_to_others, make_private
from tidelog.storage.bucket.stats import StoreStats
from tidelog.storage.bucket.store import (
    ObjectExists,
    ObjectInfo,
    ObjectNotFound,
    StoreCapabilities,
    UnfinishedUpload,
    View,
)

T = TypeVar("T")

TMP_NAME: Final = ".tidelog-tmp"
FILE_MODE: Final = 0o600
"""Only the owner reads objects."""
MAX_THREADS: Final = 8
"""Concurrent calls: enough to keep a disk's queue filled."""
LIST_PAGE: Final = 1000
"""Entries fetched per call to a worker thread, as many as a page of S3 has."""
OPEN_DIRECTORIES: Final = 320
"""Kept open for the next put: objects are spread over 256 directories in turn (`tidelog.storage.objects.key`)."""
NAME_ATTEMPTS: Final = 100
"""How often a put creates a directory again that concurrent deletes keep removing."""


class LocalObjectStore(PlainViews):
    """An `ObjectStore` in the directory `directory`, which is created if needed.

    With `is_place` it is a place that an operator named, where something else may be, too, or nothing can be written:
    what is there keeps its access, and nothing is made before the first put.
    Raises `ConfigError` if the directory cannot be used, `StoreFull` when its disk is full, `StoreAccessDenied` for
    files of another user, and `Unavailable` for other errors of the disk. After `Unavailable` from a put it is unknown
    whether the object exists, as with every store.
    """

    def __init__(self, directory: Path | str, clock: Clock | None = None, *, is_place: bool = False) -> None:
        self._root = Path(directory).absolute()
        self._tmp = self._root / TMP_NAME
        self._closed = threading.Event()
        self.stats = StoreStats(clock or SystemClock())
        self._account: Account = self.stats.accounts.account("other")
        self._tmp_prefix = secrets.token_hex(16)
        self._tmp_numbers = itertools.count()
        self._directories = OpenDirectories(self._root, OPEN_DIRECTORIES)
        self._bodies = BodyWriter()
        self._is_place = is_place
        self._takes_puts = False
        if not is_place:
            self._open_for_puts()
        self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="object-store")

    def with_account(self, account: Account) -> LocalObjectStore:
        """See `Backend.with_account`."""
        view = copy.copy(self)
        view._account = account
        return view

    @property
    def url(self) -> str:
        """See `ObjectStore.url`."""
        return self._root.resolve().as_uri()  # the target of a symbolic link, for brokers that share it

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `ObjectStore.put`."""
        path = self._path(key)
        with self.stats.measure("put") as stats:
            info = await self._run(lambda: self._put(key, path, body, if_absent))
            stats.bytes_out += info.size
            self._account.request("put")
            self._account.sent(info.size)
            return info

    async def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        path = self._path(key)
        with self.stats.measure("get") as stats:
            data = await self._run(lambda: self._get(key, path))
            stats.bytes_in += len(data)
            self._account.request("get")
            self._account.received(len(data))
            return data

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        """See `ObjectStore.get_ranges`."""
        path = self._path(key)
        check_ranges(key, ranges)
        with self.stats.measure("get_ranges") as stats:
            parts = await self._run(lambda: self._get_ranges(key, path, ranges))
            size = sum(map(len, parts))
            stats.bytes_in += size
            self._account.request("get", len(ranges) if len(ranges) < 2 else len(merge_ranges(ranges)))
            self._account.received(size)
            return parts

    async def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore.head`."""
        path = self._path(key)
        with self.stats.measure("head"):
            info = await self._run(lambda: self._head(key, path))
            self._account.request("head")
            return info

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        """See `ObjectStore.list`. Holds the names of one directory per level in memory, not the whole listing."""
        found = self._found(prefix, start_after)
        while True:
            with self.stats.measure("list"):
                page = await self._run(lambda: [*itertools.islice(found, LIST_PAGE)])
                self._account.request("list")
            for info in page:
                yield info
            if len(page) < LIST_PAGE:
                return

    async def delete(self, keys: Sequence[str]) -> None:
        """See `ObjectStore.delete`."""
        paths = [self._path(key) for key in keys]
        with self.stats.measure("delete"):
            await self._run(lambda: self._delete(paths))
            self._account.request("delete", -(-len(paths) // LIST_PAGE))

    async def unfinished(self, prefix: str) -> builtins.list[UnfinishedUpload]:
        """See `ObjectStore.unfinished`: a local store has none."""
        return []

    async def abort(self, upload: UnfinishedUpload) -> None:
        """See `ObjectStore.abort`."""

    async def probe(self) -> StoreCapabilities:
        """See `ObjectStore.probe`."""
        return await probe_store(self, f"the local store at {self._root}")

    async def close(self) -> None:
        """See `ObjectStore.close`. Waits for calls in progress."""
        if not self._closed.is_set():
            self._closed.set()
            await asyncio.to_thread(self._executor.shutdown)
            self._directories.close()

    # -- worker threads ------------------------------------------------------------------------------------------------

    def _found(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Yield all objects of the listing."""
        self._require_root()
        yield from _walk(self._root, "", prefix, start_after)

    def _require_root(self) -> None:
        """Raise if the store's directory is missing (an unmounted disk?): its objects may exist, so none is absent."""
        if not self._root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(self._root))

    def _path(self, key: str) -> Path:
        check_key(key)
        if key.split("/", 1)[0] == TMP_NAME:
            raise InvalidInput(f"object key {key!r} begins with a name that the store uses itself")
        return self._root / key

    async def _run(self, work: Callable[[], T]) -> T:
        if self._closed.is_set():
            raise Closed(f"the object store at {self._root} is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except OSError as error:
            raise self._explain(error) from error

    def _explain(self, error: OSError) -> Exception:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFull(
                f"the disk under {self._root} is full: {error.strerror}",
                hint="free space; brokers then go on by themselves, a command has to be started again",
            )
        if isinstance(error, PermissionError):
            where = error.filename or self._root
            return StoreAccessDenied(
                f"the object store at {self._root} denies access to {where}: {error.strerror}",
                hint=f"was it written by another user, such as root? `chown -R {os.geteuid()} {self._root}` gives the"
                " files to this one",
            )
        return Unavailable(
            f"the object store at {self._root} failed: {error.strerror or error}", hint="see the kernel's log (dmesg)"
        )

    def _open_for_puts(self) -> None:
        """Make what puts need. Several threads may do it. Raises `ConfigError`."""
        try:
            make_private(self._tmp)
            if not self._is_place:
                close_to_others(self._root)
            OpenDirectory(self._root).sync()
            _remove_left_over(self._tmp)
        except OSError as error:
            raise ConfigError(
                f"the object store directory {self._root} cannot be used: {error.strerror or error}",
                hint="check the path, its owner and the free space, or choose another directory",
            ) from error
        self._takes_puts = True

    def _put(self, key: str, path: Path, body: Sequence[Buffer], if_absent: bool) -> ObjectInfo:
        if not self._takes_puts:
            self._open_for_puts()
        if if_absent and path.is_file():  # saves the write; link decides
            raise self._exists(key, path)
        for _ in range(NAME_ATTEMPTS):
            tmp = self._tmp / f"{self._tmp_prefix}-{next(self._tmp_numbers):x}"
            descriptor = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            is_renamed = False
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                self._bodies.write(descriptor, body)
                os.fsync(descriptor)
                info = _info(key, os.fstat(descriptor))
                self._name(key, path, tmp, if_absent)
                is_renamed = not if_absent
                return info
            except FileNotFoundError:
                # The directory was removed as empty by a delete, or our file as a leftover by a process that
                # opened the store between our open and flock.
                self._directories.forget(path.parent)
            finally:
                if not is_renamed:
                    with contextlib.suppress(FileNotFoundError):
                        tmp.unlink()
                os.close(descriptor)
        raise Unavailable(f"object {key} cannot be created: its directory keeps being removed")

    def _name(self, key: str, path: Path, tmp: Path, if_absent: bool) -> None:
        """Give the complete file its name, and make the name durable."""
        directory = self._directory_for(key, path)
        try:
            if if_absent:
                directory.link(tmp, path.name)
            else:
                directory.take(tmp, path.name)
        except (FileExistsError, IsADirectoryError) as error:
            if path.is_dir():
                raise InvalidInput(f"object key {key!r} is also a directory of other keys") from error
            raise self._exists(key, path) from error
        directory.sync()

    def _exists(self, key: str, path: Path) -> ObjectExists:
        """Return the error for a name that is taken, once the name is durable: who finds his own object relies on it.

        Whoever gave it may have ended before the sync, or got an error from it and be trying again.
        """
        with contextlib.suppress(FileNotFoundError):  # deleted since
            self._directories.get(path.parent).sync()
        return ObjectExists(f"object {key} exists in {self.url}")

    def _directory_for(self, key: str, path: Path) -> OpenDirectory:
        """Return the directory of an object; create it if needed."""
        try:
            try:
                return self._directories.get(path.parent)
            except FileNotFoundError:
                make_private(path.parent)
                return self._directories.get(path.parent)
        except (FileExistsError, NotADirectoryError) as error:
            if not any(parent.is_file() for parent in path.parents):
                raise FileNotFoundError(
                    errno.ENOENT, "the directory was removed concurrently", str(path.parent)
                ) from error
            raise InvalidInput(f"part of object key {key!r} is itself a key; a file is not a directory") from error

    def _get(self, key: str, path: Path) -> bytes:
        with self._open(key, path) as descriptor:
            return _read_exactly(descriptor, 0, os.fstat(descriptor).st_size)

    def _get_ranges(self, key: str, path: Path, ranges: Sequence[tuple[int, int]]) -> builtins.list[View]:
        with self._open(key, path) as descriptor:
            size = os.fstat(descriptor).st_size
            for start, end in ranges:
                if end > size:
                    raise past_end(key, start, end)
            merged = merge_ranges(ranges)
            return split_merged(ranges, [(one, _read_exactly(descriptor, one.start, one.end)) for one in merged])

    @contextlib.contextmanager
    def _open(self, key: str, path: Path) -> Iterator[int]:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            self._require_root()
            raise self._absent(key) from error
        try:
            if not os.path.isfile(descriptor):
                raise self._absent(key)
            yield descriptor
        finally:
            os.close(descriptor)

    def _absent(self, key: str) -> ObjectNotFound:
        return ObjectNotFound(f"object {key} does not exist in {self.url}")

    def _head(self, key: str, path: Path) -> ObjectInfo:
        with self._open(key, path) as descriptor:
            return _info(key, os.fstat(descriptor))

    def _delete(self, paths: Sequence[Path]) -> None:
        self._require_root()
        touched: set[Path] = set()
        for path in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                path.unlink()
                touched.add(path.parent)
        for directory in touched:
            with contextlib.suppress(FileNotFoundError):
                OpenDirectory(directory).sync()
            self._remove_if_empty(directory)

    def _remove_if_empty(self, directory: Path) -> None:
        while directory != self._root:
            try:
                directory.rmdir()
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    return
                raise
            directory = directory.parent


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return ObjectInfo(key, status.st_size, etag, status.st_mtime_ns // 1_000_000)


def _read_exactly(descriptor: int, start: int, end: int) -> bytes:
    parts: list[bytes] = []
    while start < end:
        part = os.pread(descriptor, end - start, start)
        if not part:
            raise OSError(errno.EIO, f"the file ended at {start} while being read up to {end}")
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _remove_left_over(directory: Path) -> None:
    """Remove temporary files of dead writers: the kernel has released their lock."""
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _walk(directory: Path, base: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
    """Yield objects under `directory`, whose keys begin with `base`, in the order of their keys' UTF-8 bytes."""
    try:
        with os.scandir(directory) as entries:
            # A directory sorts by its name and a slash, as its keys do. Code point order is that of UTF-8 bytes.
            names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return  # deleted since its name was listed
    for name in names:
        key = base + name
        if name.endswith("/"):
            wanted = key.startswith(prefix) or prefix.startswith(key)
            done = key <= start_after and not start_after.startswith(key)
            if wanted and not done and key != f"{TMP_NAME}/":
                yield from _walk(directory / name[:-1], key, prefix, start_after)
        elif key.startswith(prefix) and key > start_after:
            with contextlib.suppress(FileNotFoundError):
                yield _info(key, os.stat(directory / name))

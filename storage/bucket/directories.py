"""A cache of open directories for naming files durably (`tidelog.storage.bucket.local`).

A name is durable once its directory is synced, and the directory's own entry in its parent, up to the root. The parents
are synced once, after the directory was opened; later names in the open directory need no such sync. Naming a file by
path would be unsafe: another process may have removed the directory since, and created it again without syncing its
entry. Through the open descriptor this fails with `FileNotFoundError`: a removed directory takes no new names, and
a parent cannot be removed while it is not empty.

Invariants: the entries of a directory that `get` returned are durable up to the root; at most `limit` directories are
kept open, and a directory in use is closed by its last user. All methods are thread-safe.

Entry: `OpenDirectories`; `make_private`, `close_to_others` for who may read them.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

DIRECTORY_MODE: Final = 0o700
"""Only the owner reads objects: they hold what clients wrote."""


def make_private(path: Path) -> None:
    """Create `path` and what is missing above it, for the owner only. Raises `OSError`, e.g. `FileExistsError`."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for each in reversed(missing):
        try:
            os.mkdir(each, DIRECTORY_MODE)
        except FileExistsError:
            if not each.is_dir():  # another process may have created it
                raise


def close_to_others(path: Path) -> None:
    """Take others' access to the directory `path`, which an older version may have given. Raises `OSError`."""
    status = path.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        path.chmod(DIRECTORY_MODE)


class OpenDirectory:
    """An open directory, closed with its last reference; its methods exist to hold one. They raise `OSError`."""

    __slots__ = ("_descriptor",)

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def link(self, file: Path, name: str) -> None:
        """Link a file into the directory as `name`. Raises `FileExistsError` if the name is taken."""
        os.link(file, name, dst_dir_fd=self._descriptor)

    def take(self, file: Path, name: str) -> None:
        """Move a file into the directory as `name`, replacing the file of that name."""
        os.rename(file, name, dst_dir_fd=self._descriptor)

    def sync(self) -> None:
        """Make the names in the directory durable."""
        os.fsync(self._descriptor)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class OpenDirectories:
    """The most recently used directories under `root`, by path."""

    def __init__(self, root: Path, limit: int) -> None:
        self._root = root
        self._limit = limit
        self._lock = threading.Lock()
        self._open: dict[Path, OpenDirectory] = {}

    def get(self, path: Path) -> OpenDirectory:
        """Return `path` opened, with all entries above it durable. Raises `OSError`, e.g. `FileNotFoundError`."""
        with self._lock:
            found = self._open.pop(path, None)
            if found is not None:
                self._open[path] = found  # the most recently used
                return found
        opened = OpenDirectory(path)
        # Always sync up to the root: another process may have created a directory without syncing its entry yet. An
        # fsync with nothing to write costs some 20 µs.
        for above in path.parents if path != self._root else ():
            OpenDirectory(above).sync()
            if above == self._root:
                break
        with self._lock:
            self._open[path] = opened
            while len(self._open) > self._limit:
                del self._open[next(iter(self._open))]
        return opened

    def forget(self, path: Path) -> None:
        """Drop `path`, which may have been removed: the next `get` opens it again."""
        with self._lock:
            self._open.pop(path, None)

    def close(self) -> None:
        """Drop all directories."""
        with self._lock:
            self._open.clear()

"""Directories that stay open for the next file that gets its name in them (`storage.object_store_local`).

A name is durable when its directory is synced, and the directory's own name in the one above, up to the root. That way
up is synced once, after the directory was opened: whoever names files by the open directory needs it no more. Naming a
file by path would not do, for the directory may have been removed since, and made again by another process that has
not synced its entry. By the open one this fails, with `FileNotFoundError`: a removed directory takes no new names, and
one above is not empty while this one stands.

Invariants: what `get` returned had a durable way up to the root; at most `limit` directories are kept, and one that
somebody uses is closed by its last user. All methods may be called in any thread.

Entry: `OpenDirectories`.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path


class OpenDirectory:
    """Closed when nobody holds it; that its methods hold it is why they exist. They raise `OSError`."""

    __slots__ = ("_descriptor",)

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def link(self, file: Path, name: str) -> None:
        """Give a file a name here. Raises `FileExistsError` if something has it."""
        os.link(file, name, dst_dir_fd=self._descriptor)

    def take(self, file: Path, name: str) -> None:
        """Move a file here, in the place of the one that has the name."""
        os.rename(file, name, dst_dir_fd=self._descriptor)

    def sync(self) -> None:
        """Make the names in it durable."""
        os.fsync(self._descriptor)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class OpenDirectories:
    """The directories under `root` that were used last, by path."""

    def __init__(self, root: Path, limit: int) -> None:
        self._root = root
        self._limit = limit
        self._lock = threading.Lock()
        self._open: dict[Path, OpenDirectory] = {}

    def get(self, path: Path) -> OpenDirectory:
        """`path` opened, and all entries above it durable. Raises `OSError`: `FileNotFoundError` if it is not there."""
        with self._lock:
            found = self._open.pop(path, None)
            if found is not None:
                self._open[path] = found  # the newest
                return found
        opened = OpenDirectory(path)
        # Always the whole way up: another process may have made a directory and not have synced its entry yet. An fsync
        # with nothing to write costs some 20 µs.
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
        """The directory at `path` was removed, perhaps: the next `get` opens what is there then."""
        with self._lock:
            self._open.pop(path, None)

    def close(self) -> None:
        """Forget all."""
        with self._lock:
            self._open.clear()

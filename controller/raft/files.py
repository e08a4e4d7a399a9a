"""The files of one Raft member: a small synchronous interface, and the operating system's files behind it.

`RaftFiles` is all that journal, snapshots and the quorum file do to a disk. The simulator has an implementation of its
own (`tidelog.simulation.world.raft_files`), which loses, tears and refuses writes. Nothing here retries; every method
raises `OSError`. One thread uses a file at a time.

Entry: `SYSTEM_FILES`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class RaftFile(Protocol):
    """An open file that is written from one end to the other, or read from its beginning."""

    def write(self, data: bytes) -> None:
        """Write all of `data` at the position. After an error a part of it may be there."""
        ...

    def read(self, size: int) -> bytes:
        """At most `size` bytes from the position; empty at the end."""
        ...

    def cut(self, size: int) -> None:
        """Make the file `size` bytes long; the position is at its end then."""
        ...

    def sync(self) -> None:
        """Make content and length durable."""
        ...

    def close(self) -> None:
        """Release the file; nothing is made durable by it."""
        ...


class RaftFiles(Protocol):
    """Files by path. Renames and removals are durable only after `sync_directory`."""

    def make_directory(self, path: Path) -> None:
        """With its parents; one that exists is left alone."""
        ...

    def exists(self, path: Path) -> bool:
        """Whether there is such a file."""
        ...

    def read(self, path: Path) -> bytes:
        """The whole content. Raises `FileNotFoundError`."""
        ...

    def open(self, path: Path) -> RaftFile:
        """A file that exists; the position is at its beginning."""
        ...

    def create(self, path: Path) -> RaftFile:
        """A new, empty file; one that exists is emptied."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Replace `target`."""
        ...

    def remove(self, path: Path) -> None:
        """A file that does not exist is no error."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make renames, creations and removals in a directory durable."""
        ...

    def free_bytes(self, path: Path) -> int:
        """How many bytes may still be written below a directory. Raises `OSError`."""
        ...


class _SystemFile:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def read(self, size: int) -> bytes:
        return os.read(self._fd, size)

    def cut(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        os.lseek(self._fd, size, os.SEEK_SET)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class SystemFiles:
    """`RaftFiles` of this machine."""

    def make_directory(self, path: Path) -> None:
        """See `RaftFiles.make_directory`."""
        path.mkdir(parents=True, exist_ok=True)

    def exists(self, path: Path) -> bool:
        """See `RaftFiles.exists`."""
        return path.exists()

    def read(self, path: Path) -> bytes:
        """See `RaftFiles.read`."""
        return path.read_bytes()

    def open(self, path: Path) -> RaftFile:
        """See `RaftFiles.open`."""
        return _SystemFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    def create(self, path: Path) -> RaftFile:
        """See `RaftFiles.create`."""
        return _SystemFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))

    def rename(self, source: Path, target: Path) -> None:
        """See `RaftFiles.rename`."""
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        """See `RaftFiles.remove`."""
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """See `RaftFiles.sync_directory`."""
        sync_directory(path)

    def free_bytes(self, path: Path) -> int:
        """See `RaftFiles.free_bytes`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


SYSTEM_FILES = SystemFiles()


def replace_file(files: RaftFiles, path: Path, data: bytes) -> None:
    """Replace a small file; durable on return, and whole or untouched after a crash. Raises `OSError`."""
    draft = path.with_name(path.name + ".tmp")
    file = files.create(draft)
    try:
        file.write(data)
        file.sync()
    finally:
        file.close()
    files.rename(draft, path)
    files.sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and creations in a directory durable. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

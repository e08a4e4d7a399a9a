"""The files of a Raft member on a real disk that can be full."""

from __future__ import annotations

import errno
from pathlib import Path

from tidelog.controller.raft.files import RaftFile, SystemFiles


class FillableFiles(SystemFiles):
    """While `full` is set, every write fails, also to files that are open already."""

    def __init__(self) -> None:
        self.full = False

    def open(self, path: Path) -> RaftFile:
        return _FillableFile(super().open(path), self)

    def create(self, path: Path) -> RaftFile:
        return _FillableFile(super().create(path), self)


class _FillableFile:
    def __init__(self, file: RaftFile, disk: FillableFiles) -> None:
        self._file = file
        self._disk = disk
        self.read, self.cut, self.sync, self.close = file.read, file.cut, file.sync, file.close

    def write(self, data: bytes) -> None:
        if self._disk.full:
            raise OSError(errno.ENOSPC, "no space left on device")
        self._file.write(data)

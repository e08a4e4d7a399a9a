"""The disk under a simulated Raft member: `RaftPlatters`, which outlive its crashes, and `SimRaftFiles` of one life.

A power loss keeps what was synced for certain. Of what was appended since, it keeps all, nothing, a part cut at any
byte, or a part with whole sectors of zeros in it: what the journal's format promises to tell from damage
(docs/design/0002-raft-hardening.md). A cut that was not synced may be undone. Of the names that were made, changed and
removed since the directory was synced, the first few stay. A killed process leaves everything as it was written.

The methods are synchronous, as the member's turns are. The time that they take is added up in `busy_s`, by which the
turn's messages and results come later. Faults: `full_bytes`, `slow_s`, `fail_next_sync`, and `crash_in`: the process
ends in the middle of what it does to its files.

Entry: `RaftPlatters`, `SimRaftFiles`.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

SYNC_S = 0.0006
WRITE_S = 0.00002
SECTOR_BYTES = 512


class Gone(BaseException):
    """The process has ended: whatever it does now has no effect."""


class _RaftInode:
    """The content of one file."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.synced = 0
        """So many of the first bytes are durable as they are seen."""
        self.cut_off = b""
        """What is durable behind them until the next sync."""

    def cut(self, size: int) -> None:
        if size < self.synced:
            self.cut_off = bytes(self.seen[size : self.synced]) + self.cut_off
            self.synced = size
        del self.seen[size:]

    def sync(self) -> None:
        self.synced = len(self.seen)
        self.cut_off = b""

    def tear(self, rng: random.Random) -> None:
        """Lose what was not synced, or a part of it."""
        fresh = bytearray(self.seen[self.synced :])
        fate = rng.randrange(4)
        if self.cut_off and fate == 0:
            fresh = bytearray(self.cut_off)
        elif fate == 1:
            fresh.clear()
        elif fate == 2:
            del fresh[rng.randrange(len(fresh) + 1) :]
        elif fate == 3:
            self._zero_sectors(fresh, rng)
        self.seen[self.synced :] = fresh
        self.sync()

    def _zero_sectors(self, fresh: bytearray, rng: random.Random) -> None:
        """Of the sectors that were written to from the first fresh byte on, those at the end never were."""
        first = rng.randrange(len(fresh) + 1)
        start = -(-(self.synced + first) // SECTOR_BYTES) * SECTOR_BYTES - self.synced
        if start < len(fresh):
            fresh[start:] = bytes(len(fresh) - start)


class RaftPlatters:
    """The files of one member's directory, by path."""

    def __init__(self) -> None:
        self.names: dict[str, _RaftInode] = {}
        self._durable: dict[str, _RaftInode] = {}
        self._changes: list[tuple[str, _RaftInode | None, str]] = []
        """Since the directory was synced: a name, its file from now on (None: none), and a name that went with it."""

    @property
    def used_bytes(self) -> int:
        """What the files take."""
        return sum(len(inode.seen) for inode in self.names.values())

    def change(self, name: str, inode: _RaftInode | None, gone: str = "") -> None:
        """Give a name to a file, or take it away."""
        self._changes.append((name, inode, gone))
        self._apply(self.names, name, inode, gone)

    @staticmethod
    def _apply(names: dict[str, _RaftInode], name: str, inode: _RaftInode | None, gone: str) -> None:
        names.pop(gone, None)
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode

    def sync_names(self) -> None:
        """Make all names durable."""
        self._durable = dict(self.names)
        self._changes.clear()

    def lose_power(self, rng: random.Random) -> None:
        """Keep what was synced, and whatever of the rest."""
        for change in self._changes[: rng.randint(0, len(self._changes))]:
            self._apply(self._durable, *change)
        for inode in self._durable.values():
            inode.tear(rng)
        self.names = dict(self._durable)
        self._changes.clear()

    def copy(self) -> RaftPlatters:
        """Return a copy of the files as they are read now, all of it durable."""
        copied = RaftPlatters()
        for name, inode in self.names.items():
            copied.names[name] = copy = _RaftInode()
            copy.seen += inode.seen
            copy.sync()
        copied.sync_names()
        return copied

    def contents(self) -> bytes:
        """Return what all files have, one after the other."""
        return b"".join(inode.seen for inode in self.names.values())

    def wipe(self) -> None:
        """An empty directory, for good."""
        self.names = {}
        self.sync_names()


class _SimRaftFile:
    def __init__(self, files: SimRaftFiles, inode: _RaftInode) -> None:
        self._files = files
        self._inode = inode
        self._position = 0

    def write(self, data: bytes) -> None:
        inode = self._inode
        room = self._files.begin_write(len(data))
        inode.seen += data[:room]
        if room < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._files.step()

    def read(self, size: int) -> bytes:
        self._files.check()
        data = bytes(self._inode.seen[self._position : self._position + size])
        self._position += len(data)
        return data

    def cut(self, size: int) -> None:
        self._files.step()
        self._inode.cut(size)

    def sync(self) -> None:
        self._files.sync(self._inode)

    def close(self) -> None:
        self._files.check()


class SimRaftFiles:
    """`tidelog.controller.raft.files.RaftFiles` of one life."""

    def __init__(self, platters: RaftPlatters, rng: random.Random) -> None:
        self._platters = platters
        self._rng = rng
        self.is_gone: Callable[[], bool] = lambda: False
        self.busy_s = 0.0
        self.slow_s = 0.0
        """What every sync takes longer, at most."""
        self.full_bytes = 1 << 62
        """Files do not grow past this together (ENOSPC)."""
        self.fail_next_sync = False
        self.crash_in = 0
        """The process ends at the so manieth change from now on; 0: it does not."""
        self.on_crash: Callable[[], None] = lambda: None

    @property
    def used_bytes(self) -> int:
        """What all files take."""
        return self._platters.used_bytes

    def heal(self) -> None:
        """Nothing is wrong any more."""
        self.slow_s, self.full_bytes, self.fail_next_sync, self.crash_in = 0.0, 1 << 62, False, 0

    def check(self) -> None:
        """Raises `Gone`."""
        if self.is_gone():
            raise Gone

    def step(self) -> None:
        """A change is about to be made, or is made by half. Raises `Gone`."""
        self.check()
        self.busy_s += WRITE_S
        if self.crash_in:
            self.crash_in -= 1
            if self.crash_in == 0:
                self.on_crash()
                raise Gone

    def begin_write(self, size: int) -> int:
        """How much of a write there is room for."""
        self.step()
        if self.full_bytes >= 1 << 62:
            return size
        return max(0, min(size, self.full_bytes - self._platters.used_bytes))

    def sync(self, inode: _RaftInode) -> None:
        """Of one file."""
        self.step()
        self.busy_s += SYNC_S * (0.5 + self._rng.random()) + self.slow_s * self._rng.random()
        if self.fail_next_sync:
            self.fail_next_sync = False
            inode.tear(self._rng)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        inode.sync()

    def make_directory(self, path: Path) -> None:
        """See `RaftFiles.make_directory`: there is one."""
        self.check()

    def exists(self, path: Path) -> bool:
        """See `RaftFiles.exists`."""
        self.check()
        return str(path) in self._platters.names

    def read(self, path: Path) -> bytes:
        """See `RaftFiles.read`."""
        return bytes(self._inode(path).seen)

    def _inode(self, path: Path) -> _RaftInode:
        self.check()
        inode = self._platters.names.get(str(path))
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return inode

    def open(self, path: Path) -> _SimRaftFile:
        """See `RaftFiles.open`."""
        return _SimRaftFile(self, self._inode(path))

    def create(self, path: Path) -> _SimRaftFile:
        """See `RaftFiles.create`."""
        if not self.begin_write(1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        inode = _RaftInode()
        self._platters.change(str(path), inode)
        return _SimRaftFile(self, inode)

    def rename(self, source: Path, target: Path) -> None:
        """See `RaftFiles.rename`."""
        inode = self._inode(source)
        self.step()
        self._platters.change(str(target), inode, str(source))

    def remove(self, path: Path) -> None:
        """See `RaftFiles.remove`."""
        if self.exists(path):
            self.step()
            self._platters.change(str(path), None)

    def free_bytes(self, path: Path) -> int:
        """See `RaftFiles.free_bytes`."""
        self.check()
        return max(0, self.full_bytes - self._platters.used_bytes)

    def sync_directory(self, path: Path) -> None:
        """See `RaftFiles.sync_directory`."""
        self.step()
        self.busy_s += SYNC_S * self._rng.random()
        self._platters.sync_names()

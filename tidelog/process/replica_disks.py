"""The replicated WALs in a broker's data directory.

    DIR/wal            the WAL of the broker's own replica set, replicated or not
    DIR/replica-<id>   the WAL of another replica set of which the broker has a replica
    DIR/rejected-*     WALs that were set aside: `rejected-wal-1`, `rejected-replica-<id>-1`, …
    DIR/removed-*      `removed-replica-<id>`: what is still to be deleted of a replica that was removed

Invariant: the directory of a replica has all of its files. One that is removed gets its other name first, in one step.

Entry: `DirectoryReplicaDisks`.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from pathlib import Path
from typing import Final

from tidelog.broker.inputs import OpenedReplicaWal
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import StorageFailed
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.disk.segments import is_kept_segment
from tidelog.storage.wal.disk.wal import DiskWal

OWN = "wal"
PREFIX = "replica-"
REJECTED = "rejected-"
REMOVED = "removed-"
MAX_REJECTED: Final = 3
"""WALs of one set that are kept aside: then somebody must look at the disk that forgets."""


def replicas_in(path: Path) -> list[int]:
    """Return the other brokers' replica sets of which a data directory has files. Raises `OSError`."""
    return _numbers(path, PREFIX)


def _numbers(path: Path, prefix: str) -> list[int]:
    names = [each.name.removeprefix(prefix) for each in path.glob(f"{prefix}*")]
    return sorted(int(each) for each in names if each.isascii() and each.isdigit())


class DirectoryReplicaDisks:
    """See `tidelog.broker.inputs.ReplicaDisks`."""

    def __init__(self, path: Path, own_id: int, settings: WalSettings, rng: random.Random) -> None:
        """`path`: the data directory; `own_id`: the broker's id, and so that of its own replica set."""
        self._path = path
        self._own_id = own_id
        self._settings = settings
        self._rng = rng

    def _directory(self, replica_set_id: int) -> Path:
        return self._path / (OWN if replica_set_id == self._own_id else f"{PREFIX}{replica_set_id}")

    def open(self, replica_set_id: int) -> OpenedReplicaWal:
        """See `ReplicaDisks.open`."""
        path = self._directory(replica_set_id)
        try:
            _delete(_removed(path))
            disk = FileDisk(path)
        except OSError as error:
            raise StorageFailed(f"the directory {path} cannot be used: {error}") from error
        return OpenedReplicaWal(DiskWal(disk, self._settings, rng=self._rng), disk)

    def kept(self) -> list[int]:
        """See `ReplicaDisks.kept`."""
        try:
            return sorted({*replicas_in(self._path), *_numbers(self._path, REMOVED + PREFIX)})
        except OSError as error:
            raise StorageFailed(f"the directory {self._path} cannot be read: {error}") from error

    async def remove(self, replica_set_id: int) -> None:
        """See `ReplicaDisks.remove`."""
        assert replica_set_id != self._own_id
        path = self._directory(replica_set_id)
        try:
            await asyncio.to_thread(_remove, path)
        except OSError as error:
            raise StorageFailed(f"the directory {path} cannot be deleted: {error}") from error

    async def set_aside(self, replica_set_id: int) -> str:
        """See `ReplicaDisks.set_aside`."""
        path = self._directory(replica_set_id)
        try:
            return await asyncio.to_thread(_set_aside, path)
        except OSError as error:
            raise StorageFailed(f"the directory {path} cannot be set aside: {error}") from error

    async def rejected(self) -> list[str]:
        """See `ReplicaDisks.rejected`."""
        try:
            return await asyncio.to_thread(_rejected_in, self._path)
        except OSError as error:
            raise StorageFailed(f"the directory {self._path} cannot be read: {error}") from error

    async def keeps_earlier(self, replica_set_id: int) -> bool:
        """See `ReplicaDisks.keeps_earlier`."""
        path = self._directory(replica_set_id)
        try:
            return await asyncio.to_thread(lambda: any(is_kept_segment(each.name) for each in path.glob("*")))
        except OSError as error:
            raise StorageFailed(f"the directory {path} cannot be read: {error}") from error


def _rejected_in(path: Path) -> list[str]:
    return sorted(str(each) for each in path.glob(f"{REJECTED}*"))


def _set_aside(path: Path) -> str:
    """Rename a directory, durably, to a name that is not used. Raises `StorageFailed`, `OSError`."""
    places = [path.with_name(f"{REJECTED}{path.name}-{number}") for number in range(1, MAX_REJECTED + 1)]
    free = next((each for each in places if not each.exists()), None)
    if free is None:
        raise StorageFailed(
            f"{MAX_REJECTED} rejected WALs are kept beside {path} already",
            hint="look at this broker's disk, which has lost what it had made durable; then delete those directories",
        )
    _rename(path, free)
    return str(free)


def _removed(path: Path) -> Path:
    return path.with_name(REMOVED + path.name)


def _remove(path: Path) -> None:
    """Delete a directory, of which nothing is left under its name if that is interrupted. Raises `OSError`."""
    _delete(_removed(path))
    if path.exists():
        _rename(path, _removed(path))
        _delete(_removed(path))


def _delete(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _rename(path: Path, to: Path) -> None:
    """Rename a directory, durably. Raises `OSError`."""
    path.rename(to)
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)

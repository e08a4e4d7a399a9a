"""The replicated WALs in a broker's data directory.

    DIR/wal            the WAL of the broker's own replica set, replicated or not
    DIR/replica-<id>   the WAL of another replica set of which the broker has a replica

Entry: `DirectoryReplicaDisks`.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

from tidelog.broker.inputs import OpenedReplicaWal
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import StorageFailed
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.disk.wal import DiskWal

OWN = "wal"
PREFIX = "replica-"


def replicas_in(path: Path) -> list[int]:
    """Return the other brokers' replica sets of which a data directory has files. Raises `OSError`."""
    names = [each.name.removeprefix(PREFIX) for each in path.glob(f"{PREFIX}*")]
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
            disk = FileDisk(path)
        except OSError as error:
            raise StorageFailed(f"the directory {path} cannot be used: {error}") from error
        return OpenedReplicaWal(DiskWal(disk, self._settings, rng=self._rng), disk)

    def kept(self) -> list[int]:
        """See `ReplicaDisks.kept`."""
        try:
            return replicas_in(self._path)
        except OSError as error:
            raise StorageFailed(f"the directory {self._path} cannot be read: {error}") from error

    async def remove(self, replica_set_id: int) -> None:
        """See `ReplicaDisks.remove`."""
        assert replica_set_id != self._own_id
        path = self._directory(replica_set_id)
        try:
            await asyncio.to_thread(shutil.rmtree, path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageFailed(f"the directory {path} cannot be deleted: {error}") from error

"""The WAL directories of a simulated node: one for each replica set of which its broker has a replica.

They are on one device: a power loss takes unsynced bytes of all of them, and a device that is slow, full or failing is
that for all. Each can be exchanged for another one by itself (`Mount.exchange`), as if it had been lost, or another
copy had been mounted.

Entry: `NodeDisks`, `SimReplicaDisks`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tidelog.broker.inputs import OpenedReplicaWal
from tidelog.simulation.world.disk import Platters, SimDisk
from tidelog.storage.wal.base import ReplicatedWal
from tidelog.storage.wal.disk.identity import ID_FILE
from tidelog.storage.wal.disk.segments import is_kept_segment


class Mount:
    """The directory of one replica set's WAL."""

    def __init__(self) -> None:
        self.platters = Platters()
        """What is mounted."""
        self.unmounted: Platters | None = None
        """What was mounted before; see `exchange`."""

    def exchange(self) -> None:
        """While no process runs: mount the other directory. The first time that one is empty."""
        self.platters.settle()
        self.platters, self.unmounted = self.unmounted or Platters(), self.platters

    def has_wal(self, wal_id: str) -> bool:
        """Return whether the WAL with this id is mounted."""
        return _has_wal(self.platters, wal_id)

    def had_wal(self, wal_id: str) -> bool:
        """Return whether the WAL with this id is in the directory that is not mounted, and only there."""
        return self.unmounted is not None and _has_wal(self.unmounted, wal_id) and not self.has_wal(wal_id)


def _has_wal(platters: Platters, wal_id: str) -> bool:
    data = platters.files.get(ID_FILE)
    return data is not None and wal_id.encode() in data.seen


class NodeDisks:
    """All of one node, by replica set. They survive its processes; `open` has the disks of the present one."""

    def __init__(self, own: int) -> None:
        """`own`: the node's own replica set, whose directory is always there."""
        self._own = own
        self.mounts: dict[int, Mount] = {own: Mount()}
        self.open: dict[int, SimDisk] = {}
        self.rejected: list[tuple[str, Platters]] = []
        """Directories that were set aside, and where."""

    def mount(self, replica_set: int) -> Mount:
        """Return the directory of a set; an empty one if there is none."""
        return self.mounts.setdefault(replica_set, Mount())

    def kept(self) -> list[int]:
        """Return the other sets of which there are files."""
        return sorted(each for each, mount in self.mounts.items() if each != self._own and mount.platters.files)

    def remove(self, replica_set: int) -> None:
        """Delete the mounted directory of a set."""
        mount = self.mounts.get(replica_set)
        if mount is not None:
            mount.platters = Platters()

    def set_aside(self, replica_set: int) -> str:
        """Keep what the directory of a set has elsewhere, and leave an empty one."""
        mount = self.mount(replica_set)
        self.rejected.append((f"rejected-{replica_set}-{len(self.rejected) + 1}", mount.platters))
        mount.platters = Platters()
        return self.rejected[-1][0]

    def lose_power(self, rng: random.Random) -> None:
        """Keep synced data, and a random part of the rest."""
        for mount in self.mounts.values():
            mount.platters.lose_power(rng)

    def rot(self, rng: random.Random) -> int:
        """Flip some bits in unused places; return their number."""
        return sum(mount.platters.rot(rng) for mount in self.mounts.values())

    def heal(self) -> None:
        """End the faults of the device."""
        for disk in self.open.values():
            disk.slow_s, disk.full_bytes, disk.fail_next_sync = 0.0, 1 << 62, False
            disk.go_on()


class SimReplicaDisks:
    """A `tidelog.broker.inputs.ReplicaDisks` of one life."""

    def __init__(
        self, disks: NodeDisks, open_disk: Callable[[int], SimDisk], make_wal: Callable[[int, SimDisk], ReplicatedWal]
    ) -> None:
        self._disks = disks
        self._open_disk = open_disk
        self._make_wal = make_wal

    def open(self, replica_set_id: int) -> OpenedReplicaWal:
        """See `ReplicaDisks.open`."""
        disk = self._open_disk(replica_set_id)
        return OpenedReplicaWal(self._make_wal(replica_set_id, disk), disk)

    def kept(self) -> list[int]:
        """See `ReplicaDisks.kept`."""
        return self._disks.kept()

    async def remove(self, replica_set_id: int) -> None:
        """See `ReplicaDisks.remove`."""
        disk = self._disks.open.pop(replica_set_id, None)
        if disk is not None:
            await disk.background(0.001)
        self._disks.remove(replica_set_id)

    async def set_aside(self, replica_set_id: int) -> str:
        """See `ReplicaDisks.set_aside`."""
        disk = self._disks.open.pop(replica_set_id, None)
        if disk is not None:
            await disk.background(0.001)
        return self._disks.set_aside(replica_set_id)

    async def rejected(self) -> list[str]:
        """See `ReplicaDisks.rejected`."""
        return [place for place, _ in self._disks.rejected]

    async def keeps_earlier(self, replica_set_id: int) -> bool:
        """See `ReplicaDisks.keeps_earlier`."""
        return any(is_kept_segment(each) for each in self._disks.mount(replica_set_id).platters.files)

"""Checks what the masters of replicated WALs confirm when they do, against what the replicas hold and the metadata say.

- `two-masters`: one broker begins an epoch of a replica set (rule 4);
- `promise-broken`: a replica takes bytes from a master of an older epoch than the controllers know it to have promised
  (rule 15);
- `confirmed-alone`: everything that a master confirms is held, durably and with the master's epochs, by as many members
  of the SyncStateSet as the quorum of the metadata has, the start of its own epoch included
  (docs/design/0015-hot-tier.md, sections 1 and 5).

Entry: `ReplicaWatch`, which gets its events from `tidelog.simulation.world.watched_replica`.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.controller.model.replication import InSyncRecord, ReplicationRecord
from tidelog.storage.wal.disk.wal import DiskWal

HasWal = Callable[[str], bool]
"""Whether the directory that is mounted has the WAL of an id."""


class ReplicaWatch:
    """What all replicas hold. `found` is called with `(rule, message)`."""

    def __init__(self, found: Callable[[str, str], None]) -> None:
        self._found = found
        self._wals: dict[tuple[int, int], tuple[DiskWal, HasWal] | None] = {}
        """By replica set and broker: of the newest process that has read it; None: another directory is mounted."""
        self._exchanged: set[tuple[int, int]] = set()
        """Replicas of which another directory was mounted once."""
        self._masters: dict[tuple[int, int], int] = {}
        """The broker that has begun an epoch, by replica set and epoch."""
        self._promised: dict[tuple[int, int], int] = {}
        """The newest epoch that a broker has promised, by replica set and broker."""
        self.rows: dict[int, ReplicationRecord] = {}
        """The newest metadata."""

    def take(self, row: ReplicationRecord, epoch: int) -> None:
        """Note a row of the metadata, and the master epoch of its set."""
        self.rows[row.id] = row
        for each in row.election.promises if row.election is not None else ():
            self._promised[row.id, each.broker_id] = epoch

    def receives(self, set_id: int, broker_id: int, epoch: int) -> None:
        """Check, when a replica has taken bytes from a master of an epoch, that it may."""
        promised = self._promised.get((set_id, broker_id), -1)
        if epoch < promised:
            said = f"broker {broker_id} takes bytes of replica set {set_id} from a master of epoch {epoch}"
            self._found("promise-broken", f"{said}; it has promised {promised}")

    def opened(self, set_id: int, broker_id: int, wal: DiskWal, has_wal: HasWal) -> None:
        """Record that a process has read a replica."""
        self._wals[set_id, broker_id] = wal, has_wal

    def exchanged(self, set_id: int, broker_id: int) -> None:
        """Record that another directory was mounted: what it has is not known."""
        self._wals[set_id, broker_id] = None
        self._exchanged.add((set_id, broker_id))
        self._promised.pop((set_id, broker_id), None)

    def forget(self, set_id: int) -> None:
        """Drop a removed replica set."""
        self.rows.pop(set_id, None)
        for known in (self._masters, self._promised):
            for key in [key for key in known if key[0] == set_id]:
                del known[key]

    def begins(self, set_id: int, epoch: int, broker_id: int) -> None:
        """Record that a master has begun its epoch."""
        other = self._masters.setdefault((set_id, epoch), broker_id)
        if other != broker_id:
            said = f"brokers {other} and {broker_id} have both begun epoch {epoch} of replica set {set_id}"
            self._found("two-masters", said)

    def confirms(self, set_id: int, broker_id: int, epoch: int, offset: int) -> None:
        """Check, before it takes effect, that a quorum holds what a master confirms."""
        row = self.rows.get(set_id)
        found = self._wals.get((set_id, broker_id))
        if row is None or not row.in_sync or found is None:
            return
        last_epoch = found[0].epoch_history.epoch_at(offset - 1)
        if last_epoch != epoch:
            said = f"broker {broker_id} confirms {offset} of replica set {set_id} in epoch {epoch}, by bytes of epoch"
            self._found("confirmed-alone", f"{said} {last_epoch} alone")
        holding = [each.broker_id for each in row.in_sync if self._holds(set_id, each, offset, last_epoch)]
        if len(holding) < row.quorum:
            members = [each.broker_id for each in row.in_sync]
            said = f"broker {broker_id} confirms {offset} of replica set {set_id} in epoch {epoch}: {holding} of"
            self._found("confirmed-alone", f"{said} {members} hold it, the quorum is {row.quorum}")

    def _holds(self, set_id: int, member: InSyncRecord, offset: int, last_epoch: int) -> bool:
        key = set_id, member.broker_id
        found = self._wals.get(key)
        if found is None:
            return key in self._wals
        wal, has_wal = found
        if key in self._exchanged and not has_wal(member.wal_id):
            return True  # the WAL that may have acknowledged this is not mounted any more
        return wal.durable_offset >= offset and wal.epoch_history.epoch_at(offset - 1) == last_epoch

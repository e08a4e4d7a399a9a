"""The replicated WALs of simulated brokers: the real ones, which report what their masters confirm.

What a master confirms leads to acknowledgements, high watermarks and commits, as what is durable does in a WAL with one
member; so it is compared with the start of later terms by `tidelog.simulation.world.confirmed`, and with what the other
replicas hold by `tidelog.simulation.world.replica_watch`. A trim is reported before it happens.

Entry: `WatchedReplica`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from tidelog.runtime.types import Buffer
from tidelog.simulation.world.producer_watch import ProducerBatch
from tidelog.simulation.world.watch import Watch
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import WalRecord, WalRecordType
from tidelog.storage.wal.disk.wal import DiskWal


class _HeldRecord(NamedTuple):
    """A record in a replica, of which it is not known here that it is confirmed."""

    wal_end: int
    stream_id: int
    epoch: int
    base: int
    end: int
    """The stream offset after the record."""
    producer: ProducerBatch | None


class WatchedReplica:
    """A `tidelog.storage.wal.base.ReplicatedWal` that wraps the real one, of a broker's replica of a replica set.

    `has_wal` tells whether the directory that is mounted has the WAL of an id; `note` is for the trace.
    """

    def __init__(
        self,
        wal: DiskWal,
        watch: Watch,
        set_id: int,
        broker_id: int,
        has_wal: Callable[[str], bool],
        note: Callable[[str], None],
    ) -> None:
        self._wal = wal
        self._watch = watch
        self._has_wal = has_wal
        self._set_id = set_id
        self._broker_id = broker_id
        self._note = note
        self._held: deque[_HeldRecord] = deque()
        self._epoch = -1
        """The epoch in which it leads; -1: none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wal, name)

    def _holds(self, record: WalRecord) -> None:
        held = self._held
        while held and held[-1].wal_end > record.offset:
            held.pop()  # the log was cut
        if record.type is WalRecordType.DATA:
            stream_id, end = record.stream_id, record.base_offset + record.count
            producer = self._watch.producer_of(stream_id, [record.payload])
            held.append(
                _HeldRecord(record.end_offset, stream_id, record.stream_epoch, record.base_offset, end, producer)
            )

    async def recover(self, on_record: Callable[[WalRecord], None]) -> int:
        """See `Wal.recover`."""

        def record(found: WalRecord) -> None:
            self._holds(found)
            on_record(found)

        end = await self._wal.recover(record)
        self._watch.replicas.opened(self._set_id, self._broker_id, self._wal, self._has_wal)
        return end

    async def begin_epoch(self, epoch: int) -> None:
        """See `Wal.begin_epoch`."""
        self._epoch = -1
        while self._held and self._held[-1].wal_end > self._wal.end_offset:
            self._held.pop()
        await self._wal.begin_epoch(epoch)
        self._watch.replicas.begins(self._set_id, epoch, self._broker_id)
        self._watch.confirmed.wal_begins(self._set_id, epoch, self._wal.epoch_history.entries[-1].start_offset)
        self._epoch = epoch
        self._note(f"leads set {self._set_id} in epoch {epoch} from {self._wal.end_offset} on")

    def note_confirmed(self, offset: int) -> None:
        """See `Wal.note_confirmed`: of a master what it confirms, of a follower what its master has told."""
        confirmed, leads = self._watch.confirmed, 0 <= self._epoch == self._wal.master_epoch
        if leads:
            self._watch.replicas.confirms(self._set_id, self._broker_id, self._epoch, offset)
            confirmed.wal_holds(self._set_id, self._epoch, offset)
        while self._held and self._held[0].wal_end <= offset:
            piece = self._held.popleft()
            if leads:
                confirmed.stream_goes_on(piece.stream_id, piece.epoch, piece.base)
                self._watch.confirms(piece.stream_id, piece.epoch, piece.end, piece.producer)
        self._wal.note_confirmed(offset)

    def append(self, record: StreamAppend) -> int:
        """See `Wal.append`."""
        end = self._wal.append(record)
        stream_id, epoch, base = record.stream_id, record.stream_epoch, record.base_offset
        self._watch.confirmed.stream_opens(stream_id, epoch, base)
        producer = self._watch.producer_of(stream_id, record.payload)
        self._held.append(_HeldRecord(end, stream_id, epoch, base, base + record.count, producer))
        return end

    async def receive(
        self, offset: int, epoch: int, epoch_start: int, records: Buffer, *, master_epoch: int
    ) -> list[WalRecord]:
        """See `ReplicatedWal.receive`."""
        accepted = await self._wal.receive(offset, epoch, epoch_start, records, master_epoch=master_epoch)
        self._watch.replicas.receives(self._set_id, self._broker_id, master_epoch)
        for record in accepted:
            self._holds(record)
        return accepted

    async def truncate(self, offset: int, *, master_epoch: int) -> None:
        """See `ReplicatedWal.truncate`."""
        if offset < self._wal.end_offset:
            self._note(f"cuts set {self._set_id} at {offset}, {self._wal.end_offset - offset} bytes")
        await self._wal.truncate(offset, master_epoch=master_epoch)

    async def restart_at(self, offset: int, *, master_epoch: int, kept_as: str = "") -> None:
        """See `ReplicatedWal.restart_at`."""
        self._held.clear()
        self._note(f"begins set {self._set_id} at {offset}")
        await self._wal.restart_at(offset, master_epoch=master_epoch, kept_as=kept_as)

    async def reset(self, offset: int, kept_as: str = "") -> None:
        """See `Wal.reset`."""
        if kept_as:
            self._watch.confirmed.wal_starts_over(self._set_id, offset)
        self._held.clear()
        await self._wal.reset(offset, kept_as)

    async def trim(self, offset: int) -> None:
        """See `Wal.trim`."""
        self._watch.trims(self._set_id, offset)
        await self._wal.trim(offset)

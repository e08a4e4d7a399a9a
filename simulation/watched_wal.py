"""The WALs of simulated brokers: the real ones, which tell `simulation.watch` what they promise and what they free.

A trim is told before it happens; what is durable is told when the WAL tells its owner. Nothing of an epoch is told
before it has begun for good: until then nobody reads or acknowledges.

Entry: `watched`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from simulation.watch import Watch
from storage.object_store import Buffer
from storage.wal import Wal, WalRecord, WalRecordType
from storage.wal_disk import DiskWal
from storage.wal_s3 import S3Wal


class _Piece(NamedTuple):
    wal_end: int
    stream_id: int
    epoch: int
    end: int
    """The stream offset after it."""


class Witness:
    """What one WAL of one life has appended and not confirmed yet."""

    def __init__(self, watch: Watch, set_id: int) -> None:
        self.watch = watch
        self._set_id = set_id
        self._waiting: deque[_Piece] = deque()
        self._epoch = -1
        """The one that has begun for good."""

    def recovers(self, record: WalRecord) -> None:
        """The WAL holds this of an earlier life."""
        if record.type is WalRecordType.DATA:
            end = record.base_offset + record.count
            self.watch.confirmed.stream_recovered(record.stream_id, record.stream_epoch, end)

    def appends(self, wal_end: int, stream_id: int, epoch: int, base: int, count: int) -> None:
        """This life appends."""
        self.watch.confirmed.stream_goes_on(stream_id, epoch, base)
        self._waiting.append(_Piece(wal_end, stream_id, epoch, base + count))

    def enters(self) -> None:
        """A new epoch is begun, perhaps."""
        self._epoch = -1

    def begins(self, epoch: int, offset: int, durable_offset: int) -> None:
        """It has begun."""
        self.watch.confirmed.wal_begins(self._set_id, epoch, offset)
        self._epoch = epoch
        self.holds(durable_offset)

    def holds(self, durable_offset: int) -> None:
        """The WAL tells its owner that all of this is durable."""
        if self._epoch < 0:
            return
        confirmed, waiting = self.watch.confirmed, self._waiting
        confirmed.wal_holds(self._set_id, self._epoch, durable_offset)
        while waiting and waiting[0].wal_end <= durable_offset:
            piece = waiting.popleft()
            confirmed.stream_holds(piece.stream_id, piece.epoch, piece.end)

    def trims(self, offset: int) -> None:
        """The WAL is about to be trimmed."""
        self.watch.trims(self._set_id, offset)


class WatchedWal:
    """A `storage.wal.Wal` before the real one."""

    def __init__(self, wal: DiskWal | S3Wal, witness: Witness) -> None:
        self._wal = wal
        self._witness = witness

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wal, name)

    async def recover(self, on_record: Callable[[WalRecord], None]) -> int:
        """See `Wal.recover`."""

        def record(found: WalRecord) -> None:
            self._witness.recovers(found)
            on_record(found)

        return await self._wal.recover(record)

    def set_on_durable(self, callback: Callable[[int], None]) -> None:
        """See `Wal.set_on_durable`."""

        def durable(offset: int) -> None:
            self._witness.holds(offset)  # before those whom it lets answer
            callback(offset)

        self._wal.set_on_durable(durable)

    async def begin_epoch(self, epoch: int) -> None:
        """See `Wal.begin_epoch`."""
        self._witness.enters()
        await self._wal.begin_epoch(epoch)
        self._witness.begins(epoch, self._wal.epoch_history.entries[-1].start_offset, self._wal.durable_offset)

    def append(
        self,
        stream_id: int,
        stream_epoch: int,
        base_offset: int,
        count: int,
        payload: Sequence[Buffer],
        batch_crc: int | None = None,
    ) -> int:
        """See `Wal.append`."""
        end = self._wal.append(stream_id, stream_epoch, base_offset, count, payload, batch_crc)
        self._witness.appends(end, stream_id, stream_epoch, base_offset, count)
        return end

    async def trim(self, offset: int) -> None:
        """See `Wal.trim`."""
        self._witness.trims(offset)
        await self._wal.trim(offset)


def watched(wal: DiskWal | S3Wal, watch: Watch, set_id: int) -> Wal:
    """The WAL of that replica set, watched."""
    return cast(Wal, WatchedWal(wal, Witness(watch, set_id)))

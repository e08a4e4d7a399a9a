"""The WALs of simulated brokers: the real ones, which report confirmed and trimmed ranges to
`tidelog.simulation.world.watch`.

A trim is reported before it happens; data is reported when the owner of the WAL notes it as confirmed, which it does
before it acknowledges. What is durable and not confirmed may be lost: so it is behind a closed gate
(`tidelog.storage.ack_gate`). Nothing of an epoch is reported before the epoch has begun: until then nothing is read or
acknowledged.

Entry: `watched`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from tidelog.simulation.world.producer_watch import ProducerBatch
from tidelog.simulation.world.watch import Watch
from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import Wal, WalRecord, WalRecordType
from tidelog.storage.wal.disk.wal import DiskWal
from tidelog.storage.wal.s3.wal import S3Wal


class _Piece(NamedTuple):
    wal_end: int
    stream_id: int
    epoch: int
    end: int
    """The stream offset after the record."""
    producer: ProducerBatch | None


class Witness:
    """The unconfirmed appends of one WAL in one life."""

    def __init__(self, watch: Watch, set_id: int) -> None:
        self.watch = watch
        self._set_id = set_id
        self._waiting: deque[_Piece] = deque()
        self._epoch = -1
        """The epoch that has begun."""

    def recovers(self, record: WalRecord) -> None:
        """Record data that the WAL recovered from an earlier life."""
        if record.type is WalRecordType.DATA:
            end = record.base_offset + record.count
            self.watch.confirmed.stream_recovered(record.stream_id, record.stream_epoch, end)

    def appends(self, wal_end: int, record: StreamAppend) -> None:
        """This life appends."""
        stream_id, epoch, base = record.stream_id, record.stream_epoch, record.base_offset
        self.watch.confirmed.stream_goes_on(stream_id, epoch, base)
        producer = self.watch.producer_of(stream_id, record.payload)
        self._waiting.append(_Piece(wal_end, stream_id, epoch, base + record.count, producer))

    def enters(self) -> None:
        """Record the attempt to begin an epoch."""
        self._epoch = -1

    def begins(self, epoch: int, offset: int, confirm_offset: int) -> None:
        """Record that the epoch has begun."""
        self.watch.confirmed.wal_begins(self._set_id, epoch, offset)
        self._epoch = epoch
        self.holds(confirm_offset)

    def holds(self, confirm_offset: int) -> None:
        """Record up to where the owner of the WAL confirms it."""
        if self._epoch < 0:
            return
        watch, waiting = self.watch, self._waiting
        watch.confirmed.wal_holds(self._set_id, self._epoch, confirm_offset)
        while waiting and waiting[0].wal_end <= confirm_offset:
            piece = waiting.popleft()
            watch.confirms(piece.stream_id, piece.epoch, piece.end, piece.producer)

    def starts_over(self, offset: int) -> None:
        """Report, before it happens, that another WAL is begun at `offset`."""
        self.watch.confirmed.wal_starts_over(self._set_id, offset)

    def trims(self, offset: int) -> None:
        """Report a trim before it happens."""
        self.watch.trims(self._set_id, offset)


class WatchedWal:
    """A `tidelog.storage.wal.base.Wal` that wraps the real one."""

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

    def note_confirmed(self, offset: int) -> None:
        """See `Wal.note_confirmed`."""
        self._witness.holds(offset)  # before the acknowledgements that it enables
        self._wal.note_confirmed(offset)

    async def begin_epoch(self, epoch: int) -> None:
        """See `Wal.begin_epoch`."""
        self._witness.enters()
        await self._wal.begin_epoch(epoch)
        self._witness.begins(epoch, self._wal.epoch_history.entries[-1].start_offset, self._wal.durable_offset)

    async def reset(self, offset: int, kept_as: str = "") -> None:
        """See `Wal.reset`."""
        if kept_as:
            self._witness.starts_over(offset)
        await self._wal.reset(offset, kept_as)

    def append(self, record: StreamAppend) -> int:
        """See `Wal.append`."""
        end = self._wal.append(record)
        self._witness.appends(end, record)
        return end

    async def trim(self, offset: int) -> None:
        """See `Wal.trim`."""
        self._witness.trims(offset)
        await self._wal.trim(offset)


def watched(wal: DiskWal | S3Wal, watch: Watch, set_id: int) -> Wal:
    """Wrap the WAL of that replica set."""
    return cast(Wal, WatchedWal(wal, Witness(watch, set_id)))

"""`WarmTail`: the records of a follower's WAL that are not in the bucket, in memory, so that promotion reads nothing.

It follows the WAL: records are added as they are recovered and received, set apart as they are committed, and dropped
where the WAL is cut. At the cache's bound the oldest are dropped although they are not committed; then the WAL is read
once, when the records are needed (`complete`).

A replica that led has handed its records over, and its tail begins anew where it follows. Consumers read here
(KIP-392), and what is not in the bucket yet is nowhere else, so the WAL is read for it in the background (`fill`).

What is committed stays in memory, evictable, while there is room (`RecoveredRecords.kept`): the next master needs the
records behind the checkpoints, and its consumers the newest ones.

An upload commits a hundred thousand records, if they are small. So they are set apart a few at a time, and with each
that comes; what is committed and still among the others is found out when the replica is elected.

Invariants: it holds the WAL's DATA records from `warm_from` to `end_offset` that end after the committed offset; of
those before it, it keeps none that is not known to be confirmed; it never holds more than the cache has room for, but
one record (rule 12).

Entry: `WarmTail`.
"""

from __future__ import annotations

import logging

from tidelog.storage.cache.footprint import VIEW_RECORD_BYTES
from tidelog.storage.cache.log_cache import LogCache
from tidelog.storage.cache.recovered import RecoveredRecords
from tidelog.storage.wal.base import ReplicatedWal, WalRecord, WalRecordType

logger = logging.getLogger(__name__)

_READ_BYTES = 4 << 20
_FILL_BYTES = 128 << 10
"""Read at once in the background: a few milliseconds for small records."""
_AT_ONCE, _WITH_EACH = 1000, 8
"""Records that are set apart when a commit is heard of, and with each that is added: some milliseconds, and eight times
as fast as they come."""


class WarmTail:
    """Give `add` to `Wal.recover`, and the tail to the follower."""

    def __init__(self, cache: LogCache, committed_offset: int) -> None:
        """`committed_offset`: everything before this WAL offset (int64 bytes) is in committed objects."""
        self.cache = cache
        """In which they are charged."""
        self.records = RecoveredRecords(cache)
        """For the storage of a new master, which takes them over (`HotReplica.hand_over`)."""
        cache.on_empty = self.records.left
        self.committed_offset = committed_offset
        self.warm_from = -1
        """WAL offset from which on nothing is missing; -1 before the first record."""
        self.end_offset = -1
        """WAL offset after the last record that was added; -1 before the first one."""
        self._confirmed = -1
        """As in `note_committed`."""
        self._changes = 0
        """Grows when the WAL may have lost what the tail does not hold yet."""

    def successor(self) -> WarmTail:
        """Return an empty one for the same WAL, with as much room."""
        return WarmTail(LogCache(self.cache.bound_bytes), self.committed_offset)

    def add(self, record: WalRecord) -> None:
        """Add the next record of the WAL, of any type."""
        if record.offset != self.end_offset:
            self._forget(record.offset)
        self.end_offset = record.end_offset
        self.records.discard_before(self.committed_offset, self._confirmed, _WITH_EACH)
        if record.type is not WalRecordType.DATA or record.end_offset <= self.committed_offset:
            return
        cost = len(record.payload) + VIEW_RECORD_BYTES
        while len(self.records) and not self.cache.has_room(cost):
            self.warm_from = self.records.oldest_end
            self.records.discard_before(self.warm_from)
        self.records.add(record)

    def note_committed(self, offset: int, confirmed: int = -1) -> None:
        """Everything before this WAL offset is in committed objects.

        `confirmed`: up to where the records here are known to be those that were confirmed (WAL offset). The others
        may be some that the master does not have, and are dropped.
        """
        self.committed_offset, self._confirmed = max(self.committed_offset, offset), confirmed
        self.records.discard_before(self.committed_offset, confirmed, _AT_ONCE)

    def reconcile(self, wal: ReplicatedWal) -> None:
        """Drop what the WAL does not hold any more, because it was cut or has started over."""
        self._changes += 1
        if self.end_offset < 0 or self.warm_from > wal.end_offset or self.end_offset < wal.start_offset:
            self._forget(wal.end_offset)
        elif self.end_offset > wal.end_offset:
            self.records.discard_from(wal.end_offset)
            self.end_offset = wal.end_offset
        self.records.discard_before(wal.start_offset)

    def is_complete(self, wal: ReplicatedWal) -> bool:
        """Return whether it holds everything of the WAL that is not committed."""
        needed = max(self.committed_offset, wal.start_offset)
        return needed >= wal.end_offset or (0 <= self.warm_from <= needed and self.end_offset == wal.end_offset)

    async def fill(self, wal: ReplicatedWal) -> int:
        """Read what the WAL has before `warm_from` and is not committed; return its WAL offset (int64).

        The WAL may grow meanwhile. Nothing comes, and -1 is returned, if it is cut or starts over, or if not all of
        that has room. Raises as `ReplicatedWal.read_records`.
        """
        stop, changes = self.warm_from, self._changes
        begin = at = max(self.committed_offset, wal.start_offset)
        if at >= stop or self.cache.pending_bytes + stop - at > self.cache.bound_bytes:
            return -1
        older = RecoveredRecords(self.cache)
        try:
            while at < stop:
                records = await wal.read_records(at, min(_FILL_BYTES, stop - at))
                if not records or (changes, stop) != (self._changes, self.warm_from):
                    return -1
                for record in (each for each in records if each.type is WalRecordType.DATA):
                    if not self.cache.has_room(len(record.payload) + VIEW_RECORD_BYTES):
                        return -1
                    older.add(record)
                at = records[-1].end_offset
            older.discard_before(self.committed_offset)
            self.records.put_before(older)
            self.warm_from = begin
        finally:
            older.discard_from(-1)
        return begin

    async def complete(self, wal: ReplicatedWal) -> RecoveredRecords:
        """Return all records of the WAL that are not committed; reads it unless they are here, whatever their size.

        Of what is committed only what the WAL knew to be confirmed is kept. Who is elected by an operator's command
        may lack what was confirmed, and have other bytes there: the new term's confirmations say nothing of these.

        All of the WAL must be durable, and nothing may be appended meanwhile. Raises as `ReplicatedWal.read_records`.
        """
        self.reconcile(wal)
        self.records.discard_before(self.committed_offset, wal.confirm_offset)
        if self.is_complete(wal):
            return self.records
        at = max(self.committed_offset, wal.start_offset)
        extra = {"from": at, "to": wal.end_offset, "warm_from": self.warm_from}
        logger.info("the WAL is read, because not all of it is in memory", extra=extra)
        self._forget(at)
        while records := await wal.read_records(at, _READ_BYTES):
            for record in records:
                if record.type is WalRecordType.DATA and record.end_offset > self.committed_offset:
                    self.records.add(record)
            at = self.end_offset = records[-1].end_offset
        return self.records

    def _forget(self, offset: int) -> None:
        """Hold nothing; the next record is at `offset`."""
        self.records.discard_from(-1)
        self.records.forget_kept()
        self._confirmed = -1
        self._changes += 1
        self.warm_from = self.end_offset = offset

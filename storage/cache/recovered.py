"""Records that a WAL holds beyond the bucket, kept until their streams are known. Sans-IO.

At start the WAL's records are read before any stream is open. Which of them are valid is decided stream by stream:
those with a stream epoch of the current ownership (`owner_since_epoch`) follow the committed end without a gap. When
all streams of the replica set are open, the remaining records belong to streams that were deleted or moved away.

A follower keeps the records that it receives in the same way: it drops what was committed (`discard_before`) and what
it had to cut (`discard_from`), so when it becomes master nothing has to be read. Each operation costs as much as the
records that it adds or drops.

What was committed, and is known to be confirmed here, need not be lost to memory: it becomes evictable, in a log for
each stream (`kept`), with which its storage goes on when the stream is opened. Such a log is contiguous, and it is
used only if it ends at the committed end and has no record of an earlier ownership: then it holds what the bucket does.

Entry: `RecoveredRecords`.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left, bisect_right
from collections import deque
from operator import attrgetter
from typing import NamedTuple

from tidelog.storage.cache.footprint import footprint, own
from tidelog.storage.cache.log_cache import CacheEntry, Fate, LogCache, StreamLog, UnconfirmedRecord
from tidelog.storage.records import StreamEntry
from tidelog.storage.wal.base import WalRecord

logger = logging.getLogger(__name__)


class _Held:
    """One recovered record, and the stream log that it was assigned to."""

    __slots__ = ("epoch", "log", "record", "stream_id", "wal_end")

    def __init__(self, record: WalRecord) -> None:
        self.wal_end = record.end_offset
        self.stream_id = record.stream_id
        self.epoch = record.stream_epoch
        self.record = StreamEntry(record.base_offset, record.count, own(record.payload))
        self.log: StreamLog | None = None


class _KeptRecords(NamedTuple):
    """Committed records of a stream that are still in memory."""

    log: StreamLog
    first_epoch: int
    """Stream epoch of its first record; they do not decrease."""


_EPOCH, _WAL_END = attrgetter("epoch"), attrgetter("wal_end")
_BASE = attrgetter("record.base_offset")


class RecoveredRecords:
    """Recovered records in WAL order and by stream."""

    def __init__(self, cache: LogCache) -> None:
        self._cache = cache
        self._held: deque[_Held] = deque()
        self._by_stream: dict[int, deque[_Held]] = {}
        """The same records; no stream has none."""
        self._kept: dict[int, _KeptRecords] = {}
        """Others, which are committed."""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def oldest_end(self) -> int:
        """Return the WAL offset after the oldest record; -1 if there is none."""
        return self._held[0].wal_end if self._held else -1

    @property
    def newest_end(self) -> int:
        """Return the WAL offset after the newest record; -1 if there is none."""
        return self._held[-1].wal_end if self._held else -1

    def add(self, record: WalRecord) -> None:
        """Add the next DATA record of the WAL that is not in the bucket."""
        held = _Held(record)
        assert not self._held or held.wal_end > self._held[-1].wal_end
        self._held.append(held)
        self._by_stream.setdefault(held.stream_id, deque()).append(held)
        self._cache.add(footprint(held.record.payload))

    def put_before(self, older: RecoveredRecords) -> None:
        """Take over the records of `older`, those before these in the WAL, in the same cache; it is empty then."""
        assert older.newest_end < self.oldest_end or not self._held or not older
        self._held.extendleft(reversed(older._held))
        for stream_id, held in older._by_stream.items():
            self._by_stream.setdefault(stream_id, deque()).extendleft(reversed(held))
        older._held, older._by_stream = deque(), {}

    def discard_before(self, wal_offset: int, confirmed: int = -1, limit: int = sys.maxsize) -> None:
        """Drop records that end at or before `wal_offset`: they are committed. Call it before a stream is opened.

        Those that end at or before `confirmed` are what is committed, and stay in memory while there is room. At most
        `limit` records, the oldest ones: each takes some 4 µs.
        """
        kept: list[CacheEntry] = []
        while limit > 0 and self._held and self._held[0].wal_end <= wal_offset:
            limit -= 1
            held = self._held.popleft()
            same = self._by_stream[held.stream_id].popleft()
            if held.wal_end <= confirmed:
                self._unlist(held, same)
                kept.append(CacheEntry(held.wal_end, self._keep(held), held.record))
            else:
                self._drop(held, same)
        if kept:
            self._cache.release(kept)

    def _keep(self, held: _Held) -> StreamLog:
        base_offset = held.record.base_offset
        kept = self._kept.get(held.stream_id)
        if kept is None or kept.log.end_offset != base_offset:
            kept = self._kept[held.stream_id] = _KeptRecords(StreamLog(held.stream_id, base_offset), held.epoch)
        kept.log.push(held.record)
        return kept.log

    def kept(self, stream_id: int, committed_end: int, owner_since_epoch: int) -> StreamLog | None:
        """Return a log with the newest committed records of a stream, up to its committed end at least; None: no such.

        `owner_since_epoch`: as in the metadata.
        """
        found = self._kept.get(stream_id)
        if found is None or found.log.end_offset < committed_end or found.first_epoch < owner_since_epoch:
            return None
        return found.log

    def take_kept(self, stream_id: int, committed_end: int, owner_since_epoch: int) -> StreamLog | None:
        """As `kept`, for the storage that goes on with the log, which must end at the committed end."""
        found = self.kept(stream_id, committed_end, owner_since_epoch)
        self._kept.pop(stream_id, None)
        return found if found is not None and found.end_offset == committed_end else None

    def left(self, log: StreamLog) -> None:
        """The last record of a log that is kept was evicted."""
        found = self._kept.get(log.stream_id)
        if found is not None and found.log is log:
            del self._kept[log.stream_id]

    def forget_kept(self) -> None:
        """Let nothing that is committed be used from memory; the memory is freed in its turn."""
        self._kept.clear()

    def discard_from(self, wal_offset: int) -> None:
        """Drop records that end after `wal_offset`: the WAL was cut there. Call it before a stream is opened."""
        while self._held and self._held[-1].wal_end > wal_offset:
            held = self._held.pop()
            self._drop(held, self._by_stream[held.stream_id].pop())

    def _unlist(self, held: _Held, same: _Held) -> None:
        assert held is same, "records were discarded after a stream was opened"
        if not self._by_stream[held.stream_id]:
            del self._by_stream[held.stream_id]

    def _drop(self, held: _Held, same: _Held) -> None:
        self._unlist(held, same)
        self._cache.forget((footprint(held.record.payload),))

    def fill(self, stream_log: StreamLog, confirm_offset: int) -> str:
        """Move a stream's records to its log while it is opened; the log ends at its committed end and has its epochs.

        Those that end after the WAL offset `confirm_offset` are noted as unconfirmed.
        Returns a description of a gap or an overlap, or an empty string. On an error its records stay, to be set aside.
        So do those that are from before its release from a quarantine.
        """
        found = self._by_stream.pop(stream_log.stream_id, deque())
        current = [held for held in found if held.epoch >= stream_log.owner_since_epoch]
        if len(current) < len(found):
            fields = {"stream": stream_log.stream_id, "records": len(found) - len(current)}
            logger.info("ignoring records of an earlier ownership", extra=fields)
        if released := _released_at(current, stream_log.end_offset):
            apart = _set_apart(stream_log)
            for held in current[:released]:
                held.log = apart
            del current[:released]
        for held in current:
            held.log = stream_log
        stream_log.unconfirmed = [
            UnconfirmedRecord(held.record.base_offset, held.record.base_offset + held.record.count, held.wal_end)
            for held in current
            if held.wal_end > confirm_offset
        ]
        for held in current:
            if held.record.base_offset != stream_log.end_offset:
                return (
                    f"the WAL holds offset {held.record.base_offset} before WAL byte {held.wal_end}, "
                    f"but offset {stream_log.end_offset} must follow"
                )
            stream_log.push(held.record)
        return ""

    # -- reading, while the records follow a master's

    def confirmed_end(self, stream_id: int, owner_since_epoch: int, committed_end: int, confirm_offset: int) -> int:
        """Return the offset up to which a stream is committed, or its records are here and confirmed without a gap.

        `committed_end` and `owner_since_epoch` are the metadata's; `confirm_offset` is a WAL offset (int64 bytes).
        """
        held = self._by_stream.get(stream_id)
        if held is None:
            return committed_end
        first = bisect_left(held, owner_since_epoch, key=_EPOCH)
        last = bisect_right(held, confirm_offset, first, key=_WAL_END) - 1
        if last < first or held[first].record.base_offset > committed_end:
            return committed_end
        base, count, _ = held[last].record
        return max(committed_end, base + count)

    def read(
        self, stream_id: int, owner_since_epoch: int, start_offset: int, end_offset: int, max_bytes: int
    ) -> list[StreamEntry] | None:
        """Return records from the one that contains `start_offset`; None if that one is not here.

        At least one, then as many as fit into `max_bytes`, none that begins at or after `end_offset`, which is at most
        the stream's `confirmed_end`.
        """
        held = self._by_stream.get(stream_id)
        if held is None:
            return None
        first = bisect_left(held, owner_since_epoch, key=_EPOCH)
        at = bisect_right(held, start_offset, first, key=_BASE) - 1
        if at < first or start_offset >= held[at].record.base_offset + held[at].record.count:
            return None
        found, size = [held[at].record], len(held[at].record.payload)
        for following in range(at + 1, len(held)):
            record = held[following].record
            size += len(record.payload)
            if record.base_offset >= end_offset or size > max_bytes:
                break
            found.append(record)
        return found

    def streams_between(self, start: int, end: int) -> set[int]:
        """Return the streams of the records that end after the WAL offset `start`, and not after `end`."""
        held = self._held
        first, last = bisect_right(held, start, key=_WAL_END), bisect_right(held, end, key=_WAL_END)
        return {held[at].stream_id for at in range(first, last)}

    def unclaimed(self) -> list[int]:
        """Return the ids of streams whose records no `fill` has taken yet."""
        return list(self._by_stream)

    def newest_epoch(self, stream_id: int) -> int:
        """Return the largest stream epoch among an unclaimed stream's records."""
        return max(held.epoch for held in self._by_stream[stream_id])

    def settle(self) -> list[CacheEntry]:
        """All streams are known: return the records to upload or set aside, in WAL order; drop unclaimed ones."""
        entries = [CacheEntry(held.wal_end, held.log, held.record) for held in self._held if held.log is not None]
        dropped = [held for held in self._held if held.log is None]
        self._cache.forget(footprint(held.record.payload) for held in dropped)
        if self._by_stream:
            logger.warning("dropping records of unknown streams", extra={"streams": sorted(self._by_stream)})
        self._held.clear()
        self._by_stream.clear()
        return entries


def _released_at(records: list[_Held], committed_end: int) -> int:
    """Return how many records of a stream are from before its release from a quarantine; 0: it was not released.

    Only a release lets a stream go on at its committed end, under a larger epoch, behind records that do not follow it.
    """
    if not records or records[0].record.base_offset == committed_end:
        return 0
    for at in range(len(records) - 1, 0, -1):
        if records[at].record.base_offset == committed_end and records[at].epoch > records[at - 1].epoch:
            return at
    return 0


def _set_apart(stream_log: StreamLog) -> StreamLog:
    """Return a log for records that an operator has left behind: they are set aside, and the stream goes on."""
    apart = StreamLog(stream_log.stream_id, stream_log.end_offset)
    apart.fate, apart.is_noted = Fate.QUARANTINE, True
    apart.reason = "they do not follow what was committed when the quarantine was released"
    logger.warning("records from before a release from quarantine are set aside", extra={"stream": apart.stream_id})
    return apart

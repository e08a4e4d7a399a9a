"""The log cache: records of the WAL that are in memory, by stream. Tail reads are served from it.

It is bounded by bytes, and a record is charged its actual footprint (`tidelog.storage.cache.footprint`): the buffer
that its payload keeps alive, and Python's overhead. Uploaded records are evicted, oldest first over all streams, when
room is needed. Records that are not uploaded are never evicted: at the bound `has_room` returns False, and the caller
makes the producer wait (rule 12).

Invariants: a stream's cached records are contiguous and end at its next offset; the order of entries is the WAL's.

Entry: `LogCache`, `StreamLog`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from tidelog.storage.cache.footprint import footprint
from tidelog.storage.commits import StreamRange
from tidelog.storage.records import StreamEntry as StreamEntry

_GONE = StreamEntry(0, 0, b"")
_COMPACT_AT = 64
_NO_BASES: list[int] = []
_NO_RECORDS: list[StreamEntry] = []
"""Shared by all streams without a record in memory, and never modified: most streams are idle."""


class UnconfirmedRecord(NamedTuple):
    """A record at the end of a stream that an earlier master appended and nobody is known to have confirmed."""

    base_offset: int
    end_offset: int
    """Offset after its last one, in the stream."""
    wal_end: int
    """WAL offset (int64 bytes) after it: it is confirmed when the confirm offset reaches that."""


class Fate(Enum):
    """What happens to a stream's records that are not uploaded yet."""

    UPLOAD = "upload"
    DROP = "drop"
    """The stream was deleted or belongs to another replica set: its WAL range commits without it."""
    QUARANTINE = "quarantine"
    """They do not follow the committed range: they are set aside in the bucket, and an error is logged (rule 5)."""


class StreamLog:
    """The state of one stream in this process: its offsets, its epoch, and the records in memory."""

    __slots__ = (
        "_bases",
        "_head",
        "_records",
        "accepts",
        "committed_end",
        "end_offset",
        "epoch",
        "fate",
        "is_noted",
        "is_open",
        "owner_since_epoch",
        "reason",
        "sampled_in",
        "start_offset",
        "stream_id",
        "unconfirmed",
    )

    def __init__(self, stream_id: int, end_offset: int) -> None:
        self.stream_id = stream_id
        self.epoch = -1
        self.owner_since_epoch = -1
        self.start_offset = 0
        """Everything before it is trimmed."""
        self.committed_end = end_offset
        """Everything before it is in the bucket."""
        self.end_offset = end_offset
        """The next offset to append."""
        self.is_open = False
        self.accepts = False
        """Whether it accepts appends: open, and neither quarantined nor fenced."""
        self.fate = Fate.UPLOAD
        self.reason = ""
        """The reason of the quarantine."""
        self.is_noted = False
        """The controller has recorded the quarantine, so if it reports none later, the quarantine was released."""
        self.unconfirmed: Sequence[UnconfirmedRecord] = ()
        """Recovered records that were not confirmed when the stream was opened, in order. They may be by now."""
        self.sampled_in = 0
        """The tick of `tidelog.storage.history` in which an append to it was sampled last."""
        self._bases: list[int] = _NO_BASES
        self._records: list[StreamEntry] = _NO_RECORDS
        self._head = 0

    def unconfirmed_after(self, confirm_offset: int) -> list[UnconfirmedRecord]:
        """Return the recovered records that end after a confirm offset, and forget the others.

        Only a master of several replicas has some: until a quorum has its epoch's start, which confirms them all.
        """
        if self.unconfirmed:
            self.unconfirmed = [each for each in self.unconfirmed if each.wal_end > confirm_offset]
        return list(self.unconfirmed)

    def __len__(self) -> int:
        """Return the number of records in memory."""
        return len(self._bases) - self._head

    @property
    def cache_start(self) -> int:
        """Return the first offset in memory; `end_offset` if there is none."""
        return self._bases[self._head] if self._head < len(self._bases) else self.end_offset

    def not_cached(self, one: StreamRange) -> StreamRange | None:
        """Return what of a range that ends at or before this log's end is not in memory; None if all of it is."""
        if one.start_offset >= self.cache_start:
            return None
        return StreamRange(one.stream_id, one.start_offset, min(one.end_offset, self.cache_start))

    def push(self, record: StreamEntry) -> None:
        """Add the record after the last one."""
        base, count, _ = record
        assert base == self.end_offset, f"stream {self.stream_id}: {base} does not follow {self.end_offset}"
        if self._bases is _NO_BASES:
            self._bases, self._records = [], []
        self._bases.append(base)
        self._records.append(record)
        self.end_offset = base + count

    def pop(self, record: StreamEntry) -> None:
        """Remove the oldest record, if it is still this one."""
        head, bases = self._head, self._bases
        if head >= len(bases) or bases[head] != record.base_offset:
            return
        self._records[head] = _GONE
        head += 1
        if head == len(bases):
            self._bases, self._records, head = _NO_BASES, _NO_RECORDS, 0
        elif head >= _COMPACT_AT and head * 2 >= len(bases):
            del bases[:head], self._records[:head]
            head = 0
        self._head = head

    def forget_before(self, offset: int) -> None:
        """Serve committed records that end at or before `offset` from memory no more: the bucket has them compacted.

        Their memory is freed when their turn for eviction comes.
        """
        limit = min(offset, self.committed_end)
        while self._head < len(self._bases):
            record = self._records[self._head]
            if record.base_offset + record.count > limit:
                return
            self.pop(record)

    def read(self, start_offset: int, end_offset: int, max_bytes: int) -> list[StreamEntry] | None:
        """Return records from the one that contains `start_offset`; None if that one is not in memory.

        At least one, then as many as fit into `max_bytes`, none that begins at or after `end_offset`.
        """
        bases, records = self._bases, self._records
        first = bisect_right(bases, start_offset, self._head) - 1
        if first < self._head or start_offset >= self.end_offset:
            return None
        last = first + 1
        total = len(bases)
        size = len(records[first].payload)
        while last < total and bases[last] < end_offset:
            size += len(records[last].payload)
            if size > max_bytes:
                break
            last += 1
        return records[first:last]

    def tail(self, max_bytes: int) -> list[StreamEntry]:
        """Return the newest records that fit into `max_bytes`, in order."""
        at, size = len(self._records), 0
        while at > self._head:
            size += len(self._records[at - 1].payload)
            if size > max_bytes:
                break
            at -= 1
        return self._records[at:]

    def warm(self, records: Sequence[StreamEntry]) -> None:
        """Add contiguous, committed records that end at the stream's end. None of the stream may be in memory."""
        assert records and not len(self)
        end_offset, self.end_offset = self.end_offset, records[0].base_offset
        for record in records:
            self.push(record)
        assert self.end_offset == end_offset, f"stream {self.stream_id}: {self.end_offset} != {end_offset}"


class CacheEntry(NamedTuple):
    """A record in the order of the WAL."""

    wal_end: int
    """WAL byte offset after the record."""
    log: StreamLog
    record: StreamEntry


class LogCache:
    """The memory accounting and the eviction order of all streams' records."""

    __slots__ = ("_bound_bytes", "_evictable", "bytes", "on_empty", "pending_bytes")

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes = bound_bytes
        self.on_empty: Callable[[StreamLog], None] | None = None
        """Called with a stream whose last record has left memory."""
        self._evictable: deque[CacheEntry] = deque()
        self.bytes = 0
        """Bytes in memory, overhead included."""
        self.pending_bytes = 0
        """Bytes of these that are not uploaded and cannot be evicted."""

    @property
    def bound_bytes(self) -> int:
        """Return the bound on `bytes`. One larger record is admitted when nothing else is pending."""
        return self._bound_bytes

    def has_room(self, cost: int) -> bool:
        """Return whether a record of this footprint fits; evict uploaded records if needed."""
        over = self.bytes + cost - self._bound_bytes
        if over <= 0:
            return True
        self.evict(over)
        return self.bytes + cost <= self._bound_bytes or self.pending_bytes == 0

    def add(self, cost: int) -> None:
        """Charge a pending record of this footprint."""
        self.bytes += cost
        self.pending_bytes += cost

    def release(self, entries: Iterable[CacheEntry]) -> None:
        """Make these records, the oldest pending ones, evictable: they are uploaded (or need no upload)."""
        released = 0
        for entry in entries:
            _, log, (base, count, payload) = entry
            released += footprint(payload)
            self._evictable.append(entry)
            if log.fate is Fate.UPLOAD:
                log.committed_end = base + count
        self.pending_bytes -= released
        assert self.pending_bytes >= 0
        if self.bytes > self._bound_bytes:
            self.evict(self.bytes - self._bound_bytes)

    def forget(self, costs: Iterable[int]) -> None:
        """Discharge pending records of these footprints that never were in a stream's memory."""
        for cost in costs:
            self.bytes -= cost
            self.pending_bytes -= cost

    def evict(self, wanted_bytes: int) -> None:
        """Drop the oldest uploaded records, at least `wanted_bytes` if there are so many."""
        evictable = self._evictable
        freed = 0
        while freed < wanted_bytes and evictable:
            _, log, record = evictable.popleft()
            log.pop(record)
            freed += footprint(record.payload)
            if not log and self.on_empty is not None:
                self.on_empty(log)
        self.bytes -= freed

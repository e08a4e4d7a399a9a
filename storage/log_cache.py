"""The log cache: what is in the WAL and still in memory, by stream. Tail reads are answered from here.

It is bounded by bytes, and a record counts with what it truly costs (`storage.footprint`): the buffer that its payload
keeps alive, and what Python spends around it. What is uploaded may be evicted, and is, oldest first over all streams,
when room is needed. What is not uploaded is never evicted: at the bound `has_room` says no, and the caller makes the
producer wait (rule 12).

Invariants: a stream's cached records are contiguous and end at its next offset; the order of entries is the WAL's.

Entry: `LogCache`, `StreamLog`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from storage.footprint import footprint
from storage.records import StreamRecord as StreamRecord

_GONE = StreamRecord(0, 0, b"")
_COMPACT_AT = 64
_NO_BASES: list[int] = []
_NO_RECORDS: list[StreamRecord] = []
"""Shared by all streams without a record in memory, and never changed: most streams are idle."""


class Fate(Enum):
    """What becomes of a stream's records that are not uploaded yet."""

    UPLOAD = "upload"
    DROP = "drop"
    """The stream was deleted or belongs to somebody else: its WAL range commits without it."""
    QUARANTINE = "quarantine"
    """They do not meet the committed range: kept aside in the bucket, loudly (rule 5)."""


class StreamLog:
    """One stream as this process has it: its offsets, its epoch, and the records in memory."""

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
        "start_offset",
        "stream_id",
    )

    def __init__(self, stream_id: int, end_offset: int) -> None:
        self.stream_id = stream_id
        self.epoch = -1
        self.owner_since_epoch = -1
        self.start_offset = 0
        """Below it, everything is trimmed."""
        self.committed_end = end_offset
        """Below it, everything is in the bucket."""
        self.end_offset = end_offset
        """The next offset to append."""
        self.is_open = False
        self.accepts = False
        """Whether it takes appends: open, and neither quarantined nor fenced."""
        self.fate = Fate.UPLOAD
        self.reason = ""
        """Why it is quarantined."""
        self.is_noted = False
        """The controller knows of the quarantine, so that its word that there is none means that it was lifted."""
        self._bases: list[int] = _NO_BASES
        self._records: list[StreamRecord] = _NO_RECORDS
        self._head = 0

    def __len__(self) -> int:
        """How many records are in memory."""
        return len(self._bases) - self._head

    @property
    def cache_start(self) -> int:
        """The first offset in memory; `end_offset` when there is none."""
        return self._bases[self._head] if self._head < len(self._bases) else self.end_offset

    def push(self, record: StreamRecord) -> None:
        """Add the record that follows the last one."""
        base, count, _ = record
        assert base == self.end_offset, f"stream {self.stream_id}: {base} does not follow {self.end_offset}"
        if self._bases is _NO_BASES:
            self._bases, self._records = [], []
        self._bases.append(base)
        self._records.append(record)
        self.end_offset = base + count

    def pop(self, record: StreamRecord) -> None:
        """Forget the oldest record, if it is still this one."""
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

    def read(self, start_offset: int, end_offset: int, max_bytes: int) -> list[StreamRecord] | None:
        """Records from the one that contains `start_offset`; None when that one is not in memory.

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

    def tail(self, max_bytes: int) -> list[StreamRecord]:
        """The newest records that fit into `max_bytes`, in order."""
        at, size = len(self._records), 0
        while at > self._head:
            size += len(self._records[at - 1].payload)
            if size > max_bytes:
                break
            at -= 1
        return self._records[at:]

    def warm(self, records: Sequence[StreamRecord]) -> None:
        """Take contiguous, committed records that end where the stream does. Nothing of it may be in memory."""
        assert records and not len(self)
        end_offset, self.end_offset = self.end_offset, records[0].base_offset
        for record in records:
            self.push(record)
        assert self.end_offset == end_offset, f"stream {self.stream_id}: {self.end_offset} != {end_offset}"


class Entry(NamedTuple):
    """A record in the order of the WAL."""

    wal_end: int
    """WAL byte offset after the record."""
    log: StreamLog
    record: StreamRecord


class LogCache:
    """The accounts and the order of eviction of all streams' records."""

    __slots__ = ("_bound_bytes", "_evictable", "_on_empty", "bytes", "pending_bytes")

    def __init__(self, bound_bytes: int, on_empty: Callable[[StreamLog], None] | None = None) -> None:
        self._bound_bytes = bound_bytes
        self._on_empty = on_empty
        self._evictable: deque[Entry] = deque()
        self.bytes = 0
        """Everything in memory, overhead included."""
        self.pending_bytes = 0
        """Of that, what is not uploaded and cannot be evicted."""

    @property
    def bound_bytes(self) -> int:
        """The bound on `bytes`. One record larger than it is let in when nothing else is pending."""
        return self._bound_bytes

    def has_room(self, cost: int) -> bool:
        """Whether a record of this footprint fits, after evicting what may go."""
        over = self.bytes + cost - self._bound_bytes
        if over <= 0:
            return True
        self._evict(over)
        return self.bytes + cost <= self._bound_bytes or self.pending_bytes == 0

    def add(self, cost: int) -> None:
        """Account for a pending record of this footprint."""
        self.bytes += cost
        self.pending_bytes += cost

    def release(self, entries: Iterable[Entry]) -> None:
        """These records, the oldest pending ones, are uploaded (or need no upload): they may be evicted now."""
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
            self._evict(self.bytes - self._bound_bytes)

    def forget(self, costs: Iterable[int]) -> None:
        """Pending records of these footprints are gone without having been in any stream's memory."""
        for cost in costs:
            self.bytes -= cost
            self.pending_bytes -= cost

    def _evict(self, wanted_bytes: int) -> None:
        evictable = self._evictable
        freed = 0
        while freed < wanted_bytes and evictable:
            _, log, record = evictable.popleft()
            log.pop(record)
            freed += footprint(record.payload)
            if not log and self._on_empty is not None:
                self._on_empty(log)
        self.bytes -= freed

"""Decides when data is uploaded, and how it is divided into objects. Sans-IO: offsets and times in, tasks out.

A *task* uploads one WAL range. Tasks are contiguous: each starts where the previous one ended, and every record that
ends inside a task's range is in that task, so that committing them in order commits the WAL in order (rules 3 and 5).
Only confirmed records are planned (rule 2). EPOCH_START records are part of the ranges and of no object, so a task may
have no objects and still commit its range.

A task is due when `size_bytes` of confirmed WAL are pending, when the oldest confirmed byte has waited for `age_ms`, or
when it is forced (shutdown, back-pressure). It is cut at `size_bytes` (a larger record goes alone), so that memory in
flight stays below `max_in_flight` × `size_bytes`, and at 4,096 streams, so that the commit stays a small command.

Entry: `UploadPlanner`, `layout`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from tidelog.storage.cache.log_cache import CacheEntry, Fate, StreamLog
from tidelog.storage.commits import ObjectKind
from tidelog.storage.records import StreamEntry
from tidelog.storage.settings import UploadSettings

MAX_STREAMS = 4096
"""Limit of streams in one task: at some 25 bytes per range the commit command stays near 100 KB."""
MAX_OBJECTS = 256
"""Limit of objects in one task; a controller allocates up to 1,024 ids at once."""
_MAX_MARKS = 64
_wal_end = attrgetter("wal_end")


@dataclass(frozen=True, slots=True, eq=False)
class UploadTask:
    """One WAL range `[wal_start, wal_end)` and all records that end in it, in WAL order."""

    wal_start: int
    wal_end: int
    entries: list[CacheEntry]
    waiting_since: float
    """Since when its first byte has been confirmed, at most: monotonic seconds."""


@dataclass(slots=True)
class StreamPart:
    """One stream's records of a task, contiguous."""

    log: StreamLog
    records: list[StreamEntry]
    size: int
    """Payload bytes."""


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """The contents of one object: parts sorted by stream id."""

    kind: ObjectKind
    parts: list[StreamPart]


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """The layout of a task's records in the bucket."""

    objects: list[ObjectPlan]
    quarantined: list[StreamPart]
    """Parts that are set aside because their stream is quarantined."""
    fates: list[tuple[StreamLog, Fate]]
    """The fate of each stream on which this layout is based."""

    @property
    def is_current(self) -> bool:
        """Return whether no stream's fate has changed since."""
        return all(log.fate is fate for log, fate in self.fates)


def layout(task: UploadTask, split_bytes: int) -> ObjectLayout:
    """Group a task's records by stream and divide them into objects. Thread-safe.

    Streams of at least `split_bytes` get an object each; the others share a stream-set object.
    """
    by_log: dict[StreamLog, StreamPart] = {}
    for _, log, record in task.entries:
        part = by_log.get(log)
        if part is None:
            if log.fate is Fate.DROP:
                continue
            by_log[log] = part = StreamPart(log, [], 0)
        part.records.append(record)
        part.size += len(record.payload)
    parts = sorted(by_log.values(), key=lambda part: part.log.stream_id)
    fates = [(part.log, part.log.fate) for part in parts]
    wanted = [part for part, (_, fate) in zip(parts, fates, strict=True) if fate is Fate.UPLOAD]
    quarantined = [part for part, (_, fate) in zip(parts, fates, strict=True) if fate is Fate.QUARANTINE]
    large = sorted((part for part in wanted if part.size >= split_bytes), key=lambda part: -part.size)
    alone = {part.log.stream_id for part in large[: MAX_OBJECTS - 1]}
    shared = [part for part in wanted if part.log.stream_id not in alone]
    objects = [ObjectPlan(ObjectKind.STREAM_SET, shared)] if shared else []
    objects += [ObjectPlan(ObjectKind.STREAM, [part]) for part in wanted if part.log.stream_id in alone]
    return ObjectLayout(objects, quarantined, fates)


class UploadPlanner:
    """Cuts the confirmed log into tasks. It returns none until `release`, when all streams are known."""

    def __init__(self, settings: UploadSettings, wal_start: int) -> None:
        self._size_bytes = settings.size_bytes
        self._age_s = settings.age_ms / 1000
        self._entries: list[CacheEntry] = []
        self._head = 0
        self._confirmed = wal_start
        self._marks: deque[tuple[int, float]] = deque()
        self._waiting_since = 0.0
        self._force_to = wal_start
        self._held = True
        self.urgent = False
        """Producers wait for room: everything confirmed is due."""
        self.planned = wal_start
        """WAL offset up to which tasks were returned."""

    @property
    def held(self) -> bool:
        """Return whether planning waits because the recovered streams are not all known."""
        return self._held

    @property
    def pending_bytes(self) -> int:
        """Return the confirmed WAL bytes that are in no task yet."""
        return self._confirmed - self.planned

    def add(self, entry: CacheEntry) -> None:
        """Add a record appended to the WAL, after all others. O(1)."""
        self._entries.append(entry)

    def restart(self, wal_start: int) -> None:
        """Begin at another WAL offset; only before anything was planned."""
        assert self._held and wal_start >= self.planned
        self.planned = self._force_to = wal_start
        self._confirmed = max(self._confirmed, wal_start)

    def release(self, recovered: list[CacheEntry]) -> None:
        """Start planning: all streams are known. `recovered` precede the records added since."""
        assert self._held
        assert not (recovered and self._entries) or recovered[-1].wal_end < self._entries[0].wal_end
        self._entries[:0] = recovered
        self._held = False

    def observe(self, now: float, confirmed: int) -> None:
        """Record the time (monotonic seconds) and the confirm offset. Ages count from this call."""
        if confirmed <= self._confirmed:
            return
        if self._confirmed <= self.planned:
            self._waiting_since = now
        self._confirmed = confirmed
        if len(self._marks) == _MAX_MARKS:
            self._marks.pop()
        self._marks.append((confirmed, now))

    def force(self, wal_offset: int) -> None:
        """Plan everything up to `wal_offset` (≤ the confirm offset), whatever its size and age."""
        self._force_to = max(self._force_to, wal_offset)

    def next_task(self, now: float) -> UploadTask | None:
        """Return the next task that is due, or None."""
        pending = self.pending_bytes
        if self._held or pending <= 0:
            return None
        forced = self.urgent or self._force_to > self.planned
        due = forced or pending >= self._size_bytes or now >= self._due_at()
        return self._cut() if due else None

    def watch_at(self) -> int | None:
        """Return the confirm offset at which to call again; None when that would change nothing."""
        if self._held or self.pending_bytes >= self._size_bytes:
            return None
        return self.planned + (1 if self.pending_bytes <= 0 else self._size_bytes)

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until pending data is old enough; None when nothing is pending."""
        if self._held or self.pending_bytes <= 0:
            return None
        return max(0.0, self._due_at() - now)

    def waiting_since(self) -> float | None:
        """Return since when the oldest confirmed byte that is in no task waits; None if there is none."""
        return self._waiting_since if self.pending_bytes > 0 else None

    def _due_at(self) -> float:
        return self._waiting_since + self._age_s

    def _cut(self) -> UploadTask:
        entries, head, confirmed = self._entries, self._head, self._confirmed
        limit = min(confirmed, self.planned + self._size_bytes)
        cut = bisect_right(entries, limit, head, key=_wal_end)
        if cut == head and head < len(entries) and entries[head].wal_end <= confirmed:
            cut = head + 1
        while cut - head > MAX_STREAMS and len({entry.log.stream_id for entry in entries[head:cut]}) > MAX_STREAMS:
            cut = head + (cut - head) // 2
        rest_is_unconfirmed = cut == len(entries) or entries[cut].wal_end > confirmed
        wal_end = confirmed if rest_is_unconfirmed else entries[cut - 1].wal_end
        task = UploadTask(self.planned, wal_end, entries[head:cut], self._waiting_since)
        assert task.wal_end > task.wal_start
        self._advance(cut, wal_end)
        return task

    def _advance(self, cut: int, wal_end: int) -> None:
        self.planned = wal_end
        if cut * 2 >= len(self._entries):
            del self._entries[:cut]
            cut = 0
        self._head = cut
        # The rest was confirmed after the last mark at or before wal_end: never uploaded later than age_ms.
        while self._marks and self._marks[0][0] <= wal_end:
            self._waiting_since = self._marks.popleft()[1]

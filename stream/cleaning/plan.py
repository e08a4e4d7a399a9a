"""When a log is cleaned, and how far (Kafka: KIP-58, KIP-354).

Entry: `LogFacts`, `plan_round`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tidelog.stream.log_config import LogConfig
from tidelog.stream.segments import Segment


class LogFacts(NamedTuple):
    """What a plan is made of. Offsets int64."""

    segments: Sequence[Segment]
    """Sorted; the last one is active."""
    log_start: int
    last_stable: int
    first_dirty: int
    """Where the last whole round ended; 0 before the first one."""
    recoverable: int
    """No recovery, from whatever a failure leaves, reads batches before this offset."""


class Round(NamedTuple):
    """A plan."""

    first_dirty: int
    """Where the map is filled from."""
    end: int
    """Everything before it may be cleaned; a full map ends the round earlier. ≤ `first_dirty`: nothing is dirty."""
    dirty_bytes: int
    total_bytes: int
    """Of everything up to the end, `dirty_bytes` included."""
    is_due: bool
    left: int = 0
    """Before this offset older values of clean keys may be left, which earlier rounds had to leave out, and which this
    round, with a map of the dirty keys alone, does not find. 0: nowhere."""

    @property
    def dirty_ratio(self) -> float:
        """Return dirty bytes / all bytes (0–1)."""
        return self.dirty_bytes / self.total_bytes if self.total_bytes else 0.0


def plan_round(facts: LogFacts, now_ms: int, config: LogConfig) -> Round:
    """Return the next round of a log, due or not."""
    segments = facts.segments
    end = min(facts.last_stable, facts.recoverable, segments[-1].base_offset)
    for segment in segments[:-1]:
        if config.min_compaction_lag_ms > 0 and segment.newest_ms() > now_ms - config.min_compaction_lag_ms:
            end = min(end, segment.base_offset)
            break
    first_dirty = facts.first_dirty if facts.log_start <= facts.first_dirty <= facts.last_stable else facts.log_start
    dirty = total = 0
    oldest_ms: int | None = None
    for segment, following in pairwise(segments):
        start, stop = max(segment.base_offset, facts.log_start), min(following.base_offset, end)
        if start >= stop:
            continue
        span = following.base_offset - segment.base_offset
        total += segment.size_bytes * (stop - start) // span
        if stop > first_dirty:
            dirty += segment.size_bytes * (stop - max(start, first_dirty)) // span
            if oldest_ms is None:
                oldest_ms = segment.first_timestamp if segment.first_timestamp >= 0 else segment.created_ms
    is_late = oldest_ms is not None and now_ms - oldest_ms > config.max_compaction_lag_ms
    is_dirty = dirty > 0 and dirty > config.min_cleanable_dirty_ratio * total
    return Round(first_dirty, end, dirty, total, first_dirty < end and (is_dirty or is_late))


class RecoverableOffset:
    """From which offset a recovery reads batches, by a checkpoint that the bucket is known to hold.

    Between a checkpoint and the upload that brings it to the bucket, the one before counts.
    """

    __slots__ = ("_waiting", "value")

    def __init__(self) -> None:
        self.value = -1
        """-1: none is known yet."""
        self._waiting: tuple[int, int] | None = None

    def look(self, scan_from: int, wal_end: int, committed_wal_offset: int) -> int:
        """Note where a recovery would scan from by the newest checkpoint; return the offset that is safe.

        `wal_end`: the WAL's end now, so that the checkpoint lies before it.
        """
        if self._waiting is not None and self._waiting[1] <= committed_wal_offset:
            self.value, self._waiting = self._waiting[0], None
        if self._waiting is None and scan_from != self.value:
            if wal_end <= committed_wal_offset:
                self.value = scan_from
            else:
                self._waiting = (scan_from, wal_end)
        return self.value

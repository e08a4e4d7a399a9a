"""Segments: slices of the data stream, the unit of rolling and retention. They are bookkeeping, not files.

Sans-I/O. Invariant of a log's list of segments: sorted by base offset; each ends where the next begins; only the last,
the *active* one, grows. Decisions (when to roll, how far retention reaches) are pure functions with Kafka's rules.

Entry: `Segment`, `should_roll`, `retention_start`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidelog.stream.log_config import LogConfig

NO_TIMESTAMP = -1


class Segment(msgspec.Struct, array_like=True, gc=False):
    """One slice of the data stream, as stored in the meta stream (msgpack array, fields only added at the end)."""

    base_offset: int
    """First offset (int64)."""
    created_ms: int
    """Wall clock at the append of its first batch; also the default for batches without timestamps."""
    time_start: int
    """Index of its first entry in the time stream."""
    size_bytes: int = 0
    first_timestamp: int = NO_TIMESTAMP
    """Largest timestamp of its first batch, ms; -1: none."""
    max_timestamp: int = NO_TIMESTAMP
    appended_ms: int = NO_TIMESTAMP
    """Wall clock of the last append."""

    def add(self, size_bytes: int, max_timestamp: int, now_ms: int) -> None:
        """Add one batch."""
        if not self.size_bytes:
            self.created_ms = now_ms
        if self.first_timestamp < 0:
            self.first_timestamp = max_timestamp
        if max_timestamp > self.max_timestamp:
            self.max_timestamp = max_timestamp
        self.size_bytes += size_bytes
        self.appended_ms = now_ms

    def newest_ms(self) -> int:
        """Return the time for retention: the largest timestamp, or the last append if records have no timestamps."""
        return self.max_timestamp if self.max_timestamp >= 0 else self.appended_ms


def should_roll(active: Segment, batch_bytes: int, max_timestamp: int, now_ms: int, config: LogConfig) -> bool:
    """Whether a batch starts a new segment: the active one would exceed its size or age (in record time)."""
    if not active.size_bytes:
        return False
    if active.size_bytes + batch_bytes > config.segment_bytes:
        return True
    if active.first_timestamp >= 0 and max_timestamp >= 0:
        return max_timestamp - active.first_timestamp > config.roll_ms
    return now_ms - active.created_ms > config.roll_ms


def retention_start(
    segments: Sequence[Segment], log_start: int, high_watermark: int, log_end: int, now_ms: int, config: LogConfig
) -> int:
    """Return the log start that retention by time and size requires; never past the high watermark.

    Only whole segments are dropped, oldest first, up to the first that must stay. The active segment is dropped once
    all of it is older than `retention.ms`, but never because of size.
    """
    if not config.deletes:
        return log_start
    start = log_start
    excess = sum(segment.size_bytes for segment in segments) - config.retention_bytes
    for index, segment in enumerate(segments):
        last = index + 1 == len(segments)
        end = log_end if last else segments[index + 1].base_offset
        if end > high_watermark or (last and not segment.size_bytes):
            break
        expired = 0 <= config.retention_ms < now_ms - segment.newest_ms()
        oversize = config.retention_bytes >= 0 and not last and excess >= segment.size_bytes
        if not (expired or oversize):
            break
        excess -= segment.size_bytes
        start = max(start, end)
    return start

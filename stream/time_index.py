"""The time index: start positions for lookups by timestamp within a segment.

An entry on the time stream is 16 bytes, `timestamp (int64), offset (int64)`: every record of the segment *before* that
offset has a timestamp ≤ the entry's. Within a segment both grow. A segment stores the index of its first entry.

Entries are created sparsely while appending, wait in memory, and are written together at the next checkpoint. After a
crash recovery creates the lost ones again from the batch headers. Entry: `TimeIndex.note`, `TimeIndex.floor`.
"""

from __future__ import annotations

from bisect import bisect_left
from struct import Struct

from tidelog.stream.index_stream import IndexStream, Row
from tidelog.stream.segments import NO_TIMESTAMP
from tidelog.stream.stream import Stream

_LAYOUT = Struct(">qq")


class TimeIndex:
    """The time index of one partition."""

    __slots__ = ("_bytes", "_index", "_last_timestamp", "_pending")

    def __init__(self, stream: Stream) -> None:
        self._index = IndexStream(stream, _LAYOUT)
        self._pending: list[Row] | None = None
        self._bytes = 0
        self._last_timestamp = NO_TIMESTAMP

    @property
    def stream(self) -> Stream:
        """Return the underlying stream."""
        return self._index.stream

    @property
    def end(self) -> int:
        """Return the index of the next entry."""
        return self.stream.next_offset + (len(self._pending) if self._pending else 0)

    def note(self, segment_max_timestamp: int, base_offset: int, batch_bytes: int, interval_bytes: int) -> None:
        """Record a batch at `base_offset`; `segment_max_timestamp` is the largest of the segment before it."""
        if self._bytes >= interval_bytes and segment_max_timestamp > self._last_timestamp:
            if self._pending is None:
                self._pending = []
            self._pending.append((segment_max_timestamp, base_offset))
            self._last_timestamp = segment_max_timestamp
            self._bytes = 0
        self._bytes += batch_bytes

    def roll(self) -> None:
        """Start a new segment."""
        self._bytes = 0
        self._last_timestamp = NO_TIMESTAMP

    def flush(self) -> None:
        """Write waiting entries. Raises `WalFull`, `Overloaded`, `WalFailed`; the entries then keep waiting."""
        if self._pending:
            self._index.append(self._pending)
            self._pending = None

    async def forget_flushed(self) -> None:
        """Drop waiting entries that had reached the stream before the crash. Called after recovery."""
        stream = self.stream
        if self._pending and stream.next_offset > stream.start_offset:
            last = (await self._index.read(stream.next_offset - 1, stream.next_offset))[0]
            self._pending = [row for row in self._pending if row[1] > last[1]] or None

    async def floor(self, start: int, end: int, timestamp: int) -> int | None:
        """Return an offset before which no record of the segment has a timestamp ≥ `timestamp`; None: its start.

        `[start, end)` are the segment's entries. Raises `CorruptData`, `Unavailable`.
        """
        flushed = self.stream.next_offset
        if self._pending:
            rows = self._pending[max(0, start - flushed) : max(0, end - flushed)]
            at = bisect_left(rows, timestamp, key=lambda row: row[0])
            if at:
                return rows[at - 1][1]
        start, end = max(start, self.stream.start_offset), min(end, flushed)
        index = await self._index.first_where(start, end, lambda row: row[0] >= timestamp)
        if index <= start:
            return None
        return (await self._index.read(index - 1, index))[0][1]

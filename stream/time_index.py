"""The time index: where in a segment to begin looking for a timestamp.

An entry on the time stream is 16 bytes, `timestamp (int64), offset (int64)`: every record of the segment *before* that
offset has a timestamp ≤ the entry's. Within a segment both grow. A segment knows the index of its first entry.

Entries are made sparsely while appending and wait in memory; they go to the stream together at the next checkpoint.
What a crash takes with it, recovery makes again from the batch headers. Entry: `TimeIndex.note`, `TimeIndex.floor`.
"""

from __future__ import annotations

from bisect import bisect_left
from struct import Struct

from stream.index_stream import IndexStream, Row
from stream.segments import NO_TIMESTAMP
from stream.stream import Stream

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
        """The stream underneath."""
        return self._index.stream

    @property
    def end(self) -> int:
        """The index that the next entry gets."""
        return self.stream.next_offset + (len(self._pending) if self._pending else 0)

    def note(self, segment_max_timestamp: int, base_offset: int, batch_bytes: int, interval_bytes: int) -> None:
        """A batch follows at `base_offset`, before which the segment's largest timestamp is `segment_max_timestamp`."""
        if self._bytes >= interval_bytes and segment_max_timestamp > self._last_timestamp:
            if self._pending is None:
                self._pending = []
            self._pending.append((segment_max_timestamp, base_offset))
            self._last_timestamp = segment_max_timestamp
            self._bytes = 0
        self._bytes += batch_bytes

    def roll(self) -> None:
        """A new segment begins."""
        self._bytes = 0
        self._last_timestamp = NO_TIMESTAMP

    def flush(self) -> None:
        """Put waiting entries on the stream. Raises `WalFull`, `Overloaded`, `WalFailed`; they wait on then."""
        if self._pending:
            self._index.append(self._pending)
            self._pending = None

    async def forget_flushed(self) -> None:
        """After recovery: drop waiting entries that had reached the stream before the crash."""
        stream = self.stream
        if self._pending and stream.next_offset > stream.start_offset:
            last = (await self._index.read(stream.next_offset - 1, stream.next_offset))[0]
            self._pending = [row for row in self._pending if row[1] > last[1]] or None

    async def floor(self, start: int, end: int, timestamp: int) -> int | None:
        """An offset before which no record of the segment has a timestamp ≥ `timestamp`, or None: the segment's start.

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

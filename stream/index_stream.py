"""Entries of a fixed width on a stream, one stream offset for each entry. Base of the time and txn indexes.

Payload of an append: version (1 byte, =1), then its consecutive entries, big-endian. No entries are held in memory: a
lookup is a binary search that reads whole appends through the storage's caches.

Entry: `IndexStream.append`, `IndexStream.first_where`, `IndexStream.read`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct

from tidelog.runtime.errors import CorruptData
from tidelog.storage.records import StreamEntry
from tidelog.stream.stream import Stream

_VERSION = b"\x01"
_PROBE_BYTES = 1
"""A read returns at least one whole append, and a probe needs no more."""
_READ_BYTES = 256 * 1024

Row = tuple[int, ...]


class IndexStream:
    """A stream of entries of one layout."""

    __slots__ = ("layout", "stream")

    def __init__(self, stream: Stream, layout: Struct) -> None:
        self.stream = stream
        self.layout = layout

    def append(self, rows: Sequence[Row]) -> int:
        """Append entries in one record. Returns its WAL end. Raises `WalFull`, `Overloaded`, `WalFailed`."""
        packed = b"".join([_VERSION, *(self.layout.pack(*row) for row in rows)])
        return self.stream.append(len(rows), [packed])[1]

    def _rows(self, record: StreamEntry) -> list[Row]:
        payload = record.payload
        if len(payload) != 1 + record.count * self.layout.size or bytes(payload[:1]) != _VERSION:
            raise CorruptData(f"an index entry of stream {self.stream.stream_id} does not parse")
        return list(self.layout.iter_unpack(payload[1:]))

    async def read(self, start: int, end: int) -> list[Row]:
        """Return entries in `[start, end)`, from `start` on: at least one if there is any, many at a time."""
        rows: list[Row] = []
        for record in await self.stream.read(start, end, _READ_BYTES):
            rows += self._rows(record)[max(0, start - record.base_offset) : end - record.base_offset]
        return rows

    async def first_where(self, start: int, end: int, holds: Callable[[Row], bool]) -> int:
        """Return the first index in `[start, end)` whose entry `holds`, or `end`. `holds` must be monotonic."""
        low, high = start, end
        while low < high:
            middle = (low + high) // 2
            record = (await self.stream.read(middle, middle + 1, _PROBE_BYTES))[0]
            rows = self._rows(record)
            first = max(low, record.base_offset)
            last = min(high, record.base_offset + record.count) - 1
            if not holds(rows[last - record.base_offset]):
                low = last + 1
            elif holds(rows[first - record.base_offset]):
                high = first
            else:  # the boundary is inside this append
                for index in range(first + 1, last + 1):
                    if holds(rows[index - record.base_offset]):
                        return index
        return low

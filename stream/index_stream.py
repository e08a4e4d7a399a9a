"""Entries of a fixed width on a stream: one entry, one stream offset. The time and txn indexes stand on it.

Payload of an append: version (1 byte, =1), then its entries one after another, big-endian. Nothing of the stream is
held in memory: a lookup is a binary search that reads whole appends through the storage's caches.

Entry: `IndexStream.append`, `IndexStream.first_where`, `IndexStream.read`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct

from runtime.errors import CorruptData
from storage.records import StreamRecord
from stream.stream import Stream

_VERSION = b"\x01"
_PROBE_BYTES = 1
"""A read returns at least one whole append; a probe wants no more."""
_READ_BYTES = 256 * 1024

Row = tuple[int, ...]


class IndexStream:
    """A stream of entries of one layout."""

    __slots__ = ("layout", "stream")

    def __init__(self, stream: Stream, layout: Struct) -> None:
        self.stream = stream
        self.layout = layout

    def append(self, rows: Sequence[Row]) -> int:
        """Append entries in one record; the WAL end to wait for. Raises `WalFull`, `Overloaded`, `WalFailed`."""
        packed = b"".join([_VERSION, *(self.layout.pack(*row) for row in rows)])
        return self.stream.append(len(rows), [packed])[1]

    def _rows(self, record: StreamRecord) -> list[Row]:
        payload = record.payload
        if len(payload) != 1 + record.count * self.layout.size or bytes(payload[:1]) != _VERSION:
            raise CorruptData(f"an index entry of stream {self.stream.stream_id} does not parse")
        return list(self.layout.iter_unpack(payload[1:]))

    async def read(self, start: int, end: int) -> list[Row]:
        """Entries from index `start` on, before `end`: at least one if there is any, many at a time."""
        rows: list[Row] = []
        for record in await self.stream.read(start, end, _READ_BYTES):
            rows += self._rows(record)[max(0, start - record.base_offset) : end - record.base_offset]
        return rows

    async def first_where(self, start: int, end: int, holds: Callable[[Row], bool]) -> int:
        """The first index in `[start, end)` whose entry `holds`, or `end`; `holds` stays true once it is true."""
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
            else:  # the edge is inside this append
                for index in range(first + 1, last + 1):
                    if holds(rows[index - record.base_offset]):
                        return index
        return low

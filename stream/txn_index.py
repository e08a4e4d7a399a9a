"""Index of aborted transactions, which read_committed consumers must skip.

An entry on the txn stream is 32 bytes, big-endian: producer id (int64), first offset (int64), last offset (int64: the
abort marker's), last stable offset when the marker was written (int64). Entries are in the order of their markers, so
last offsets grow, and every later entry begins at or after an earlier one's last stable offset, where lookups stop.

The newest entries are kept in memory after the first lookup. Entry: `TxnIndex.lookup`.
"""

from __future__ import annotations

from array import array
from struct import Struct
from typing import NamedTuple

from tidelog.stream.index_stream import IndexStream
from tidelog.stream.stream import Stream

_LAYOUT = Struct(">qqqq")
KEPT_ENTRIES = 1024
"""Number of entries that stay in memory at least."""
"""Entries kept in memory: 32 KiB of payload for a partition with many aborts."""


class AbortedTxn(NamedTuple):
    """One aborted transaction. Offsets int64."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class TxnIndex:
    """The aborted transactions of one partition."""

    __slots__ = ("_index", "_tail", "_tail_start", "_waiting")

    def __init__(self, stream: Stream) -> None:
        self._index = IndexStream(stream, _LAYOUT)
        self._tail: list[AbortedTxn] | None = None
        """The newest entries, including those that wait for the stream; None before the first lookup."""
        self._tail_start = stream.next_offset
        self._waiting = 0

    @property
    def stream(self) -> Stream:
        """Return the underlying stream."""
        return self._index.stream

    @property
    def waiting(self) -> int:
        """Return the number of entries that are not on the stream yet."""
        return self._waiting

    def add(self, entry: AbortedTxn) -> None:
        """Add the newest entry; `flush` writes it to the stream."""
        if self._tail is None:
            self._tail = []
        self._tail.append(entry)
        self._waiting += 1

    def flush(self) -> int:
        """Write waiting entries. Returns the WAL end, or 0. Raises `WalFull`, `Overloaded`, `WalFailed`."""
        if not self._waiting:
            return 0
        assert self._tail is not None
        wal_end = self._index.append(self._tail[-self._waiting :])
        self._waiting = 0
        if len(self._tail) > 2 * KEPT_ENTRIES:
            cut = len(self._tail) - KEPT_ENTRIES
            del self._tail[:cut]
            self._tail_start += cut
        return wal_end

    def lookup_hot(self, start_offset: int, end_offset: int) -> list[AbortedTxn] | None:
        """As `lookup`, from memory; None if the entries in memory do not suffice."""
        stream, tail = self.stream, self._tail
        if not tail:
            return [] if stream.next_offset == stream.start_offset else None
        if self._tail_start > stream.start_offset and tail[0].last_offset >= start_offset:
            return None
        found: list[AbortedTxn] = []
        _collect(tail, start_offset, end_offset, found)
        return found

    async def lookup(self, start_offset: int, end_offset: int) -> list[AbortedTxn]:
        """Return aborted transactions that overlap offsets `[start_offset, end_offset)`, by marker.

        Raises `CorruptData`, `Unavailable`.
        """
        await self._load_tail()
        hot = self.lookup_hot(start_offset, end_offset)
        if hot is not None:
            return hot
        stream, tail, tail_start = self.stream, list(self._tail or ()), self._tail_start
        at = await self._index.first_where(stream.start_offset, tail_start, lambda row: row[2] >= start_offset)
        found: list[AbortedTxn] = []
        while at < tail_start:
            rows = [AbortedTxn._make(row) for row in await self._index.read(at, tail_start)]
            if _collect(rows, start_offset, end_offset, found):
                return found
            at += len(rows)
        _collect(tail, start_offset, end_offset, found)
        return found

    async def last_offset(self) -> int:
        """Return the last offset of the newest entry, or -1."""
        stream = self.stream
        if stream.next_offset == stream.start_offset:
            return -1
        return (await self._index.read(stream.next_offset - 1, stream.next_offset))[0][2]

    async def cut(self, end_offset: int) -> None:
        """Remove the entries of transactions that end at `end_offset` or later, because their records are gone.

        The others are written again behind all, and are durable before anything is trimmed. After a crash in between
        there are both; the next call keeps one of each. Called before `add` and lookups. Raises `WalFull`,
        `Overloaded`, `WalFailed`, `CorruptData`, `Unavailable`.
        """
        assert self._tail is None
        stream, kept, newest = self.stream, array("q"), -1
        at, end = stream.start_offset, stream.next_offset
        while at < end:
            rows = await self._index.read(at, end)
            at += len(rows)
            for row in rows:
                if newest < row[2] < end_offset:
                    newest = row[2]
                    kept.extend(row)
        width = len(AbortedTxn._fields)
        if len(kept) == width * (end - stream.start_offset):
            return
        for first in range(0, len(kept), width * KEPT_ENTRIES):
            numbers = iter(kept[first : first + width * KEPT_ENTRIES])
            wal_end = self._index.append(list(zip(*[numbers] * width, strict=True)))
            await stream.wait_confirmed(wal_end)
        await stream.trim(end)
        self._tail_start = stream.next_offset

    async def trim_point(self, log_start_offset: int) -> int:
        """Return the index to which the stream can be trimmed: the first entry that reaches `log_start_offset`.

        Raises `CorruptData`, `Unavailable`, unless that entry is in memory.
        """
        stream, tail = self.stream, self._tail
        if tail and tail[0].last_offset < log_start_offset:  # so is all that is not in memory
            gone = sum(entry.last_offset < log_start_offset for entry in tail)
            return min(self._tail_start + gone, stream.next_offset)
        return await self._index.first_where(
            stream.start_offset, stream.next_offset, lambda row: row[2] >= log_start_offset
        )

    async def _load_tail(self) -> None:
        if self._tail:
            return
        stream = self.stream
        end = stream.next_offset
        start = at = max(stream.start_offset, end - KEPT_ENTRIES)
        rows: list[AbortedTxn] = []
        while at < end:
            rows += [AbortedTxn._make(row) for row in await self._index.read(at, end)]
            at = start + len(rows)
        # Others may have loaded the same meanwhile, which would be told twice then, or entries were added, which come
        # after these.
        if self._tail_start == end:
            self._tail, self._tail_start = [*rows, *(self._tail or ())], start


def _collect(rows: list[AbortedTxn], start_offset: int, end_offset: int, found: list[AbortedTxn]) -> bool:
    """Add overlapping entries to `found`. Returns whether no later entry can overlap."""
    for entry in rows:
        if entry.last_offset >= start_offset and entry.first_offset < end_offset:
            found.append(entry)
        if entry.last_stable_offset >= end_offset:
            return True
    return False

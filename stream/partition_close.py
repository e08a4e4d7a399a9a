"""The last records of a partition log: the clean checkpoint, and for a move all that the next owner has to read.

They are written in bounded steps, between which the loop is free, and wait for room in a full WAL for a while. A log
that could not write them is opened by a scan; nothing is lost.

Entry: `LastRecords`, `when_there_is_room`, `Note`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tidelog.runtime.errors import Overloaded
from tidelog.storage.records import StreamEntry
from tidelog.stream.partition_state import PartitionState

if TYPE_CHECKING:
    from tidelog.storage.storage import Storage

META_TAIL_BYTES = 1 << 20
"""A partition with larger metadata (thousands of segments or producers) is opened from the bucket."""
DATA_TAIL_BYTES = 256 << 10
"""The newest batches, which consumers at the end of the log request first."""
_CLOSE_WAIT_S = 10.0
"""How long a close waits for space in the WAL. Without a clean record the next open scans; nothing is lost."""


Note = Callable[[], bytes]
"""Makes what a partition's user passes on to its user at the next leader, beside the records: opaque bytes."""


def no_note() -> bytes:
    """Return nothing to pass on."""
    return b""


class ClosedLog(NamedTuple):
    """End offsets of a log that was closed for a move, and the records that its next owner reads first."""

    end_offsets: tuple[int, int, int, int]
    """End offsets of the meta, data, time and txn streams."""
    meta_start: int
    """The next owner need not read the meta stream below this offset."""
    tails: dict[int, list[StreamEntry]]
    """By stream id: the meta stream from `meta_start` on, the newest batches of the data stream. Confirmed. Empty if
    not all of it is in memory, or if it exceeds `META_TAIL_BYTES`."""


class LastRecords:
    """Writes the last records of a log that takes no more batches."""

    __slots__ = ("_keys", "_meta_start", "_state", "_tails", "wal_end")

    def __init__(self, state: PartitionState) -> None:
        self._state = state
        self._meta_start = state.meta.stream.start_offset
        self._keys: list[str] | None = None
        self._tails: dict[int, list[StreamEntry]] = {}
        self.wal_end = 0
        """WAL end of what was written; 0 if nothing was."""

    def write_clean(self) -> bool:
        """Do one bounded step towards the checkpoint with the clean flag. Returns whether it is written."""
        state = self._state
        if not state.dirty:
            return True
        if state.write_producers_to(state.data.next_offset):
            return False
        self.wal_end = state.checkpoint(clean=True)
        return True

    def write_for_move(self) -> bool:
        """As `write_clean`, and then write the whole meta stream again."""
        if not self.write_clean():
            return False
        meta, data = self._state.meta, self._state.data
        if self._keys is None:
            self.wal_end = max(self.wal_end, meta.rewrite(meta.keys()[:1]))  # ahead of the end that a cut has told
            self._meta_start, self._keys = meta.stream.next_offset, meta.keys()
        self.wal_end = max(self.wal_end, meta.rewrite(self._keys))
        if self._keys:
            return False
        self._tails[meta.stream.stream_id] = _from(self._meta_start, meta.stream.tail(META_TAIL_BYTES))
        self._tails[data.stream_id] = data.tail(DATA_TAIL_BYTES)
        return True

    def closed_log(self) -> ClosedLog:
        """Return what the next owner is told, after `write_for_move` and the close."""
        state = self._state
        ends = (
            state.meta.stream.next_offset,
            state.data.next_offset,
            state.time.stream.next_offset,
            state.txn.stream.next_offset,
        )
        return ClosedLog(ends, self._meta_start, self._tails)


async def when_there_is_room(storage: Storage, write: Callable[[], bool], name: str) -> None:
    """Call `write` until it returns True; the loop is free between the calls.

    Raises `Overloaded`, `WalFull` if there is no room for long, and what `write` raises. `name` is for the error.
    """
    refused: Overloaded | None = None
    try:
        async with asyncio.timeout(_CLOSE_WAIT_S):
            while True:
                try:
                    if write():
                        return
                except Overloaded as error:
                    refused = error
                    await storage.writable()
                await asyncio.sleep(0)
    except TimeoutError:
        raise refused or Overloaded(f"{name} took {_CLOSE_WAIT_S:.0f} s to close") from None


def _from(offset: int, records: list[StreamEntry]) -> list[StreamEntry]:
    """Return the records from `offset` on, or none if one of them is missing."""
    kept = [record for record in records if record.base_offset >= offset]
    return kept if kept and kept[0].base_offset == offset else []

"""One open stream: its identity, its epoch and its next offset, over this process's storage.

Invariant: `start_offset` ≤ `next_offset`; an append takes exactly `[next_offset, next_offset + count)`. Appends are
fenced by the stream's epoch at the WAL's recovery, at the upload's commit and at the controller (rule 4).

Entry: `Stream.open`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidelog.runtime.errors import CorruptData
from tidelog.runtime.types import Buffer
from tidelog.storage.cache.log_cache import UnconfirmedRecord
from tidelog.storage.records import StreamAppend, StreamEntry
from tidelog.stream.managers import StreamManager
from tidelog.stream.opened import OpenedStream

if TYPE_CHECKING:
    from tidelog.storage.storage import Storage


class Stream:
    """An append-only sequence with int64 offsets, opened by this process."""

    __slots__ = (
        "_manager",
        "_storage",
        "_trimmed_to",
        "epoch",
        "is_opening",
        "is_released",
        "next_offset",
        "start_offset",
        "stream_id",
    )

    def __init__(
        self,
        storage: Storage,
        manager: StreamManager,
        stream_id: int,
        epoch: int,
        start_offset: int,
        next_offset: int,
        is_released: bool = False,
    ) -> None:
        self._storage = storage
        self._manager = manager
        self.stream_id = stream_id
        self.epoch = epoch
        self.start_offset = self._trimmed_to = start_offset
        """First offset kept. The other one is not larger: up to there the controller is known to have trimmed it."""
        self.next_offset = next_offset
        """Offset of the next append."""
        self.is_released = is_released
        """At opening: the stream was released from quarantine at this end, and nothing was appended since."""
        self.is_opening = False
        """Its partition is being opened, and its clients wait for that: reads do not wait for their turn."""

    @classmethod
    def open(cls, opened: OpenedStream, storage: Storage, manager: StreamManager) -> Stream:
        """Use a stream that the controller opened. Raises `StreamQuarantined`, `CorruptData`."""
        next_offset = storage.open_stream(
            opened.stream_id, opened.epoch, opened.start_offset, opened.end_offset, opened.owner_since_epoch
        )
        if next_offset < opened.start_offset:
            raise CorruptData(
                f"stream {opened.stream_id} was trimmed to {opened.start_offset} and ends at {next_offset}",
                hint="records that were not uploaded are lost with the WAL",
            )
        is_released = opened.released_at == next_offset
        return cls(storage, manager, opened.stream_id, opened.epoch, opened.start_offset, next_offset, is_released)

    @property
    def feature_level(self) -> int:
        """See `StreamManager.feature_level`."""
        return self._manager.feature_level

    def append(self, count: int, payload: Sequence[Buffer], batch_crc: int | None = None) -> tuple[int, int]:
        """Append `count` (≥ 1) offsets in one record. Returns `(base offset, WAL end to wait for)`.

        The buffers must never change again; `batch_crc` is as in `StreamAppend`. Raises `WalFull`, `Overloaded`
        (nothing was appended), `WalFailed`.
        """
        base = self.next_offset
        wal_end = self._storage.append(StreamAppend(self.stream_id, self.epoch, base, count, payload, batch_crc))
        self.next_offset = base + count
        return base, wal_end

    def read_hot(self, start_offset: int, end_offset: int, max_bytes: int) -> list[StreamEntry] | None:
        """As `read`, from memory and without waiting; None if not all of it is in memory."""
        return self._storage.read_hot(self.stream_id, start_offset, end_offset, max_bytes)

    async def read(
        self, start_offset: int, end_offset: int, max_bytes: int, *, is_urgent: bool = False
    ) -> list[StreamEntry]:
        """Return whole appends from the one that contains `start_offset`, at least one, none at or past `end_offset`.

        `is_urgent`, or while its partition is being opened: as `BlockReader.read` has it.

        Raises `CorruptData`, `Unavailable`, `OffsetTrimmed`.
        """
        is_urgent = is_urgent or self.is_opening
        return await self._storage.read(self.stream_id, start_offset, end_offset, max_bytes, is_urgent=is_urgent)

    def tail(self, max_bytes: int) -> list[StreamEntry]:
        """Return the newest records in memory that fit into `max_bytes`, in order; they may be unconfirmed."""
        return self._storage.tail(self.stream_id, max_bytes)

    def unconfirmed(self) -> list[UnconfirmedRecord]:
        """Return the records at its end that the WAL held when it was opened and that are not confirmed, in order."""
        return self._storage.unconfirmed(self.stream_id)

    async def wait_confirmed(self, wal_end: int) -> None:
        """Return when what was appended up to `wal_end` is confirmed. Raises `WalFailed`, and what ends the term."""
        await self._storage.confirm.wait(wal_end)

    async def trim(self, start_offset: int) -> None:
        """Delete the records before `start_offset` (≤ next offset). Raises `Fenced`, `Unavailable`: call it again.

        The controller may do it, whatever becomes of its answer: the stream counts as trimmed from here on.
        """
        assert start_offset <= self.next_offset
        if start_offset <= self._trimmed_to:
            return
        storage = self._storage
        self.start_offset = max(self.start_offset, start_offset)
        await self._manager.trim_stream(
            storage.replica_set_id, storage.master_epoch, self.stream_id, self.epoch, start_offset
        )
        if start_offset > self._trimmed_to:
            self._trimmed_to = start_offset
            storage.set_trimmed(self.stream_id, start_offset)

    def drop(self) -> None:
        """Discard records that are not uploaded, because the stream was deleted."""
        self._storage.drop_stream(self.stream_id)

    async def close(self) -> None:
        """Take no more appends. Appended records are still uploaded."""
        self._storage.close_stream(self.stream_id)

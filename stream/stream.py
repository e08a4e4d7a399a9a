"""One open stream: its identity, its epoch and its next offset, over the storage that this process keeps.

Invariant: `start_offset` ≤ `next_offset`; an append takes exactly `[next_offset, next_offset + count)`. Appends are
fenced by the stream's epoch at the WAL's recovery, at the upload's commit and at the controller (rule 4).

Entry: `Stream.open`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.errors import CorruptData
from storage.object_store import Buffer
from storage.records import StreamRecord
from stream.managers import OpenedStream, StreamManager

if TYPE_CHECKING:
    from storage.storage import Storage


class Stream:
    """An append-only sequence with int64 offsets, open for this process."""

    __slots__ = ("_manager", "_storage", "epoch", "is_released", "next_offset", "start_offset", "stream_id")

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
        self.start_offset = start_offset
        """First offset kept."""
        self.next_offset = next_offset
        """What the next append gets."""
        self.is_released = is_released
        """As of opening: an operator let it go on here without what it held beyond, and nothing was appended since."""

    @classmethod
    def open(cls, opened: OpenedStream, storage: Storage, manager: StreamManager) -> Stream:
        """Take over a stream that the controller opened. Raises `StreamQuarantined`, `CorruptData`."""
        next_offset = storage.open_stream(
            opened.stream_id, opened.epoch, opened.start_offset, opened.end_offset, opened.owner_since_epoch
        )
        if next_offset < opened.start_offset:
            raise CorruptData(
                f"stream {opened.stream_id} was trimmed to {opened.start_offset} and ends at {next_offset}",
                hint="records that were not in the bucket yet are lost with their WAL",
            )
        is_released = opened.released_at == next_offset
        return cls(storage, manager, opened.stream_id, opened.epoch, opened.start_offset, next_offset, is_released)

    def append(self, count: int, payload: Sequence[Buffer], batch_crc: int | None = None) -> tuple[int, int]:
        """Append `count` (≥ 1) offsets in one record; `(base offset, WAL end to wait for)`.

        The buffers must never change again; `batch_crc` is as in `Storage.append`. Raises `WalFull`, `Overloaded`
        (nothing was appended), `WalFailed`.
        """
        base = self.next_offset
        wal_end = self._storage.append(self.stream_id, self.epoch, base, count, payload, batch_crc)
        self.next_offset = base + count
        return base, wal_end

    def read_hot(self, start_offset: int, end_offset: int, max_bytes: int) -> list[StreamRecord] | None:
        """As `read`, from memory, at once; None if it is not all there."""
        return self._storage.read_hot(self.stream_id, start_offset, end_offset, max_bytes)

    async def read(self, start_offset: int, end_offset: int, max_bytes: int) -> list[StreamRecord]:
        """Whole appends from the one that contains `start_offset`, at least one, none at or past `end_offset`.

        Raises `CorruptData`, `Unavailable`, `OffsetTrimmed`.
        """
        return await self._storage.read(self.stream_id, start_offset, end_offset, max_bytes)

    def tail(self, max_bytes: int) -> list[StreamRecord]:
        """The newest records in memory that fit into `max_bytes`, in order; perhaps not confirmed yet."""
        return self._storage.tail(self.stream_id, max_bytes)

    async def trim(self, start_offset: int) -> None:
        """Give up what lies before `start_offset` (≤ next offset). Raises `Fenced`, `Unavailable`."""
        assert start_offset <= self.next_offset
        if start_offset <= self.start_offset:
            return
        await self._manager.trim_stream(self.stream_id, self.epoch, start_offset)
        if start_offset > self.start_offset:
            self.start_offset = start_offset
            self._storage.set_trimmed(self.stream_id, start_offset)

    def drop(self) -> None:
        """The stream was deleted: what is not uploaded need not be."""
        self._storage.drop_stream(self.stream_id)

    async def close(self) -> None:
        """Take no more appends here. What was appended is still uploaded."""
        self._storage.close_stream(self.stream_id)

"""A WAL whose bytes outlive it: `WalMedia` is the disk, `FakeWal` the process that has it open.

Drop a `FakeWal` without closing it and open another one on the same media: that is a crash. What was not durable is
gone. Records are durable one turn of the loop after their append, or when `sync` is called with `auto_sync` off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from tidelog.storage.records import StreamAppend
from tidelog.storage.wal.base import WalFailed, WalFull, WalRecord, WalRecordType
from tidelog.storage.wal.epochs import EpochHistory

HEADER = 10


@dataclass
class WalMedia:
    """What is on the disk."""

    records: list[WalRecord] = field(default_factory=list)
    start: int = 0
    end: int = 0
    trims: list[int] = field(default_factory=list)


class FakeWal:
    """See `tidelog.storage.wal.base.Wal`."""

    def __init__(
        self, media: WalMedia, *, max_bytes: int = 1 << 40, auto_sync: bool = True, full_epochs: int = 0
    ) -> None:
        self.media = media
        self.max_bytes = max_bytes
        self.auto_sync = auto_sync
        self.full_epochs = full_epochs
        """How many of the next `begin_epoch` raise `WalFull`."""
        self.closed = False
        self.start_offset = self.end_offset = self.durable_offset = 0
        self.master_epoch = -1
        self.epoch_history = EpochHistory()
        self.missing_files: tuple[str, ...] = ()
        self.noted = 0
        self._queue: list[WalRecord] = []
        self._scheduled = False
        self._failed = False
        self._room = asyncio.Event()
        self._on_durable: Callable[[int], None] = lambda _offset: None
        self._on_failed: Callable[[Exception], None] = lambda _error: None

    async def recover(self, on_record: Callable[[WalRecord], None]) -> int:
        for record in self.media.records:
            on_record(record)
        self.start_offset = self.media.start
        self.end_offset = self.durable_offset = self.media.end
        return self.start_offset

    async def reset(self, offset: int, kept_as: str = "") -> None:
        self.media.records.clear()
        self.media.start = self.media.end = offset
        self.start_offset = self.end_offset = self.durable_offset = offset

    async def begin_epoch(self, epoch: int) -> None:
        if self.full_epochs:
            self.full_epochs -= 1
            raise WalFull("full on purpose")
        assert epoch > self.master_epoch
        self.master_epoch = epoch
        self._add(WalRecordType.EPOCH_START, StreamAppend(0, 0, 0, 0, ()), b"")
        self.sync()

    @property
    def synced_offset(self) -> int:
        return self.durable_offset

    def append(self, record: StreamAppend) -> int:
        if self._failed or self.closed:
            raise WalFailed("failed on purpose")
        body = b"".join(record.payload)
        if self.end_offset - self.start_offset + HEADER + len(body) > self.max_bytes:
            raise WalFull("at the bound")
        self._add(WalRecordType.DATA, record, body)
        if self.auto_sync and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.sync)
        return self.end_offset

    def _add(self, kind: WalRecordType, record: StreamAppend, body: bytes) -> None:
        offset, end = self.end_offset, self.end_offset + HEADER + len(body)
        self._queue.append(
            WalRecord(
                offset,
                end,
                kind,
                self.master_epoch,
                record.stream_id,
                record.stream_epoch,
                record.base_offset,
                record.count,
                memoryview(body),
            )
        )
        self.end_offset = end

    def sync(self) -> None:
        """Make what was appended durable."""
        self._scheduled = False
        if self._failed or self.durable_offset == self.end_offset:
            return
        self.media.records += self._queue
        self._queue = []
        self.durable_offset = self.media.end = self.end_offset
        self._on_durable(self.durable_offset)

    def kill(self) -> None:
        """The process is gone: nothing it had in memory reaches the disk."""
        self._failed = True

    def fail(self) -> None:
        """The disk is gone."""
        self._failed = True
        self._on_failed(WalFailed("failed on purpose"))

    async def writable(self, payload_bytes: int = 0) -> None:
        while self.end_offset - self.start_offset + HEADER + payload_bytes > self.max_bytes:
            self._room.clear()
            await self._room.wait()

    def set_on_durable(self, callback: Callable[[int], None]) -> None:
        self._on_durable = callback

    def set_on_failed(self, callback: Callable[[Exception], None]) -> None:
        self._on_failed = callback

    def note_confirmed(self, confirm_offset: int) -> None:
        self.noted = confirm_offset

    async def trim(self, offset: int) -> None:
        assert offset <= self.durable_offset
        assert not self.media.trims or offset >= self.media.trims[-1]
        await asyncio.sleep(0)
        self.media.trims.append(offset)
        self.media.records = [record for record in self.media.records if record.end_offset > offset]
        self.media.start = self.start_offset = max(self.start_offset, offset)
        self._room.set()

    async def close(self) -> None:
        self.sync()
        self.closed = True

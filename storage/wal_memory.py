"""`MemoryWal`: a WAL that keeps offsets and no bytes, for tests and for replica sets that trust replication alone.

What is appended is durable as soon as the loop has turned once, in the sense of this backend: as durable as the memory
of this process. The records themselves live in the log cache. A restart recovers nothing; `reset` puts the empty log at
the WAL offset that the bucket covers.

Entry: `MemoryWal`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from runtime.errors import Closed, Fenced, InvalidInput
from storage.epoch_history import EpochHistory
from storage.object_store import Buffer
from storage.settings import WalSettings
from storage.wal import WalFull, WalRecord
from storage.wal_format import HEADER_BYTES


class MemoryWal:
    """See `storage.wal.Wal`. Offsets advance as those of `DiskWal` do, header included."""

    def __init__(self, settings: WalSettings, *, start_offset: int = 0) -> None:
        self._max_bytes = settings.max_bytes
        self._max_record_bytes = settings.max_record_bytes
        self._start = self._end = self._durable = start_offset
        self._epoch = -1
        self._history = EpochHistory()
        self._report_scheduled = False
        self._closed = False
        self._room = asyncio.Event()
        self._on_durable: Callable[[int], None] = lambda _offset: None

    @property
    def start_offset(self) -> int:
        """See `Wal.start_offset`."""
        return self._start

    @property
    def end_offset(self) -> int:
        """See `Wal.end_offset`."""
        return self._end

    @property
    def durable_offset(self) -> int:
        """See `Wal.durable_offset`."""
        return self._durable

    @property
    def master_epoch(self) -> int:
        """See `Wal.master_epoch`."""
        return self._epoch

    @property
    def epoch_history(self) -> EpochHistory:
        """The epochs of this log; do not change it."""
        return self._history

    def stats(self) -> dict[str, int]:
        """Figures for metrics; bytes."""
        return {"record_bytes": self._end - self._start, "unsynced_bytes": self._end - self._durable}

    async def recover(self, on_record: Callable[[WalRecord], None]) -> int:
        """See `Wal.recover`: there is never anything to recover."""
        return self._start

    async def reset(self, offset: int) -> None:
        """Start over, empty, at WAL offset `offset`, before `begin_epoch`."""
        assert self._epoch < 0
        self._start = self._end = self._durable = offset

    async def begin_epoch(self, epoch: int) -> None:
        """See `Wal.begin_epoch`. Raises `Fenced` for an epoch that is not newer."""
        if epoch <= self._history.last_epoch:
            raise Fenced(f"master epoch {epoch} is not newer than {self._history.last_epoch}, which the WAL has seen")
        self._history.append(epoch, self._end)
        self._epoch = epoch
        self._advance(HEADER_BYTES)
        self._report()

    def append(
        self,
        stream_id: int,
        stream_epoch: int,
        base_offset: int,
        count: int,
        payload: Sequence[Buffer],
        batch_crc: int | None = None,
    ) -> int:
        """See `Wal.append`."""
        if self._closed:
            raise Closed("the WAL is closed")
        assert self._epoch >= 0, "begin_epoch comes before append"
        length = sum(map(len, payload))
        if length > self._max_record_bytes:
            raise InvalidInput(f"a WAL record of {length} bytes is over the limit of {self._max_record_bytes}")
        if not self._has_space(length):
            raise WalFull("the WAL is at its bound (wal.max_bytes)", hint="retry; uploads to the bucket make room")
        self._advance(HEADER_BYTES + length)
        return self._end

    async def writable(self, payload_bytes: int = 0) -> None:
        """Wait until an append of `payload_bytes` would not raise `WalFull`. Raises `Closed`."""
        while not self._closed and not self._has_space(payload_bytes):
            self._room.clear()
            await self._room.wait()
        if self._closed:
            raise Closed("the WAL is closed")

    def set_on_durable(self, callback: Callable[[int], None]) -> None:
        """See `Wal.set_on_durable`."""
        self._on_durable = callback

    def set_on_failed(self, callback: Callable[[Exception], None]) -> None:
        """See `Wal.set_on_failed`: memory does not fail."""

    def note_confirmed(self, confirm_offset: int) -> None:
        """See `Wal.note_confirmed`: no header carries it."""

    async def trim(self, offset: int) -> None:
        """See `Wal.trim`."""
        assert offset <= self._durable
        if offset > self._start:
            self._start = offset
            self._history.forget_before(offset)
            self._room.set()

    async def close(self) -> None:
        """See `Wal.close`."""
        self._report()
        self._closed = True
        self._room.set()

    def _has_space(self, length: int) -> bool:
        return self._end - self._start + HEADER_BYTES + length <= self._max_bytes

    def _advance(self, size: int) -> None:
        self._end += size
        if not self._report_scheduled:
            self._report_scheduled = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._report_scheduled = False
        if self._durable < self._end:
            self._durable = self._end
            self._on_durable(self._durable)
